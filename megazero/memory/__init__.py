"""Memory: the tracker that counts it by kind, pools of equal buffers, copies to the host and back, fragmentation.

Imports nothing else of megazero. Begin with `tracker`.
"""

COPY_DEPTH = 2  # device buffers each way between a GPU and host memory: one in use, one in flight
