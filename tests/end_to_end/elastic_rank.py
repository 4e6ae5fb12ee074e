"""Stands in for pretrain_gpt.py in tests of agents: it counts iterations in a file, and imports no torch.

Words: the folder of the file, the iterations to do, those at which rank 0 fails (0: it refuses to start), and flags.
Rank 0 fails only once all ranks have begun, so that each has printed its line and ignores TERM.
Other ranks of its node do not hear TERM, as in a collective that hangs.
"""

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from megazero.cluster import agent_notes
from megazero.world import launched

rank, nodes = int(os.environ["RANK"]), os.environ["GROUP_WORLD_SIZE"]
count, steps = Path(sys.argv[1], "count"), int(sys.argv[2])
failing = {int(word) for word in sys.argv[3:] if word.isdigit()}


def done() -> int:
    return int(count.read_text() or 0) if count.exists() else 0


if os.environ["LOCAL_RANK"] != "0":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if 0 in failing and rank == 0:
    sys.exit("no such flag")
began = done()
print(
    f"generation {os.environ['TORCHELASTIC_RESTART_COUNT']}: {nodes} nodes, launched {launched()}, from {began}",
    flush=True,
)
agent_notes.leave(agent_notes.BEGAN, str(began))
gate = Path(sys.argv[1], f"began-{os.environ['TORCHELASTIC_RESTART_COUNT']}")
gate.mkdir(exist_ok=True)
(gate / os.environ["RANK"]).touch()
while done() < steps:
    time.sleep(0.05)
    if agent_notes.read_note(agent_notes.LOST):
        sys.exit(agent_notes.read_note(agent_notes.LOST))
    if agent_notes.read_note(agent_notes.CHANGED):
        agent_notes.leave(agent_notes.STOPPED, "STOP_NODES")
        sys.exit(75)
    if rank == 0:
        if done() in failing:
            while len(list(gate.iterdir())) < int(os.environ["WORLD_SIZE"]):
                time.sleep(0.05)
            sys.exit(f"a fault in iteration {done()}")
        part = count.with_suffix(".part")
        part.write_text(str(done() + 1))
        part.replace(count)
