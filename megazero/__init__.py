"""megazero: GPT pretraining with tensor parallelism, pipeline parallelism and ZeRO.

docs/architecture.md describes the folders. `make check` keeps imports one-way.
"""

from megazero.environment import set_defaults

set_defaults()  # programs import megazero before torch
