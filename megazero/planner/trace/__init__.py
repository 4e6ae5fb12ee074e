"""Costs of layers, found by running them on stand-in tensors."""
