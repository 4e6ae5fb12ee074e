"""Operators of layers in torch (`eager`) and Triton (`triton`), matrix products, dropout, initial values.

Begin with `kernel_table`: the choice between torch and Triton is
a value in `Context`. `operators` registers the Triton kernels with torch, so that a trace on stand-ins records them.
"""
