"""The pretended GPU's model of order and place, on a few operators each."""

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.pretended_gpu import EARLY_FREE, GPU, MIXED_DEVICES, RACE, Findings, pretended_gpu
from tests.pretended_gpu.communicators import Ledger, UnmatchedOrder


@pytest.fixture
def gpu() -> Iterator[Findings]:
    with pretended_gpu() as findings:
        yield findings


def kinds(findings: Findings) -> list[str]:
    return [finding.kind for finding in findings.found]


def test_tensors_answer_for_their_place(gpu: Findings) -> None:
    x = torch.arange(6, device=GPU)
    for on_gpu in (x, x.view(2, 3)[1], x + 1, torch.zeros_like(x), x.new_ones(2), torch.ones(2).to(GPU)):
        assert on_gpu.is_cuda and on_gpu.device == GPU
    pinned = torch.empty(2, pin_memory=True)
    assert pinned.is_pinned() and not pinned.is_cuda and pinned.device.type == "cpu"
    for on_host in (x.cpu(), x.to("cpu", torch.float32), torch.empty_like(x, device="cpu"), torch.ones(2) + 1):
        assert not on_host.is_cuda and on_host.device.type == "cpu"
    with pytest.raises(TypeError):
        x.numpy()


def test_streams_race_unless_an_event_is_between_them(gpu: Findings) -> None:
    x, other, third = torch.ones(4, device=GPU), torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(other):
        x[2:].add_(1)
    (finding,) = gpu.found
    assert finding == (
        RACE,
        "add_ on stream 1 writes bytes of a tensor in device memory that ones on the compute stream writes; nothing "
        "orders them",
    )
    gpu.found.clear()
    x[:2].mul_(2)  # other bytes
    event = other.record_event()
    third.wait_event(event)
    torch.cuda.current_stream().wait_stream(third)  # by way of the third
    x.mul_(2)
    assert kinds(gpu) == []


def test_an_event_orders_nothing_that_is_recorded_later(gpu: Findings) -> None:
    x, other = torch.ones(4, device=GPU), torch.cuda.Stream()
    event = torch.cuda.current_stream().record_event()
    x.add_(1)
    with torch.cuda.stream(other):
        event.wait()
        y = x + 1
    assert kinds(gpu) == [RACE]
    assert y.is_cuda


def test_readers_do_not_race(gpu: Findings) -> None:
    x, other = torch.ones(4, device=GPU), torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        y = x + 1
    z = x + 2
    assert kinds(gpu) == []
    x.add_(1)
    assert kinds(gpu) == [RACE]
    assert y.is_cuda and z.is_cuda


def test_memory_is_handed_out_again_when_it_is_freed(gpu: Findings) -> None:
    for waits in (True, False):
        x, other = torch.ones(4, device=GPU), torch.cuda.Stream()
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            y = x + 1
        if waits:
            torch.cuda.current_stream().wait_stream(other)
        del x
        assert kinds(gpu) == ([] if waits else [EARLY_FREE])
        gpu.found.clear()
        torch.cuda.synchronize()
        del y


def test_the_host_reads_a_copy_when_it_has_waited(gpu: Findings) -> None:
    x, there = torch.ones(4, device=GPU), torch.empty(4, pin_memory=True)
    there.copy_(x, non_blocking=True)
    assert gpu.waits == []
    there.tolist()
    assert kinds(gpu) == [RACE]
    gpu.found.clear()
    there.copy_(x, non_blocking=True)
    event = torch.cuda.current_stream().record_event()
    event.synchronize()
    event.synchronize()  # returns at once
    assert there.tolist() == [1.0] * 4 and gpu.waits == ["Event.synchronize"]
    x.copy_(there, non_blocking=True)
    assert kinds(gpu) == []
    there.zero_()
    assert kinds(gpu) == [RACE]


def test_the_host_does_not_wait_for_what_it_knows_to_be_done(gpu: Findings) -> None:
    x, other = torch.ones(4, device=GPU), torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        x.add_(1)
    torch.cuda.current_stream().wait_stream(other)
    assert float(x[0]) == 2.0
    other.synchronize()
    assert gpu.waits == ["__float__"]


@pytest.mark.parametrize(
    ("operator", "waits"),
    [
        (lambda x: x + 1, []),
        (lambda x: x.to(torch.float64), []),
        (lambda x: x.add_(torch.tensor(1.0)), []),  # a scalar
        (lambda x: x.to(GPU), []),
        (lambda x: torch.ones(4, pin_memory=True).to(GPU, non_blocking=True), []),
        (lambda x: torch.ones(4, pin_memory=True).to(GPU), ["copy_ that blocks"]),
        (lambda x: torch.ones(4).to(GPU, non_blocking=True), ["copy_ of pageable memory"]),
        (lambda x: x.cpu(), ["copy_ of pageable memory"]),
        (lambda x: torch.tensor([1.0], device=GPU), ["tensor of numbers of the host"]),
        (lambda x: x.item() if x.numel() == 1 else x[0].item(), ["item"]),
        (lambda x: bool((x > 0).all()), ["__bool__"]),
        (lambda x: x.nonzero(), ["nonzero"]),
        (lambda x: torch.equal(x, x), ["equal"]),
    ],
)
def test_host_waits_are_listed(operator: Callable[[torch.Tensor], object], waits: list[str], gpu: Findings) -> None:
    operator(torch.ones(4, device=GPU))
    assert gpu.waits == waits
    assert kinds(gpu) == []


def test_a_mask_as_an_index_waits(gpu: Findings) -> None:
    x = torch.ones(4, device=GPU)
    assert x[x > 0].numel() == 4
    assert gpu.waits and kinds(gpu) == []


def test_devices_are_not_mixed_in_backward_either(gpu: Findings) -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, dy):
            assert dy.is_cuda
            return dy * torch.full(dy.shape, 2.0)

    x = torch.ones(4, device=GPU, requires_grad=True)
    Doubled.apply(x).sum().backward()
    (finding,) = gpu.found
    assert finding.kind == MIXED_DEVICES and finding.text.startswith("mul on the compute stream has a tensor [4]")


def differ_in_number(rank: int) -> str:
    ledger = Ledger(Findings())
    for _ in range(2 + rank):
        ledger.enter("a", "an all-reduce of 3")
    try:
        ledger.close()
    except UnmatchedOrder as error:
        return str(error)
    return ""


@pytest.mark.long
def test_members_that_issue_fewer_operations_are_found(ranks) -> None:
    assert ranks(2).run(differ_in_number) == [
        "communicator a has 2 operations on rank 0 and 3 on rank 1",
        "communicator a has 3 operations on rank 1 and 2 on rank 0",
    ]


def exchange_parts(rank: int, unequal: int) -> str:
    ledger, sends, receives = Ledger(Findings()), ([4, 3], [7, 0])[rank], ([4, 7], [3 + unequal, 0])[rank]
    try:
        ledger.enter_parts("a", rank, sends, receives)
    except UnmatchedOrder as error:
        return str(error)
    return ""


def test_parts_of_an_exchange_have_as_many_rows_at_both_ends(ranks) -> None:
    assert ranks(2).run(exchange_parts, 0) == ["", ""]
    (said,) = filter(None, ranks(2).run(exchange_parts, 1))
    assert "communicator a between 0 and 1 is an all-to-all of" in said and "4 rows up, 7 down" in said
