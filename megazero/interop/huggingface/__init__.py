"""Checkpoints as Hugging Face models, and back: names, files, tokenizers. One tensor is in memory at a time.

Imports everything else. Begin with `architectures`: one table per architecture.
"""
