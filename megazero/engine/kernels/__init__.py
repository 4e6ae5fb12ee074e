"""Operators of layers in torch (`eager`) and Triton (`triton_*`), matrix products, dropout, initial values.

Imports `comm` and all below, and triton at its first launch. Begin with `table`: the choice between torch and Triton is
a value in `Context`. `operators` registers the Triton kernels with torch, so that a trace on stand-ins records them.
"""
