"""Configuration: the dataclass tree (`schema`), flags and presets (`cli`), checks of flags alone (`validate`).

Imports nothing else of megazero. Begin with `schema`.
"""
