"""Utilisation and temperature of a GPU, where its driver reports them."""

import time

import torch

READ_SECONDS = 10.0  # between two readings, each of which takes the driver some milliseconds
SENSORS = "utilization", "temperature"  # functions of torch.cuda: percent, degrees Celsius


class DeviceSensors:
    """The sensors of one device that answer.

    torch reads them by nvidia-ml-py. Without this package, and for sensors that a driver refuses, such as the
    utilisation of a part of a GPU (MIG), there are no values.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.due = device, 0.0
        self.answering = list(SENSORS) if device.type == "cuda" else []

    def read(self, now: float | None = None) -> dict[str, int]:
        """Return the value of each sensor that answers; none within READ_SECONDS of the last ones.

        Args:
            now: seconds of a clock that only advances; None: the process's.
        """
        now = time.monotonic() if now is None else now
        found: dict[str, int] = {}
        if now < self.due:
            return found
        self.due = now + READ_SECONDS
        for name in list(self.answering):
            try:
                found[name] = getattr(torch.cuda, name)(self.device)
            except Exception:  # of several packages; a sensor must not end a run
                self.answering.remove(name)
        return found
