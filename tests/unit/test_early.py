"""Refusing at once, without torch: bounds on either side of the estimate, and a way out that is one."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megazero.config.cli import parse
from megazero.config.schema import Config
from megazero.memory.host import Available, Machine, has_accelerator
from megazero.model.stage import declare
from megazero.plan.layout.layers import num_parameters
from megazero.plan.layout.resolve import resolve
from megazero.price.bytes.capacity import check_memory, estimated
from megazero.price.bytes.early import SHARDED, SHORT, ceiling, check_at_once, counts, floor, parameter_bounds

ROOT = Path(__file__).resolve().parents[2]
GB = 10**9


def test_the_bounds_of_a_models_parameters_are_close() -> None:
    for name in ("tiny", "gpt2-124m", "zero-100b", "llama-125m", "llama-70b", "qwen2-0.5b", "parallel-6b"):
        model = parse(["--preset", name, "--vocab-size", "50257"]).model
        least, most = parameter_bounds(model)
        assert least <= num_parameters(declare(model)) <= most < 1.1 * least, name


# a shape of each architecture, and shapes at which something else is largest
SHAPES = ["--preset gpt2-1.5b", "--preset llama-125m", "--preset parallel-6b", "--preset qwen2-0.5b"]
SHAPES += ["--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 512 --vocab-size 90000"]
SHAPES += ["--num-layers 40 --hidden-size 512 --num-attention-heads 16 --seq-length 64 --vocab-size 300"]


@pytest.mark.long
@pytest.mark.parametrize("shape", SHAPES)
def test_the_bounds_hold_the_estimate(shape: str) -> None:
    for ranks, precision, way_out in ((1, "fp32", SHORT), (2, "fp32", SHARDED), (8, "bf16", SHARDED)):
        flags = f"{shape} --precision {precision} --global-batch-size 512 {way_out}"
        config, layout = resolve(parse(flags.split()), ranks, 0, declare)
        found = estimated(config, layout, 0, "cpu").total
        assert counts(config) and sum(floor(config, ranks).values()) <= found
        assert found <= ceiling(config, ranks) < 2 * found + 2 * GB


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_floor_knows_the_stages(stage: int) -> None:
    config, layout = resolve(
        parse(f"--preset gpt2-124m --zero-stage {stage} --zero-shard-size {2 * bool(stage)}".split()), 4, 0, declare
    )
    found = 4 * sum(floor(config, 4).values())
    whole = 4 * estimated(config, layout, 0, "cpu").total
    states = {0: 4 * (2 + 12 + 4), 1: 4 * 2 + 2 * 16, 2: 4 * 2 + 2 * 16, 3: 2 * 18}[stage]
    assert found <= whole and 0.99 < found / (states * num_parameters(declare(config.model))) <= 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("flags", "ranks", "available"),
    [
        ("--preset gpt2-1.5b", 1, 4 * GB),
        ("--preset llama-1b", 1, 8 * GB),
        ("--preset gpt2-1.5b --zero-stage 0", 4, 60 * GB),
        ("--preset gpt2-1.5b --zero-stage 1 --recompute none", 2, 30 * GB),
    ],
)
def test_every_way_out_fits(flags: str, ranks: int, available: int) -> None:
    """Check the command line with the named changes by the estimate, on as many machines as are named."""
    with pytest.raises(ValueError) as refusal:
        check_at_once(parse(flags.split()), ranks, ranks, Available(available, "of host memory"))
    said, _, named = str(refusal.value).partition("; what fits: ")
    assert said.startswith("--num-layers") and f"{available / GB:.2f}"[:4] in said
    ways = [way for way in named.split("; or ") if "--" in way]
    assert ways
    for way in ways:
        changed = [*flags.split(), *" ".join(re.findall(r"--[a-z-]+ [\w.-]+", way)).split()]
        machines = re.search(r"on (\d+) machines", way)
        world, here = (int(machines[1]), 1) if machines else (ranks, ranks)
        node = Machine(range(here), "cpu", None, Available(available, "of host memory"))
        check_memory(*resolve(parse(changed), world, 0, declare), 0, node)


def test_what_fits_or_cannot_be_told_is_let_through() -> None:
    some = Available(4 * GB, "of host memory")
    for flags in ("--preset gpt2-124m", "--preset tiny", "--preset gpt2-1.5b --tensor-model-parallel-size 5"):
        check_at_once(parse(flags.split()), 5 if "parallel" in flags else 1, 5, some)
    large = parse(["--preset", "gpt2-1.5b"])
    check_at_once(large, 1, 1, None)
    check_at_once(large, 2, 1, some)  # the other rank may have a larger machine
    evaluates = replace(Config().evaluation, eval_only=True)
    check_at_once(replace(large, evaluation=evaluates), 1, 1, some)


def test_has_accelerator(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    assert not has_accelerator(tmp_path)
    (tmp_path / "dev" / "nvidiactl").touch()
    assert not has_accelerator(tmp_path)
    (tmp_path / "dev" / "nvidia0").touch()
    assert has_accelerator(tmp_path)


def test_a_start_that_is_refused_at_once_imports_no_torch() -> None:
    """On a machine with 4 GB and no GPU: torch alone takes seconds."""
    program = """
import sys
import pretrain_gpt
from megazero.memory.host import Available
pretrain_gpt.host_memory = lambda: Available(4 * 10**9, "of host memory")
pretrain_gpt.has_accelerator = lambda: False
for words in (["--preset", "gpt2-1.5b"], ["--preset", "tiny", "--plan"]):
    try:
        pretrain_gpt.main(words)
    except SystemExit as stop:
        print(stop.code, sorted({"torch", "numpy", "tyro"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "1 ['tyro']\n" * 2, done.stderr
    assert "what fits: this model on" in done.stderr and "here --preset gpt2-124m" in done.stderr
    fit, plan = done.stderr.splitlines()
    assert fit.startswith("ValueError: --num-layers 48") and plan.startswith(
        "ValueError: --plan needs --device-type NAME; "
    )


def test_the_documented_refusal_is_what_is_said() -> None:
    with pytest.raises(ValueError) as refusal:
        check_at_once(parse(["--preset", "gpt2-1.5b"]), 1, 1, Available(4 * GB, "of host memory"))
    assert f"```\nValueError: {refusal.value}\n```" in (ROOT / "docs" / "console.md").read_text()
