"""Workers of xdist end without their last garbage collections, which take ten seconds, for which the session waits.

Import it before all that registers functions at exit: they run before the one below.
"""

import atexit
import os

WORKERS: set[int] = set()  # the id of this process, if it is a worker; a process that it forks is none


@atexit.register
def _end() -> None:
    if os.getpid() in WORKERS:
        os._exit(0)
