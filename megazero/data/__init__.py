"""Data: token files, epochs, samples, blending, tokenizers, the loader.

Imports `config`, `comm`, `files`. Begin with `samples`.
"""
