"""pretrain_gpt.py, of which one rank is struck inside its first save: worker|interrupt RANK FLAGS...

`worker`: its data worker is killed while it exchanges messages with the other ranks. `interrupt`: a second SIGINT comes
while it writes.
"""

import multiprocessing
import os
import signal
import sys
import time

import pretrain_gpt
from megazero.checkpoint import agreement, tensor_file

how, rank = sys.argv[1:3]


def lose_worker(*_):
    (worker,) = multiprocessing.active_children()
    worker.kill()
    while True:  # until the signal's handler raises
        time.sleep(0.01)


def interrupt(*_):
    while True:
        os.kill(os.getpid(), signal.SIGINT)


if os.environ["RANK"] == rank:
    if how == "worker":
        agreement.gather = lose_worker
    else:
        tensor_file.host_bytes = interrupt
pretrain_gpt.main(sys.argv[3:])
