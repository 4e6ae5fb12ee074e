"""A training step: the engine, the interpreter of its program, its batch, its loss scale.

Begin with `engine`.
"""
