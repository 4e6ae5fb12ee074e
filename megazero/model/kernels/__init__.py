"""Passes over memory that a GPU makes in one kernel instead of several: each as torch's operators, and as Triton's.

Imports torch and, where it is used, triton; of `model` only what knows no layers. Begin with `table`: the choice
between the two is a value in `Context`. `operators` makes torch operators of the Triton kernels, so that a trace on
stand-ins sees them, and `triton_*` hold the kernels.
"""
