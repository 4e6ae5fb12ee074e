"""A proof that a layout trains the same model as one process: `megazero verify FLAGS`. Begin with `verification`."""
