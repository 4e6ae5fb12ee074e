"""Why a run ends before its last iteration."""

from __future__ import annotations


class DeadRun(Exception):
    """The run makes no progress: its weights are not finite, or too many iterations in a row made no update."""
