"""Sensors of a GPU, with a driver of the test's."""

import pytest
import torch

from megazero.observe.sensors import READ_SECONDS, DeviceSensors

GPU = torch.device("cuda", 1)


def test_sensors_that_answer_are_read_every_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that the driver refuses is not asked again. A CPU has none."""
    asked: list[str] = []

    def refuses(device: torch.device) -> int:
        asked.append("utilization")
        raise RuntimeError("not supported")

    monkeypatch.setattr(torch.cuda, "temperature", lambda device: 40 + device.index)
    monkeypatch.setattr(torch.cuda, "utilization", refuses)
    sensors, near, later = DeviceSensors(GPU), 100 + READ_SECONDS / 2, 100 + READ_SECONDS
    assert [sensors.read(now) for now in (100, near, later)] == [{"temperature": 41}, {}, {"temperature": 41}]
    assert asked == ["utilization"]
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 93)
    assert DeviceSensors(GPU).read() == {"utilization": 93, "temperature": 41}
    assert DeviceSensors(torch.device("cpu")).read() == {}
