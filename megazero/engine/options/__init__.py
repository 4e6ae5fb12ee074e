"""Options of a step: the dataclass tree (`schema`), bounds. Pure.

Begin with `schema`.
"""
