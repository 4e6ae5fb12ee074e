"""Generation of text: the loop, draws of tokens, and a checkpoint's model on any layout.

Begin with `generate`.
"""
