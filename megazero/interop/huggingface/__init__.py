"""Checkpoints as Hugging Face models, and back: names, files, tokenizers. One tensor is in memory at a time.

Begin with `model_types`: one table per architecture.
"""
