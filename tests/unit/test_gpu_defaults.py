"""Defaults that differ on GPUs: what is chosen, what a given flag keeps, that plans and rehearsals choose it too."""

from __future__ import annotations

import io
from contextlib import redirect_stdout

import pytest

import pretrain_gpt
from megazero.config.cli import read
from megazero.config.gpu_defaults import gpu_defaults
from megazero.price.devices import known_devices, load_device
from megazero.price.plan import plan_config


@pytest.mark.parametrize(
    ("flags", "has_bf16", "precision", "warmup"),
    [
        ("", True, "bf16", 10),
        ("", False, "fp32", 10),
        ("--precision fp32", True, "fp32", 10),
        ("--fp16", True, "fp16", 10),
        ("--grad-dtype bf16", True, "bf16", 10),
        ("--grad-dtype fp16", True, "fp32", 10),  # no product of bf16 has such a gradient
        ("--lr-warmup-iters 0", True, "bf16", 0),
        ("--lr-warmup-fraction 0.5", True, "bf16", 500),
        ("--train-iters 1000000", True, "bf16", 2000),
        ("--train-iters 1000000 --lr-decay-iters 1000", True, "bf16", 10),
        ("--train-iters 50", True, "bf16", 0),
        ("--preset tiny", True, "bf16", 30),  # its own warm-up; it names no precision
        ("--eval-only --load x", True, "bf16", 0),
    ],
)
def test_what_is_given_is_kept(flags: str, has_bf16: bool, precision: str, warmup: int) -> None:
    command = read(flags.split())
    config, said = gpu_defaults(command.config, command.given, has_bf16)
    assert (config.training.precision, config.optimizer.lr_warmup_iters) == (precision, warmup)
    for name, differs in (
        (f"--precision {precision}", config.training != command.config.training),
        (f"--lr-warmup-iters {warmup}", config.optimizer != command.config.optimizer),
    ):
        assert (name in said) == differs


def test_which_devices_have_bf16() -> None:
    assert [name for name in known_devices() if not load_device(name).has_bf16] == ["v100-32gb"]


MODEL = "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 32 --vocab-size 97"


@pytest.mark.long
@pytest.mark.parametrize(
    ("asked", "is_chosen"),
    [
        ("--plan --world-size 8 --device-type h100-80gb", True),
        ("--plan --world-size 8 --device-type h100-80gb --precision fp32 --lr-warmup-iters 0", False),
        ("--plan --world-size 8 --device-type v100-32gb --lr-warmup-iters 0", False),
        ("--mock-data --rehearse 2", True),
        ("--mock-data --rehearse 2 --rehearse-on cpu", False),
    ],
)
def test_plans_and_rehearsals_have_the_defaults_of_their_device(asked: str, is_chosen: bool) -> None:
    said = io.StringIO()
    with redirect_stdout(said):
        pretrain_gpt.main([*MODEL.split(), *asked.split()])
    assert ("--precision bf16" in said.getvalue()) == is_chosen, said.getvalue()


def test_a_plan_refuses_what_its_device_cannot_do() -> None:
    words = f"{MODEL} --plan --world-size 8 --device-type h100-80gb --precision fp16 --grad-dtype bf16"
    with pytest.raises(ValueError, match="--grad-dtype bf16 with --precision fp16"):
        plan_config(read(words.split()).config)
