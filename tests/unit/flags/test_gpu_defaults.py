"""Defaults that differ on GPUs: the choice, explicit flags, and the same choice in plans and rehearsals."""

import io
from contextlib import redirect_stdout

import pytest

import pretrain_gpt
from megazero.cluster import launch
from megazero.engine.options.schema import Precision
from megazero.flags.cli import read
from megazero.flags.flag_names import with_values
from megazero.flags.implied import gpu_defaults
from megazero.planner.run_plan import plan_config
from megazero.planner.time.devices import known_devices, load_device
from tests.helpers.table import for_each
from tests.pretended_gpu import GPU, pretended_gpu


@for_each(
    ("flags", "fastest", "precision", "warmup"),
    [
        ("", "bf16", "bf16", 10),
        ("", "fp16", "fp16", 10),
        ("--precision fp32", "fp16", "fp32", 10),
        ("--bf16", "fp16", "bf16", 10),
        ("--grad-dtype fp16", "fp16", "fp16", 10),
        ("--grad-dtype bf16", "fp16", "fp32", 10),  # no product of fp16 has such a gradient
        ("", "fp32", "fp32", 10),
        ("--precision fp32", "bf16", "fp32", 10),
        ("--fp16", "bf16", "fp16", 10),
        ("--grad-dtype bf16", "bf16", "bf16", 10),
        ("--grad-dtype fp16", "bf16", "fp32", 10),  # no product of bf16 has such a gradient
        ("--lr-warmup-iters 0", "bf16", "bf16", 0),
        ("--lr-warmup-fraction 0.5", "bf16", "bf16", 500),
        ("--train-iters 1000000", "bf16", "bf16", 2000),
        ("--train-iters 1000000 --lr-decay-iters 1000", "bf16", "bf16", 10),
        ("--train-iters 50", "bf16", "bf16", 0),
        ("--preset tiny", "bf16", "bf16", 30),  # its own warm-up; it names no precision
        ("--eval-only --load x", "bf16", "bf16", 0),
    ],
)
def test_what_is_given_is_kept(flags: str, fastest: Precision, precision: str, warmup: int) -> None:
    command = read(flags.split())
    chosen, said = gpu_defaults(command.config, command.given, fastest)
    config = with_values(command.config, chosen)
    assert (config.training.precision, config.optimizer.lr_warmup_iters) == (precision, warmup)
    for name, differs in (
        (f"--precision {precision}", config.training != command.config.training),
        (f"--lr-warmup-iters {warmup}", config.optimizer != command.config.optimizer),
    ):
        assert (name in said) == differs


def test_the_fastest_precision_of_devices() -> None:
    found = {name: load_device(name).fastest_precision for name in known_devices() if name != "cpu"}
    assert found.pop("v100-32gb") == "fp16" and set(found.values()) == {"bf16"}


@for_each(
    ("capability", "fastest"),
    [((9, 0), "bf16"), ((8, 0), "bf16"), ((7, 5), "fp16"), ((7, 0), "fp16"), ((6, 1), "fp32")],
)
def test_the_fastest_precision_of_a_gpu(capability: tuple[int, int], fastest: str) -> None:
    with pretended_gpu(capability):
        assert launch.fastest_precision(GPU) == fastest


MODEL = "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 32 --vocab-size 97"


@pytest.mark.second
@pytest.mark.long
@for_each(
    ("asked", "precision"),
    [
        ("--plan --world-size 8 --device-type h100-80gb", "bf16"),
        ("--plan --world-size 8 --device-type h100-80gb --precision fp32 --lr-warmup-iters 0", None),
        ("--plan --world-size 8 --device-type v100-32gb --lr-warmup-iters 0", "fp16"),
        ("--mock-data --rehearse 2", "bf16"),
        ("--mock-data --rehearse 2 --rehearse-on cpu", None),
    ],
)
def test_plans_and_rehearsals_have_the_defaults_of_their_device(asked: str, precision: str | None) -> None:
    said = io.StringIO()
    with redirect_stdout(said):
        pretrain_gpt.main([*MODEL.split(), *asked.split()])
    for name in ("bf16", "fp16"):
        assert (f"--precision {name}" in said.getvalue()) == (name == precision), said.getvalue()


def test_a_plan_refuses_what_its_device_cannot_do() -> None:
    words = f"{MODEL} --plan --world-size 8 --device-type h100-80gb --precision fp16 --grad-dtype bf16"
    with pytest.raises(ValueError, match="--grad-dtype bf16 with --precision fp16"):
        plan_config(read(words.split()).config)
