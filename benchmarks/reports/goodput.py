"""Goodput of a job whose ranks fail, by the interval between its saves: Young 1974, Daly 2006. Pure.

A failure of any rank ends the job, which resumes from its last checkpoint. Failures are independent, and rare against
the interval (first order).
"""

from __future__ import annotations

import math

# Llama 3 405B (arXiv 2407.21783, section 3.3.4): 419 unexpected interruptions in 54 days on 16,384 GPUs
LLAMA_3_DEVICE_HOURS = 54 * 24 * 16_384 / 419


def mean_time_between_failures(devices: int, device_hours: float = LLAMA_3_DEVICE_HOURS) -> float:
    """Return the seconds between failures of a job, where a device fails once in `device_hours`."""
    return 3600 * device_hours / devices


def best_interval(stall: float, between_failures: float) -> float:
    """Return Young's interval between saves, each of which stops training for `stall` seconds."""
    return math.sqrt(2 * stall * between_failures)


def goodput(interval: float, stall: float, restart: float, between_failures: float) -> float:
    """Return the share of the time in which a job does work that it does not do again.

    Args:
        interval: seconds between saves.
        stall: seconds that training stops for a save.
        restart: seconds from a failure until the job trains again.
        between_failures: mean seconds between failures.
    """
    lost = stall / interval + (interval / 2 + restart) / between_failures
    return max(0.0, 1 - lost)
