"""Models: parts (`layers`), operators (`kernels`), families (`architectures`); a rank's layers (`stage`).

Imports `comm`, `plan`, `config`, `memory`. Begin with `architectures.gpt2`.
"""
