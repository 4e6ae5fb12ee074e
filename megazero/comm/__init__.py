"""Communication: ranks that start and end (`launch`), the mesh with its axes and collectives (`mesh`).

The only folder, besides `checkpoint`, that imports torch.distributed. Imports `plan`. Begin with `mesh.collectives`.
"""
