"""pretrain_gpt.py, of which one rank is stopped or killed in the middle of its first save: SIGNAL RANK FLAGS..."""

import os
import signal
import sys

import pretrain_gpt
from megazero.checkpoint import tensor_file

how, rank = signal.Signals[sys.argv[1]], sys.argv[2]
if os.environ["RANK"] == rank:
    tensor_file.host_bytes = lambda tensor: os.kill(os.getpid(), how)
pretrain_gpt.main(sys.argv[3:])
