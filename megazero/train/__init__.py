"""Training: one rank's engine, the run around it, metrics and loggers.

Imports everything else. Begin with `trainer`.
"""
