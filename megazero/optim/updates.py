"""Updates by the name of their rule in `config.optimizers`. To add one: its module, a line here and there."""

from __future__ import annotations

from megazero.optim import adamw
from megazero.optim.step import Update

UPDATES: dict[str, Update] = {"adamw": adamw.update}
