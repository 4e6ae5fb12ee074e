"""Memory: the tracker that counts it by kind, pools of equal buffers, copies to the host and back.

Imports nothing else of megazero. Begin with `tracker`.
"""

BLOCKS = 2  # blocks of host memory through which states of a file pass: one is updated, one is written and read
PAGE = 4096  # bytes: files that bypass the system's cache are read and written in whole pages (O_DIRECT)
COPY_DEPTH = 2  # device buffers each way between a GPU and host memory: one in use, one in flight
