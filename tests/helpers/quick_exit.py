"""Workers of xdist end without their last garbage collections; the session would wait ten seconds for them.

Import this module first: functions that are registered at exit later run earlier, and so are not left out.
"""

import atexit
import os

WORKERS: set[int] = set()  # the id of this process, if it is a worker; a process that it forks is none


@atexit.register
def _end() -> None:
    if os.getpid() in WORKERS:
        os._exit(0)
