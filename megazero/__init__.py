"""megazero: GPT pretraining with tensor parallelism, pipeline parallelism and ZeRO.

| folder | what lives there |
|---|---|
| `config` | the dataclass tree, flags and presets, validation of flags |
| `memory` | the memory tracker, buffer pools, copies to the host, fragmentation |
| `plan` | pure, without torch: topology, schedules, flat buffers, ZeRO policy, regions of tensors |
| `comm` | launch and stop, `Axis` with all collectives, `Mesh` |
| `model` | layers, initial values, dropout, matrix products |
| `optim` | updates of optimizers |
| `zero` | sharded parameters, gradients and optimizer states |
| `activations` | inputs kept for recompute |
| `price` | predicted memory and traffic |
| `checkpoint` | sharded checkpoints |
| `data` | token files, samples, tokenizers, the loader |
| `train` | engine, trainer, loggers |

A folder imports only folders above it in this table; `pyproject.toml` has the contract, `make check` holds it.
"""

from megazero.environment import set_defaults

set_defaults()  # programs import megazero before torch
