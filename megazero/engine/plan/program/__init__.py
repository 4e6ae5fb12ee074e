"""The program of a training step: its operations, and the passes that make it. Pure: no torch."""
