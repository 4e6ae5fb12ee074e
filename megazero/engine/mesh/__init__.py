"""The mesh: its axes, their collectives and process groups, buffers in flight."""
