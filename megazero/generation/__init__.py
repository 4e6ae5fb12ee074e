"""Generation of text: the loop, draws of tokens, and a checkpoint's model on any layout.

Imports everything else but `huggingface`. Begin with `generate`.
"""
