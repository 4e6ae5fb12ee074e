"""The command line: all options (`config`), flags and presets (`cli`), flags of other systems, checks of options
(`validate`) and layouts (`resolve`).

Imports no torch. Begin with `cli`.
"""
