"""Models: parts (`layers`), families (`architectures`), the layers of a rank (`stage`).

Imports `kernels` and all below. Begin with `block`.
"""
