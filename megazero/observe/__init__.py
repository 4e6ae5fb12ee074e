"""Reports of a run: the start screen, metrics, progress, events, traces, slow and hanging ranks.

Begin with `loggers`.
"""
