"""Data: token files, epochs, samples, blending, tokenizers, the loader.

Begin with `samples`.
"""
