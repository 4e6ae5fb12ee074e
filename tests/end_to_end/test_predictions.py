"""Multi-token prediction in a real run: its losses fall, transformers drafts with the export, generation counts."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megazero.engine.mesh.mesh import Mesh
from megazero.engine.plan.layout.topology import Layout
from megazero.generation.generate import Text
from megazero.generation.guesses import Guesses
from megazero.generation.model import InferenceModel
from megazero.run.run_state import RunState
from tests.end_to_end.cli import ROOT, metrics, pretrain
from tests.end_to_end.test_generate import write_tokenizer
from tests.end_to_end.test_huggingface import export, import_
from tests.helpers.ranks import Ranks
from tests.reference_run import read_checkpoint, write_corpus

pytestmark = pytest.mark.second
WORDS, LAYERS = 61, 46  # transformers looks for modules of this family behind layer 46 alone
FLAGS = f"""
--architecture glm4-moe --num-layers {LAYERS} --hidden-size 16 --num-attention-heads 2 --kv-channels 8
--ffn-hidden-size 16 --num-experts 2 --moe-router-topk 2 --moe-ffn-hidden-size 8 --moe-layer-freq {"D" * 45}E
--moe-shared-expert-intermediate-size 8 --moe-router-bias-update-rate 0 --seq-length 32 --init-method-std 0.1
--mtp-num-layers 1 --mtp-loss-scaling-factor 0.5 --micro-batch-size 8 --lr 2e-2 --lr-warmup-iters 5
--train-iters 45""".split()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on texts that count up by one or by two."""
    folder = tmp_path_factory.mktemp("predictions")
    texts = [[[(first + step * n) % 50 for n in range(70)]] for first in range(25) for step in (1, 2)]
    write_corpus(folder / "words", "<u2", texts)
    tokenizer = write_tokenizer(folder / "tokenizer", 5)
    data = ["--data-path", folder / "words", "--tokenizer", tokenizer]
    done = pretrain(*FLAGS, *data, "--save", folder / "run", "--log-dir", folder / "log")
    assert done.returncode == 0, done.stderr
    return folder


def test_losses_of_modules_are_in_metrics_and_fall(trained: Path) -> None:
    found = [record["mtp_losses"]["1"] for record in metrics(trained / "log")]
    assert len(found) == 45 and found[0] > 3.5 and found[-1] < 1.5


def test_transformers_drafts_with_an_export(trained: Path, tmp_path: Path) -> None:
    """The same tokens in fewer forwards; and back by an import, to the bit."""
    from transformers import AutoModelForCausalLM

    folder = export(trained / "run", tmp_path / "export")
    names = {name for name in load_file(folder / "model.safetensors") if name.startswith(f"model.layers.{LAYERS}.")}
    assert (
        f"model.layers.{LAYERS}.eh_proj.weight" in names and f"model.layers.{LAYERS}.shared_head.norm.weight" in names
    )
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    forwards = []
    model.register_forward_hook(lambda *_: forwards.append(1))
    prompt = torch.tensor([[7, 9, 11, 13, 15, 17, 19, 21]])
    options = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    plain = model.generate(prompt, **options)
    count = len(forwards)
    forwards.clear()
    assert torch.equal(model.generate(prompt, use_mtp=True, **options), plain)
    assert count == 16 and len(forwards) < 14, "no draft was accepted"
    ours = read_checkpoint(import_(folder, tmp_path / "back") / "iter_0000000")
    original = read_checkpoint(trained / "run" / "iter_0000045")
    assert all(torch.equal(ours[name], value) for name, value in original.items() if name.startswith("model."))


def generate(trained: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/generate.py", "--load", str(trained / "run"), "--temperature", "0", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done


def test_a_text_without_a_token_to_guess_has_no_share(trained: Path) -> None:
    """One token, and one new one, which no module predicts."""
    done = generate(trained, "--count-guesses", "--max-new-tokens", "1", "--prompt=w3")
    assert "modules of --mtp-num-layers guess none of these tokens" in done.stderr


def test_generation_counts_guesses(trained: Path) -> None:
    prompts = [f"--prompt=w{a} w{a + 2} w{a + 4} w{a + 6} w{a + 8}" for a in (3, 10, 20)]
    done = generate(trained, "--count-guesses", "--max-new-tokens", "16", *prompts)
    share = re.search(r"modules of --mtp-num-layers guess (\d+)% of these tokens", done.stderr)
    assert share is not None and 30 < int(share[1]) <= 100


def counted(rank: int, path: Path, layout: Layout, texts: list[list[int]]) -> str:
    """Runs on every rank, of which each has its share of the texts, as in generation."""
    mesh = Mesh.build(layout, rank, torch.device("cpu"))
    guesses = Guesses(InferenceModel(path, RunState.read(path).model_config(path), mesh))
    guesses.texts = [Text(n, texts[n], 1) for n in range(mesh.dp.rank, len(texts), mesh.dp.size)]
    return guesses.summary()


def test_guesses_are_counted_over_all_ranks(trained: Path, ranks: Callable[[int], Ranks]) -> None:
    """The first text counts up, the second does not: each alone has a share of its own."""
    path = trained / "run" / "iter_0000045"
    texts = [list(range(5, 30)), [17, 3, 44, 9, 31, 2, 28, 50, 11, 40, 6, 23, 37]]
    up, mixed, both = (counted(0, path, Layout(), chosen) for chosen in (texts[:1], texts[1:], texts))
    assert len({up, mixed, both}) == 3
    for layout in (Layout(dp=2), Layout(pp=2), Layout(tp=2)):
        assert ranks(2).run(counted, path, layout, texts) == [both, both], layout
