"""launch_ranks.py on a machine whose clock is ahead. Words: the seconds, then those of launch_ranks.py."""

import datetime
import importlib
import runpy
import sys
import time
from pathlib import Path

from torch.distributed.elastic.rendezvous import dynamic_rendezvous

ahead, now = float(sys.argv.pop(1)), time.time


class Fast(datetime.datetime):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
        return datetime.datetime.fromtimestamp(now() + ahead, tz)


program = Path(__file__).parents[2] / "megazero" / "cluster" / "launch_ranks.py"
sys.path.insert(0, str(program.parent))
signed_state = importlib.import_module("megazero.cluster.elastic.signed_state")
time.time = lambda: now() + ahead
dynamic_rendezvous.datetime = signed_state.datetime = Fast
runpy.run_path(str(program), run_name="__main__")
