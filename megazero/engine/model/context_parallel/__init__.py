"""Attention over the tokens of all context-parallel ranks."""
