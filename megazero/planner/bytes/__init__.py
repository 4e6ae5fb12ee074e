"""Bytes of memory and traffic of a rank over a step."""
