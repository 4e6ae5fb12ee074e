"""Options of a run: the dataclass tree (`schema`), bounds, traits of models. Pure.

Begin with `schema`.
"""
