"""First and last tokens of documents, compared with the tokenizer's."""

import json
from pathlib import Path
from typing import Any

import pytest

from megazero.data.corpora import open_datasets
from megazero.data.document_edges import check_edges
from megazero.data.indexed import IndexedDataset
from megazero.data.tokenizer import Tokenizer, load_tokenizer
from tests.helpers.table import for_each
from tests.unit.data_helpers import write_byte_tokenizer, write_corpus

FLAGS = ("--reset-attention-mask", "--eod-mask-loss")
BOS, EOS, TAG = 256, 257, 258


def notes(
    folder: Path, corpora: list[list[list[int]]], flags: tuple[str, ...] = (), begins: bool = False, **about: Any
) -> list[str]:
    """Return the notes of a run on corpora of these documents, without the name of the folder."""
    special, settings = ["<bos>", "<eos>"], {"bos_token": "<bos>", "eos_token": "<eos>"}
    theirs = write_byte_tokenizer(
        folder / "t", special, ["</s>"], ["<bos>"] if begins else [], tokenizer_config=settings
    )
    names = [str(write_corpus(folder / f"c{k}", documents)) for k, documents in enumerate(corpora)]
    for name, documents in zip(names, corpora, strict=True):
        if about:
            content = {"num_tokens": sum(map(len, documents))} | about
            Path(f"{name}.json").write_text(json.dumps(content))
    tokenizer: Tokenizer = load_tokenizer(str(theirs))
    found = open_datasets(names, "1,0,0", 2, 1, None, tokenizer=tokenizer, document_flags=flags).notes()
    return [note.replace(f"{folder}/", "") for note in found]


@for_each(
    ("corpora", "flags", "begins", "words"),
    [
        # ends
        ([[[1, 2, EOS]] * 9], FLAGS, False, []),
        ([[[1, 2, 3]] * 9], (), False, []),
        ([[[1, 2, EOS], [1, 2, TAG], [1, TAG]]], FLAGS, False, [
            "2 of 3 sampled documents of --data-path c0 do not end with '<eos>' (257); most end with '</s>' (258): at "
            "such an end --reset-attention-mask --eod-mask-loss have no effect"
        ]),
        ([[[1, EOS, 3]] * 9], FLAGS[:1], False, [
            "9 of 9 sampled documents of --data-path c0 do not end with '<eos>' (257); most end with '$' (3): at such "
            "an end --reset-attention-mask has no effect"
        ]),
        # beginnings
        ([[[BOS, 1], [BOS, 2], []]], (), True, ["texts begin with '<bos>' (256)"]),
        ([[[BOS, 1, 2]], [[1, 2], [BOS, 2]]], (), True, [
            "1 of 2 sampled documents of --data-path c1 do not begin with '<bos>' (256), which --tokenizer t puts"
        ]),
        ([[[BOS, 1, 2]], [[1, 2, 3]]], (), False, [
            "1 of 1 sampled documents of --data-path c1 do not begin with '<bos>' (256), which other corpora begin "
            "with; preprocess all with --prepend-bos, or all with --no-prepend-bos"
        ]),
        ([[[1, 2, 3]], [[BOS, 1, 2]]], (), False, ["1 of 1 sampled documents of --data-path c0 do not begin with"]),
        ([[[1, 2, 3]], [[1, 2, 3]]], (), False, []),
        ([[[BOS, 1, 2]], [[BOS, 2, 3]]], (), False, []),
        ([[[1, 2, 3]]] * 5, (), True, [f"1 of 1 sampled documents of --data-path c{k}" for k in range(3)] + [
            "2 more corpora differ in this way"
        ]),
    ],
)  # fmt: skip
def test_documents_that_differ_are_reported_by_corpus(
    tmp_path: Path, corpora: list[list[list[int]]], flags: tuple[str, ...], begins: bool, words: list[str]
) -> None:
    found = notes(tmp_path, corpora, flags, begins)
    assert len(found) == len(words) and all(note.startswith(start) for note, start in zip(found, words, strict=True))


@for_each("documents", [[[1, 2, TAG]] * 200, [[1, 2]], [[TAG]]])
def test_flags_that_would_have_no_effect_are_refused(tmp_path: Path, documents: list[list[int]]) -> None:
    """One corpus of a blend is enough."""
    usual = {2: "'#' \\(2\\)", TAG: "'</s>' \\(258\\)"}[documents[0][-1]]
    words = f"sampled documents of --data-path .*c1 has the end-of-document token '<eos>' .*; most end with {usual}; "
    with pytest.raises(ValueError, match=f"^--eod-mask-loss: none of .*{words}preprocess them again with --append-eod"):
        notes(tmp_path, [[[1, 2, EOS]], documents], FLAGS[1:])


def test_another_end_in_the_description_is_reported(tmp_path: Path) -> None:
    """A tag of HTML ended documents when this corpus was made."""
    assert notes(tmp_path, [[[1, 2, EOS]]], eod=EOS) == []
    (found,) = notes(tmp_path / "other", [[[1, 2, TAG]]], eod=TAG)
    assert found.startswith("documents of --data-path c0 end with '</s>' (258), and --tokenizer t has another end")


def test_a_blend_of_thousands_is_not_read_for_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = write_byte_tokenizer(tmp_path / "t", ["<bos>"], begins=["<bos>"])
    tokenizer, data = load_tokenizer(str(theirs)), IndexedDataset(write_corpus(tmp_path / "c", [[1, 2]] * 100))
    calls: list[str] = []

    def counted(original: Any) -> Any:
        return lambda *given: calls.append(original.__name__) or original(*given)

    for kind, name in ((IndexedDataset, "tokens"), (type(tokenizer), "vocabulary")):
        monkeypatch.setattr(kind, name, counted(getattr(kind, name)))
    found = check_edges([data] * 4000, [{}] * 4000, tokenizer, ())
    assert len(found) == 4 and found[0].startswith("8 of 8 sampled documents")
    assert (calls.count("tokens"), calls.count("vocabulary")) == (8 * 4000, 1)
