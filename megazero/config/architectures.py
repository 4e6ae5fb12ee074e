"""Architectures by name. To add one: its module, a line here, presets; see docs/add-an-architecture.md."""

from __future__ import annotations

# name -> the module whose ARCHITECTURE says which layers a model is made of. By name, since configurations and plans
# import no torch, and a run imports only its own.
ARCHITECTURES = {
    "gpt2": "megazero.model.gpt2",
}
