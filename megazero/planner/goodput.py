"""Failures: how often to save, and the share of time that is not lost (--plan --mtbf). Pure.

Failures are independent and equally likely at any time, so that the time between them is exponential, with the mean of
one device divided by their number. After a failure, the run starts again from its last checkpoint, which takes
`restart` seconds; a failure during a restart begins it again.

Note [goodput]: a run works for an interval T, saves for C, and loses all of it if it fails before the end of the save.
With failures every M seconds, a stretch of T + C takes M e^(R/M) (e^((T+C)/M) - 1) seconds on average, restarts of R
included (Daly 2006, "A higher order estimate of the optimum checkpoint interval", equation 20). Goodput is T over that.
The best T is about sqrt(2 C M) (Young 1974), if that is much shorter than M.
"""

import math
from typing import NamedTuple

from megazero.flags.config import Config
from megazero.planner.bytes.capacity import checkpoint_bytes
from megazero.planner.time.devices import Device

SECONDS_PER_HOUR = 3600
# From a failure to the load of a checkpoint: noticing it, starting processes on the nodes, building groups. Assumed.
START_SECONDS = 60.0
BOTH_COPIES = 0.01  # share of failures that take both copies in memory, such as a rack's: assumed
SIZES = (64, 1024, 16384)  # devices, for comparison


class Way(NamedTuple):
    """A place of checkpoints.

    Attributes:
        name: disk or memory.
        interval: seconds of training between two saves.
        save, restart: seconds that training stops for a save, and for a failure besides the work that is lost.
        goodput: share of time in steps that are kept.
    """

    name: str
    interval: float
    save: float
    restart: float
    goodput: float


def best_interval(save: float, mtbf: float) -> float:
    """Return the seconds between saves that lose least. save: seconds of one; mtbf: between failures of the job."""
    return math.sqrt(2 * save * mtbf)


def goodput(interval: float, save: float, restart: float, mtbf: float) -> float:
    """Return the share of time in steps that are kept; all in seconds. See Note [goodput]."""
    stretch = (interval + save) / mtbf
    if stretch + restart / mtbf > 700:  # e^700 is near the largest float
        return 0.0
    return interval / (mtbf * math.exp(restart / mtbf) * math.expm1(stretch))


def ways(config: Config, device: Device, devices: int, hours: float) -> list[Way]:
    """Return the best interval and the goodput of checkpoints on disk, and of those in memory and, rarely, on disk.

    Args:
        hours: between failures of one device.
    """
    mtbf, each = hours * SECONDS_PER_HOUR / devices, checkpoint_bytes(config) / devices
    write, copy = each / device.disk_bandwidth, each / device["host.bandwidth"]
    disk_save = copy if config.checkpoint.async_save else write
    disk = _way("disk", disk_save, write, restart=START_SECONDS + write, mtbf=mtbf)
    # the copy is sent to another node during the next steps
    sharing = device.ranks_per_node(devices)
    send = each * sharing / (device["cluster.bandwidth"] * device["cluster.fraction"])
    memory = _way("memory", copy, send, restart=START_SECONDS + send + copy, mtbf=mtbf)
    both = BOTH_COPIES if devices > device.devices_per_host else 1.0  # the only host has no peer
    rare = _way("disk", disk_save, write, restart=START_SECONDS + write, mtbf=mtbf / both)
    return [disk, memory._replace(goodput=memory.goodput * rare.goodput)]


def _way(name: str, save: float, least: float, restart: float, mtbf: float) -> Way:
    """Return the best way with saves that are at least `least` seconds apart."""
    interval = max(least, best_interval(save, mtbf))
    return Way(name=name, interval=interval, save=save, restart=restart, goodput=goodput(interval, save, restart, mtbf))
