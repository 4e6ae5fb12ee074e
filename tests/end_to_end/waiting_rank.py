"""Waits for ever, as a data worker of its own does: WORDS of its place."""

import multiprocessing
import sys
import threading


def in_its_worker() -> None:
    print("the worker waits", flush=True)
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()


def in_the_rank() -> None:
    print(f"waits in {sys.argv[1]}", flush=True)
    threading.Event().wait()


multiprocessing.get_context("fork").Process(target=in_its_worker).start()
in_the_rank()
