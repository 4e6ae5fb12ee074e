"""pretrain_gpt.py, of which one rank is struck inside its first save: error|interrupt RANK FLAGS...

`error`: an error of its own comes while it exchanges messages with the other ranks. `interrupt`: a second SIGINT comes
while it writes.
"""

import os
import signal
import sys

import pretrain_gpt
from megazero.checkpoint import agreement, tensor_file

how, rank = sys.argv[1:3]


def fail(*_):
    raise RuntimeError("struck between two messages")


def interrupt(*_):
    while True:
        os.kill(os.getpid(), signal.SIGINT)


if os.environ["RANK"] == rank:
    if how == "error":
        agreement.gather = fail
    else:
        tensor_file.host_bytes = interrupt
pretrain_gpt.main(sys.argv[3:])
