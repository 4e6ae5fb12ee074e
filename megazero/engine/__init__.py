"""Training of one step: its program, layers and ZeRO. It imports no wing; docs/tour.md walks it. Begin with `step.engine`."""
