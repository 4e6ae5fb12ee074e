"""The fastest layouts of a model on a cluster."""
