"""Context parallelism, without ranks: refusals, kept activations, the exchange that is chosen, reports."""

import re

import pytest
import torch

from megazero.engine.model.stage import declare
from megazero.engine.plan.layout.topology import Layout
from megazero.engine.step.batch import Uploaded
from megazero.flags.cli import parse
from megazero.flags.config import Config
from megazero.flags.flag_names import with_values
from megazero.flags.resolve import resolve
from megazero.flags.validate import check_device
from megazero.observe.start_report import drawing
from megazero.planner.bytes.estimate import estimate, stage_bytes
from megazero.planner.sizes import keys_bytes
from megazero.planner.time.devices import load_device
from megazero.planner.time.exchange import choose_exchange, ring_hides
from megazero.planner.time.step_time import step_time
from megazero.planner.trace.trace import trace_block
from tests.helpers.table import for_each

MODEL = "--num-layers 3 --hidden-size 64 --num-attention-heads 4 --vocab-size 200 --micro-batch-size 2"
LLAMA = "--architecture llama --num-query-groups 2"
LATENT = "--architecture llama --multi-latent-attention --q-lora-rank 24 --kv-lora-rank 20 --qk-head-dim 10 "
LATENT += "--qk-pos-emb-head-dim 6 --v-head-dim 12"


def resolved(flags: str, world: int) -> tuple[Config, Layout]:
    return resolve(parse(f"{MODEL} {flags}".split()), world, 0, declare)


