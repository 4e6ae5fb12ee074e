"""Predictions without running: bytes of memory and traffic of one rank, seconds, FLOPs, and their reports.

Imports `model` and all below. Begin with `bytes.estimate`.
"""
