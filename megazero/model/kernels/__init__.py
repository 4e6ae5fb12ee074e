"""Operations that a GPU computes in one pass over memory: by torch's operators (`eager`) and by Triton (`triton_*`).

Imports torch, triton at the first launch, and no layers. Begin with `table`: the choice between the two is a value in
`Context`. `operators` makes torch operators of the Triton kernels, so that a trace on stand-ins records them.
"""
