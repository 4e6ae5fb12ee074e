"""The small forms of --adam-moments and --master-weights, and random bits by coordinate."""

import numpy as np
import torch

from megazero.engine.kernels.noise import Noise, NoisePiece
from megazero.engine.optim.small import SplitMaster, kept
from megazero.engine.options.optimizers import State
from megazero.engine.plan.layout.flat_layout import Range
from megazero.engine.plan.layout.parameters import ParamSpec
from tests.helpers import small
from tests.helpers.table import for_each

CPU = torch.device("cpu")


def new(numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(numel, dtype=dtype)


def numbers(positive: bool, scale: float, count: int = 64) -> torch.Tensor:
    """Blocks of very different sizes, with zeros, a block of zeros, and numbers on the edges of binades."""
    draw = torch.Generator().manual_seed(5)
    x = torch.randn(count, small.BLOCK, generator=draw) * torch.exp(4 * torch.randn(count, 1, generator=draw)) * scale
    x[:, 3], x[1] = 0, 0
    x[2] = 2.0 ** torch.arange(-16, 16) * scale
    x[3, 0] = torch.nextafter(torch.tensor(2.0), torch.tensor(0.0)) * scale * 1e6
    return (x.abs() if positive else x).view(-1)


def draw_bits(count: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 1 << 16, (count,), dtype=torch.int32, generator=torch.Generator().manual_seed(seed))


@for_each("dtype", [torch.float32, torch.float64])
@for_each("scale", [1.0, 1e-30, 1e30])
@for_each(("form", "positive"), [("bf16", False), ("bf16", True), ("int8", False), ("int8", True)])
def test_numbers_are_rounded_as_by_numpy(form: str, positive: bool, scale: float, dtype: torch.dtype) -> None:
    """The numbers are equal to the bit. Rounded again, with any bits, they stay."""
    x, wanted = numbers(positive, scale).to(dtype), None
    state = kept(State("exp_avg", form, positive), len(x), dtype, new)
    everything = slice(0, len(x))
    assert not state.read(everything).any()
    for seed in range(3):
        bits = draw_bits(len(x), seed)
        state.write(everything, x, bits)
        found = state.read(everything)
        wanted = small.rounded(x.double().numpy(), form, bits.numpy().astype(np.float64), positive)
        np.testing.assert_array_equal(found.double().numpy(), wanted)
        assert found.dtype == dtype
        for again in range(3):
            state.write(everything, found.clone(), draw_bits(len(x), 10 + again))
            assert torch.equal(state.read(everything), found)
    assert state.nbytes == len(x) * (2 if form == "bf16" else 1) + (len(x) // small.BLOCK) * (form == "int8")


@for_each(("form", "positive"), [("bf16", False), ("int8", False), ("int8", True)])
def test_numbers_are_right_on_average(form: str, positive: bool) -> None:
    """Unbiased: the mean of n roundings is within 5 standard errors, each at most half a step of 1/16 or 1/8."""
    x, n = numbers(positive, 1.0), 400
    state, total = kept(State("exp_avg", form, positive), len(x), torch.float32, new), torch.zeros(len(x))
    for seed in range(n):
        state.write(slice(0, len(x)), x, draw_bits(len(x), seed))
        total += state.read(slice(0, len(x)))
    largest = x.view(-1, small.BLOCK).abs().amax(1).repeat_interleave(small.BLOCK)
    step = {"bf16": 2.0**-7, "int8": 0.125 if positive else 2.0**-4}[form] * x.abs() + largest * (
        0 if form == "bf16" else 2.0 ** (-33 if positive else -10)
    )
    assert ((total / n - x).abs() <= 5 * step / 2 / n**0.5).all()


def test_positive_numbers_do_not_become_0() -> None:
    x = torch.full((small.BLOCK,), 1e-30)
    x[0], x[1] = 1.0, 0.0
    state = kept(State("exp_avg_sq", "int8", positive=True), len(x), torch.float32, new)
    state.write(slice(0, len(x)), x, torch.zeros(len(x), dtype=torch.int32))
    found = state.read(slice(0, len(x)))
    assert found[0] == 1 and found[1] == 0 and (found[2:] == 2.0**-33).all()


def test_a_split_weight_is_its_master_to_the_bit() -> None:
    """All 2^16 remainders of some weights: the compute weight is the nearest one, and away from 0 in the middle."""
    high = torch.tensor([0, 1, 0x3F80, 0x3F81, 0x7F7E, 0x0001 - 0x8000, 0xBF80 - 0x10000], dtype=torch.int32)
    bits = (high[:, None] << 16) + torch.arange(1 << 16, dtype=torch.int32)
    master = bits.flatten().view(torch.float32)
    weights = torch.zeros(len(master), dtype=torch.bfloat16)
    split = SplitMaster(weights)
    half = len(master) // 2
    for part in (slice(0, half), slice(half, len(master))):
        split.write(part, master[part].clone(), None)
        assert torch.equal(split.read(part).view(torch.int32), master[part].view(torch.int32))
    assert split.nbytes == 2 * len(master)
    nearest = master.bfloat16()
    middle = bits.flatten() & 0xFFFF == 0x8000
    assert torch.equal(weights[~middle].view(torch.int16), nearest[~middle].view(torch.int16))
    assert (weights[middle].float().abs() > master[middle].abs()).all()


def test_a_split_weight_keeps_infinities_and_is_nan_if_its_master_is() -> None:
    """Both signs of zeros, subnormal, largest and infinite numbers, and of NaN: quiet, signalling, and of GPUs."""
    numbers = [0, 1, 0x7FFF, 0x8000, 0x007FFFFF, 0x00800000, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0x7F800000]
    invalid = [0x7F800001, 0x7FBFFFFF, 0x7FC00000, 0x7FFF7FFF, 0x7FFF8000, 0x7FFFFFFF]
    positive = torch.tensor(numbers + invalid, dtype=torch.int32)
    bits, everything = torch.cat([positive, positive | -(1 << 31)]), slice(0, 2 * len(positive))
    master, weights = bits.view(torch.float32), torch.zeros(len(bits), dtype=torch.bfloat16)
    split = SplitMaster(weights)
    split.write(everything, master.clone(), None)
    found, wanted = split.read(everything), master.isnan()
    assert wanted.sum() == 2 * len(invalid)
    assert torch.equal(found.isnan(), wanted) and torch.equal(weights.isnan(), wanted)
    assert torch.equal(found.view(torch.int32)[~wanted], bits[~wanted])
    assert torch.equal(weights[~wanted].signbit(), master[~wanted].signbit())


SPECS = [
    ParamSpec("dense", (12, 96), ((0, "tp"),), True),
    ParamSpec("row", (10, 384), ((1, "tp"),), True),
    ParamSpec("heads", (4, 6, 5, 64), ((1, "tp"),), True),
    ParamSpec("experts", (4, 2, 12, 32), ((0, "ep"), (2, "tp")), True),
    ParamSpec("experts.down", (4, 6, 192), ((0, "ep"), (2, "tp")), True),
    ParamSpec("table", (101, 64), ((0, "tp"),), True, pads=True),
]


@for_each("spec", SPECS)
@for_each("tp", [1, 2, 3])
def test_bits_follow_coordinates(spec: ParamSpec, tp: int) -> None:
    """Every rank's are a part of the whole tensor's, also if they begin inside a row, behind another weight."""
    whole = torch.from_numpy(small.random_bits(7, spec.name, 3, spec.active).view(np.int32)).view(spec.shape)
    sizes = {"tp": tp, "ep": 2}
    other = ParamSpec("other", (3, 64), (), True)
    for rank in range(2 * tp):
        ranks = {"tp": rank % tp, "ep": rank // tp}
        block = spec.local(ranks, sizes)
        mine = whole[tuple(slice(at, at + n) for at, n in zip(block.offset, block.shape, strict=True))].reshape(-1)
        for start in (0, 32, 96) if block.numel else (0,):
            before = other.local(ranks, sizes)
            pieces = [
                NoisePiece(other, before, 0, Range(0, 192)),
                NoisePiece(spec, block, start, Range(256, 256 + block.numel - start)),
            ]
            noise = Noise(7, pieces[::-1], CPU)  # in any order
            assert torch.equal(noise.bits(Range(256, 256 + block.numel - start), 3), mine[start:])
            if block.numel:
                assert torch.equal(noise.bits(Range(320, 384), 3), mine[start + 64 : start + 128])
            first = torch.from_numpy(small.random_bits(7, "other", 3, 192).view(np.int32))
            assert torch.equal(noise.bits(Range(0, 192), 3), first)


def test_bits_differ_by_seed_name_and_update() -> None:
    spec = SPECS[0]
    block = spec.local({"tp": 0}, {"tp": 1})
    found = [
        Noise(seed, [NoisePiece(spec, block, 0, Range(0, block.numel))], CPU).bits(Range(0, block.numel), update)
        for seed, update in ((1, 1), (1, 2), (2, 1))
    ]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert (found[a] != found[b]).all()
    halves = torch.stack([(found[0] >> 16) & 0xFFFF, found[0] & 0xFFFF]).double() / 65536
    assert ((halves.mean(1) - 0.5).abs() < 5 / (12 * block.numel) ** 0.5).all()
    assert torch.corrcoef(halves)[0, 1].abs() < 5 / block.numel**0.5
