"""Models: parts (`layers`, `experts`, `context_parallel`), a block, the layers of a rank (`stage`).

Begin with `block`.
"""
