"""Communication: launch and stop (`launch`), collectives along one mesh axis (`collectives`), all axes (`mesh`), failed
peers (`errors`, `failures`), ranks that are not alike (`agreement`), buffers in flight (`in_flight`).

The only folder, besides `checkpoint`, that imports torch.distributed. Imports `plan`. Begin with `collectives.Axis`.
"""
