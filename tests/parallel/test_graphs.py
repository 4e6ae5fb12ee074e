"""CUDA graphs of blocks (--cuda-graph-impl local) on the pretended GPU: training is the same, and planted faults show.

The matrix of `test_pretended_gpu` compares all layouts with plain PyTorch.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.helpers.planted import Fault
from tests.helpers.pretended_gpu import CAPTURE
from tests.parallel.cases import MODEL, Case, Outcome
from tests.parallel.test_parity import relative_error
from tests.parallel.test_pretended_gpu import Watched, train_watched

pytestmark = pytest.mark.second

# As many micro-batches in flight as there are: three slots.
EAGER = Case(
    model=replace(MODEL, num_layers=2), kernels="eager", schedule="gpipe", micro_batches=3, batch=6, precision="fp64"
)
GRAPHS = EAGER._replace(graphs=True)
BLOCK, BLOCKS = ("megazero.step.graphs", "CapturedBlock"), ("megazero.step.graphs", "BlockGraphs")
NORM = "megazero.model.layers.norm", "LayerNorm", "normalise"


def run(ranks, case: Case, fault: Fault | None = None) -> Watched:
    (watched,) = ranks(1).run(train_watched, case, fault)
    return watched


def difference(one: Outcome, other: Outcome) -> float:
    """The largest relative difference of losses and norms; not a number if one is none."""
    return relative_error([*one.losses, *one.norms], [*other.losses, *other.norms])


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(
            Fault(*BLOCKS, "capture", "(self._capturer.new_pool(), ", "(self._backwards, "),
            id="forwards and backwards share a pool",
        ),
        pytest.param(
            Fault(*BLOCK, "capture", "tuple(saved.values())", "()"),
            id="nothing holds the saved tensors",
        ),
        pytest.param(
            Fault(*BLOCK, "backward", "self.slots[chunk.slot_of[i]].backward()", "self.slots[0].backward()"),
            id="a micro-batch's backward has another one's slot",
        ),
        pytest.param(
            Fault(*BLOCK, "forward", "slot.x.copy_(x)", "slot"),
            id="the input is not copied to the address of the capture",
        ),
        pytest.param(
            Fault(*BLOCK, "_backward", "self.shared.dx.copy_(dx)", "dx"),
            id="the gradient is left at another address than the next block reads",
        ),
    ],
)
def test_a_fault_of_a_replay_changes_the_norm(fault: Fault, ranks) -> None:
    wanted, found = run(ranks, EAGER).outcome, run(ranks, GRAPHS, fault).outcome
    assert not difference(found, wanted) < 1e-3


def test_norms_of_heads_are_captured(ranks) -> None:
    model = replace(EAGER.model, architecture="qwen3", num_query_groups=2, kv_channels=12, qk_layernorm=True)
    eager, graphs = run(ranks, EAGER._replace(model=model)), run(ranks, GRAPHS._replace(model=model))
    assert difference(graphs.outcome, eager.outcome) < 1e-10
    assert not graphs.found


def test_a_number_of_the_host_is_frozen(ranks) -> None:
    """A block that multiplies by the number of its first sample learns something else in graphs than without."""
    fault = Fault(
        "megazero.model.block", "SequentialBlock", "forward", "x = self", "x = (1 + tokens.samples[0]) * self"
    )
    assert difference(run(ranks, GRAPHS).outcome, run(ranks, EAGER).outcome) < 1e-10
    assert not difference(run(ranks, GRAPHS, fault).outcome, run(ranks, EAGER, fault).outcome) < 1e-4


@pytest.mark.parametrize(
    "fault, words",
    [
        pytest.param(
            Fault(*BLOCK, "capture", "Slot(x, y", "Slot(x.clone() if self.first else x, y"),
            "native_layer_norm [Forward blocks.0 mb 0] is replayed, and the memory of a tensor that it was given is "
            "freed",
            id="an address moves",
        ),
        pytest.param(
            Fault(*NORM, "norm(x,", "norm(x + float(x.sum()),"),
            "a wait of the host for __float__ in a capture",
            id="the host waits",
        ),
        pytest.param(
            Fault(*NORM, "norm(x,", "norm(x + torch.zeros(1).pin_memory().to(x.device),"),
            "a wait of the host for copy_ that blocks in a capture",
            id="a copy from the host",
        ),
        pytest.param(
            Fault(*NORM, "norm(x,", "norm(x + torch.tensor(0.0, device=x.device),"),
            "tensor of numbers of the host in a capture",
            id="a tensor of the host's numbers",
        ),
        pytest.param(
            Fault(
                *BLOCK, "_forward", "torch.enable_grad()", "torch.enable_grad(), torch.cuda.stream(torch.cuda.Stream())"
            ),
            "native_layer_norm on stream",
            id="another stream",
        ),
    ],
)
def test_what_cuda_forbids_is_found(fault: Fault, words: str, ranks) -> None:
    found = run(ranks, GRAPHS, fault).found
    assert CAPTURE in {finding.kind for finding in found}
    assert any(words in finding.text for finding in found), found
