"""Inputs of blocks, kept for recompute: whole, partitioned (Pa), in host memory (Pa+cpu), in an arena (MD).

Begin with `store`.
"""
