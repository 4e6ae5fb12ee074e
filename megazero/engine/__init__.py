"""Training of one step: its program, layers and ZeRO. It imports no wing. Begin with docs/tour.md."""
