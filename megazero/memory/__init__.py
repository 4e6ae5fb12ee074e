"""Memory: the tracker that counts it by kind, pools of equal buffers, fragmentation of an allocator.

Imports nothing else of megazero. Begin with `tracker`.
"""
