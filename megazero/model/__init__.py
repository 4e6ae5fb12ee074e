"""Layers of the model, each on one rank's part of its weights.

Imports `comm`, `plan`, `config`, `memory`. Begin with `gpt2`.
"""