@for_each(
    ("flags", "world", "said"),
    [
        (
            "--seq-length 3 --context-parallel-size 4",
            4,
            "--context-parallel-size 4 is too large for --seq-length 3: every rank needs tokens; use at most 3, or ",
        ),
        (
            "--seq-length 8 --context-parallel-size 5 --tensor-model-parallel-size 4 --sequence-parallel",
            20,
            "tokens; with --sequence-parallel, a rank's tokens are a multiple of 2; use at most 4, or longer samples",
        ),
        (
            "--seq-length 8 --context-parallel-size 3 --tensor-model-parallel-size 2",
            8,
            "--tensor-model-parallel-size 2 x --context-parallel-size 3 x --pipeline-model-parallel-size 1 = 6 does "
            "not divide the 8 ranks that were started; start 6 or 12",
        ),
        (
            "--cp-exchange ring",
            1,
            "--cp-exchange ring needs a --context-parallel-size of at least 2; raise it, or use --cp-exchange auto",
        ),
        ("--cp-exchange all-gather", 1, "--cp-exchange all-gather needs a --context-parallel-size of at least 2"),
        (
            "--context-parallel-size 2 --cp-exchange ring --attention-dropout 0.25",
            2,
            "--cp-exchange ring with --attention-dropout 0.25, which needs all keys at once; use all-gather, or auto",
        ),
        ("--context-parallel-size 2 --cp-exchange ring --window-size 7", 2, "ring with --window-size 7, which"),
        (
            "--context-parallel-size 2 --cp-exchange ring --attention-softcap 30",
            2,
            "ring with --attention-softcap 30, ",
        ),
        (
            "--context-parallel-size 2 --zero-shard-size 3",
            4,
            "--zero-shard-size 3 does not divide the 4 data-parallel ranks (x context-parallel); use 2, 4, or 0",
        ),
    ],
)
def test_what_cannot_be_is_refused(flags: str, world: int, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        resolved(flags, world)


@for_each("architecture", ["", LLAMA])
@for_each("recompute", ["selective", "full"])
def test_what_a_rank_keeps_falls_as_the_number_of_ranks(architecture: str, recompute: str) -> None:
    """All activations of a micro-batch are of the rank's own tokens, if keys are gathered again in the backward."""
    flags = f"{architecture} --seq-length 64 --recompute {recompute}"
    found = {}
    for cp in (1, 2, 4, 8):
        whole = stage_bytes(*resolved(f"{flags} --context-parallel-size {cp}", cp), 0, "cpu")
        kept = whole.memory["activation_checkpoints"] if recompute == "full" else whole.activations
        found[cp] = kept, whole.memory["logits"]
    assert all(found[cp] == (found[1][0] // cp, found[1][1] // cp) for cp in found), found
    assert found[1][0] > 0


def test_gathered_keys_are_kept_without_recompute() -> None:
    """Each block has the keys and values of 48 other tokens of both samples: 2 groups of 16 elements of 4 bytes."""
    flags = f"{LLAMA} --seq-length 64 --context-parallel-size 4 --cp-exchange"
    gathered, ring = (stage_bytes(*resolved(f"{flags} {each}", 4), 0, "cpu") for each in ("all-gather", "ring"))
    assert gathered.activations - ring.activations == 3 * 2 * 2 * (64 - 16) * 2 * 16 * 4


@for_each(
    ("precision", "device", "possible"),
    [("fp32", "cpu", True), ("bf16", "cpu", False), ("fp32", "cuda", False), ("fp16", "cuda", True)],
)
def test_a_ring_needs_fused_attention(precision: str, device: str, possible: bool) -> None:
    config, _ = resolved(f"--context-parallel-size 2 --cp-exchange ring --precision {precision}", 2)
    if possible:
        check_device(config, device)
        return
    with pytest.raises(ValueError, match=f"--cp-exchange ring with --precision {precision} on {device}: "):
        check_device(config, device)


def test_an_odd_length_leaves_some_ranks_a_token_less() -> None:
    """13 tokens on 4 ranks: 4, 3, 3, 3; the first block's input is kept for recompute."""
    config, layout = resolved("--seq-length 13 --context-parallel-size 4 --recompute full", 4)
    kept = [estimate(config, layout, rank).memory["activation_checkpoints"] for rank in range(4)]
    assert kept == [3 * 2 * tokens * 64 * 4 for tokens in (4, 3, 3, 3)]


def test_the_ring_is_chosen_where_it_hides() -> None:
    """T >= e F / (B n / g): H100, 2 bytes, 0.45 x 989 TFLOP/s; a node's 8 ranks at 369 GB/s: 2,412 tokens at n / g 1.

    tp 8 in a node leaves cp 45 GB/s between nodes: 19,780 tokens at n / g 1, 4,945 at 4, and more for latency.
    """
    h100 = load_device("h100-80gb")

    def hides(tokens: int, flags: str, tp: int = 1) -> bool:
        flags = f"--num-attention-heads 32 --hidden-size 4096 --precision bf16 --context-parallel-size 8 {flags}"
        flags = f"{flags} --micro-batch-size 1 --seq-length {8 * tokens} --tensor-model-parallel-size {tp}"
        config, layout = resolved(flags, 8 * tp)
        assert choose_exchange(config, layout, None).parallel.cp_exchange == "all-gather"
        chosen = choose_exchange(config, layout, h100).parallel.cp_exchange
        assert chosen == ("ring" if ring_hides(config, layout, h100) else "all-gather")
        return ring_hides(config, layout, h100)

    assert [hides(tokens, "") for tokens in (2200, 2600)] == [False, True]
    assert [hides(tokens, "", tp=8) for tokens in (19_000, 20_500)] == [False, True]
    grouped = "--architecture llama --num-query-groups 8"
    assert [hides(tokens, grouped, tp=8) for tokens in (4700, 6500)] == [False, True]


@for_each("model", ["", LLAMA, LATENT])
@for_each("recompute", ["none", "full"])
@for_each("tp", [1, 2])
def test_a_ring_sends_the_planned_bytes(model: str, recompute: str, tp: int) -> None:
    """A layer sends keys and values of each other rank in both passes, and their gradients. 17 tokens on 3 ranks."""
    flags = f"{model} --seq-length 17 --context-parallel-size 3 --cp-exchange ring --recompute {recompute}"
    config, layout = resolved(f"{flags} --tensor-model-parallel-size {tp}", 3 * tp)
    block, keys = trace_block(config, layout, "cpu", "blocks.0"), keys_bytes(config, layout)
    assert keys == 2 * 2 * 6 * (2 if model == LLAMA else 4) // tp * 16 * 4
    assert [each["cp"] for each in (block.forward, block.backward)] == [2 * keys, 2 * keys + 2 * keys]
    assert block.recompute["cp"] == (2 * keys if recompute == "full" else 0)


@for_each(("precision", "gradient"), [("fp32", 4), ("fp64", 8), ("bf16", 4)])
@for_each("recompute", ["none", "full"])
def test_latents_are_sent_where_they_are_narrower(precision: str, gradient: int, recompute: str) -> None:
    """20 elements of a latent and 6 of a rotary key, of 6 tokens of 2 samples, to 2 others.

    The gradient of kv_up needs the latents again, without the key. Where heads are fewer, keys and values are narrower.
    """
    flags = f"{LATENT} --seq-length 17 --context-parallel-size 3 --cp-exchange all-gather --recompute {recompute}"
    config, layout = resolved(f"{flags} --precision {precision}", 3)
    size, rows = 2 if precision == "bf16" else gradient, 2 * 2 * 6
    block = trace_block(config, layout, "cpu", "blocks.0")
    assert block.forward["cp"] == rows * 26 * size < 2 * keys_bytes(config, layout)
    assert block.recompute["cp"] == (block.forward["cp"] if recompute == "full" else 0)
    assert block.backward["cp"] == rows * (26 * gradient + 20 * size)
    config, layout = resolved(f"{flags} --kv-lora-rank 200 --precision {precision}", 3)
    block = trace_block(config, layout, "cpu", "blocks.0")
    assert block.forward["cp"] == 2 * keys_bytes(config, layout) < rows * 206 * size


def test_latents_are_gathered_unless_a_ring_is_cheaper() -> None:
    """A ring hides in both models. But it computes more in the first, and gathering does in the second."""
    h100 = load_device("h100-80gb")
    flags = f"{LATENT} --num-attention-heads 32 --hidden-size 4096 --qk-head-dim 128 --qk-pos-emb-head-dim 64 "
    flags += "--v-head-dim 128 --precision bf16 --micro-batch-size 1 --context-parallel-size 8 --seq-length 65536"
    for rank, wanted in ((512, "all-gather"), (4096, "ring")):
        config, layout = resolved(f"{flags} --kv-lora-rank {rank}", 8)
        assert ring_hides(config, layout, h100)
        assert choose_exchange(config, layout, None).parallel.cp_exchange == "all-gather"
        chosen = choose_exchange(config, layout, h100)
        assert chosen.parallel.cp_exchange == wanted
        other = with_values(config, {"cp-exchange": "ring" if wanted == "all-gather" else "all-gather"})
        seconds = [step_time(each, layout, h100, with_range=False).expected.seconds for each in (chosen, other)]
        assert seconds[0] < seconds[1]


def test_waiting_for_keys_is_a_part_of_a_step() -> None:
    """A gather before attention is waited for; of a ring's messages the last alone."""
    h100 = load_device("h100-80gb")
    flags = "--num-attention-heads 32 --hidden-size 4096 --precision bf16 --context-parallel-size 8 --seq-length 65536"
    waits = {}
    for exchange in ("all-gather", "ring"):
        config, layout = resolved(f"{flags} --micro-batch-size 1 --cp-exchange {exchange}", 8)
        parts = step_time(config, layout, h100, with_range=False).expected.parts
        waits[exchange] = parts["cp"]
        assert parts["tp"] == 0
    # 3 layers gather twice 65,536 tokens of 4,096 elements of 2 bytes, and reduce them in 4 bytes
    sent = 3 * 2 * 65536 * 4096 * (2 + 4) * 7 / 8
    assert waits["all-gather"] == pytest.approx(sent / (h100["node.bandwidth"] * h100["node.fraction"]), rel=0.05)
    last = 3 * 2 * 8192 * 4096 * 4  # a ring's last gradients, behind which nothing is left to compute
    assert waits["ring"] == pytest.approx(last / (h100["node.bandwidth"] * h100["node.fraction"]), rel=0.05)


def test_what_a_ring_cannot_do_is_gathered() -> None:
    flags = "--precision bf16 --seq-length 65536 --context-parallel-size 2 --micro-batch-size 1"
    h100 = load_device("h100-80gb")
    for more in ("", "--window-size 99", "--precision fp32", "--reset-attention-mask --tokenizer byte"):
        config, layout = resolved(f"{flags} {more}", 2)
        wanted = "all-gather" if more else "ring"
        assert choose_exchange(config, layout, h100).parallel.cp_exchange == wanted, more
    config, layout = resolved(f"{flags} --cp-exchange all-gather", 2)
    assert choose_exchange(config, layout, h100) is config


def test_the_start_screen_shows_who_shares_a_sample() -> None:
    config, layout = resolved("--seq-length 1001 --context-parallel-size 2 --tensor-model-parallel-size 2", 8)
    assert drawing(config, layout) == [
        "2 data-parallel x 2 context-parallel x 2 tensor-parallel = 8 ranks; ZeRO stage 1: optimizer states sharded "
        "over 4 data-parallel x context-parallel ranks",
        "ranks {[0-1] [2-3]} {[4-5] [6-7]}: each [ ] one copy of the model",
        "tokens: ranks in { } share each sample, 500 to 501 tokens each; work of attention even within 0.2%; "
        "--cp-exchange auto",
    ]


def test_imbalance_is_that_of_the_waiting_ranks() -> None:
    """Two micro-batches: 3 and 1, then 2 and 4: others wait for 3 and for 4; the mean is 5."""
    none = torch.empty(0)
    assert Uploaded([], none, none, [(3, 1), (2, 4)]).imbalance == pytest.approx(7 / 5 - 1)
    assert Uploaded([], none, none, []).imbalance is None
