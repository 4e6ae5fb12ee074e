"""Communication: launch and stop (`launch`), collectives along one mesh axis (`collectives`), all axes (`mesh`).

The only folder, besides `checkpoint`, that imports torch.distributed. Imports `plan`. Begin with `collectives.Axis`.
"""
