"""A pretraining run around its steps: start, resume, evaluation, saving, stopping.

Begin with `trainer`.
"""
