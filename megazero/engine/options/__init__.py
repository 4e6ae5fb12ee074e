"""Options of a step: the dataclass tree (`schema`), bounds, traits of models. Pure.

Begin with `schema`.
"""
