"""ZeRO-DP: parameters, gradients and optimizer states, sharded over data-parallel ranks.

Begin with the table in `engine.zero.zero`.
"""
