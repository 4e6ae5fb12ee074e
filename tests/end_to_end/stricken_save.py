"""pretrain_gpt.py, of which one rank takes a second SIGINT while it writes its first save: RANK FLAGS..."""

import os
import signal
import sys

import pretrain_gpt
from megazero.checkpoint import tensor_file


def interrupt(*_):
    while True:
        os.kill(os.getpid(), signal.SIGINT)


if os.environ["RANK"] == sys.argv[1]:
    tensor_file.host_bytes = interrupt
pretrain_gpt.main(sys.argv[2:])
