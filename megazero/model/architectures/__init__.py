"""Architectures: which layers a model has."""
