"""Text from a checkpoint: its model on any layout, a cache of keys and values, draws.

Imports everything else but `huggingface`. Begin with `generate`.
"""
