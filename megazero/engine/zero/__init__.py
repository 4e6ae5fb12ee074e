"""ZeRO-DP: parameters, gradients and optimizer states, sharded over data-parallel ranks.

Imports `model` and all below. Begin with the table in `engine.zero.zero`.
"""
