"""Predictions without running: bytes of memory and traffic of one rank, seconds, FLOPs, and their reports.

Nothing that trains needs them. Begin with `bytes.estimate`.
"""
