"""Files in the forms of HellaSwag's, ARC's, PIQA's, LAMBADA's and MMLU's authors become items of tasks."""

import json
from pathlib import Path

import pytest

from data_tools.convert_tasks import main
from data_tools.task_formats import FORMATS
from megazero.data.task_files import ChoiceItem, ClozeItem, Item, TextItem, read_tasks
from tests.helpers.table import for_each

HELLASWAG = {
    "ind": 24,
    "activity_label": "Roof shingle removal",
    "ctx_a": "A man is [substeps] sitting on a roof.",
    "ctx_b": "he",
    "endings": ["is  using wrap.", " starts [step] pulling up [title] Roofing."],
    "label": 1,
}
ARC = {
    "id": "Mercury_7175875",
    "question": {"stem": "Why?", "choices": [{"text": "dry", "label": "1"}, {"text": "wet", "label": "2"}]},
    "answerKey": "2",
}
PIQA = {"goal": "How to boil?", "sol1": "Heat it.", "sol2": "Cool it."}
ROW = '"Which, of ""these""?\nis it",one,"two, three",four,five,'


def written(path: Path, *objects: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in objects))
    return path


def converted(folder: Path, name: str, *words: object) -> tuple[Item, ...]:
    output = folder / "items.jsonl"
    main(["--from", name, "--output", str(output), "--overwrite", *map(str, words)])
    return read_tasks([str(output)]).items


def test_hellaswag(tmp_path: Path) -> None:
    path = written(tmp_path / "hellaswag_val.jsonl", HELLASWAG)
    assert converted(tmp_path, "hellaswag", "--input", path) == (
        ChoiceItem(
            task="hellaswag",
            context="Roof shingle removal: A man is sitting on a roof. He",
            choices=("is using wrap.", "starts pulling up. Roofing."),
            answer=1,
        ),
    )


def test_arc(tmp_path: Path) -> None:
    path = written(tmp_path / "ARC-Easy-Test.jsonl", ARC, ARC | {"answerKey": "1"})
    found = converted(tmp_path, "arc", "--input", path, "--task", "arc_easy")
    first = ChoiceItem(task="arc_easy", context="Question: Why?\nAnswer:", choices=("dry", "wet"), answer=1)
    assert found[0] == first and isinstance(found[1], ChoiceItem) and found[1].answer == 0


def test_piqa(tmp_path: Path) -> None:
    path = written(tmp_path / "valid.jsonl", PIQA, PIQA)
    with pytest.raises(ValueError, match=r"valid-labels.lst.*; put the labels there"):
        converted(tmp_path, "piqa", "--input", path)
    (tmp_path / "valid-labels.lst").write_text("1\n0\n")
    found = converted(tmp_path, "piqa", "--input", path)
    item = ChoiceItem(
        task="piqa", context="Question: How to boil?\nAnswer:", choices=("Heat it.", "Cool it."), answer=1
    )
    assert found[0] == item and isinstance(found[1], ChoiceItem) and found[1].answer == 0
    (tmp_path / "valid-labels.lst").write_text("1\n")
    with pytest.raises(ValueError, match="the item behind line 1 is none of piqa: IndexError"):
        converted(tmp_path, "piqa", "--input", path)


def test_lambada(tmp_path: Path) -> None:
    plain = written(tmp_path / "lambada_test_plain_text.txt", "he gave it to sarah", "", "so did  i")
    lines = written(tmp_path / "lambada_test.jsonl", {"text": "He gave it\n to Sarah"})
    assert converted(tmp_path, "lambada", "--input", plain, lines) == (
        ClozeItem(task="lambada", context="he gave it to", continuation="sarah"),
        ClozeItem(task="lambada", context="so did ", continuation="i"),
        ClozeItem(task="lambada", context="He gave it\n to", continuation="Sarah"),
    )


def test_mmlu(tmp_path: Path) -> None:
    path = written(tmp_path / "test" / "high_school_art_test.csv", f"{ROW}C", "Who?,a,b,c,d,A")
    written(tmp_path / "dev" / "high_school_art_dev.csv", "When?,1,2,3,4,D", "Where?,w,x,y,z,B", "No?,a,b,c,d,A")
    intro = "The following are multiple choice questions (with answers) about high school art.\n\n"
    question = 'Which, of "these"?\nis it\nA. one\nB. two, three\nC. four\nD. five\nAnswer:'
    plain = converted(tmp_path, "mmlu", "--input", path)
    assert plain[0] == ChoiceItem(task="mmlu", context=intro + question, choices=("A", "B", "C", "D"), answer=2)
    shots = "When?\nA. 1\nB. 2\nC. 3\nD. 4\nAnswer: D\n\nWhere?\nA. w\nB. x\nC. y\nD. z\nAnswer: B\n\n"
    found = converted(tmp_path, "mmlu", "--input", path, "--shots", 2)
    assert isinstance(found[0], ChoiceItem) and found[0].context == intro + shots + question
    assert isinstance(found[1], ChoiceItem) and found[1].context.startswith(intro + shots + "Who?\nA. a")
    with pytest.raises(ValueError, match="has 3 examples; ask for fewer"):
        converted(tmp_path, "mmlu", "--input", path, "--shots", 4)


def test_texts(tmp_path: Path) -> None:
    plain, lines = tmp_path / "law.txt", written(tmp_path / "web.jsonl", {"text": "one"}, {"text": "2", "domain": "x"})
    plain.write_text("all\nof it\n")
    assert converted(tmp_path, "text", "--input", plain, lines, "--task", "held-out") == (
        TextItem(task="held-out", text="all\nof it\n", domain="law"),
        TextItem(task="held-out", text="one", domain="web"),
        TextItem(task="held-out", text="2", domain="x"),
    )


def test_characters_that_names_do_not_have_are_replaced(tmp_path: Path) -> None:
    """In the domain that is the name of a file, and in one of a line; null is no domain."""
    documents = [{"text": "one"}, {"text": "two", "domain": "Wikipedia (en)"}, {"text": "three", "domain": None}]
    plain = written(tmp_path / "law & order.txt", "four")
    lines = written(tmp_path / "common crawl é.jsonl", *documents)
    found = converted(tmp_path, "text", "--input", plain, lines)
    domains = [item.domain for item in found if isinstance(item, TextItem)]
    assert domains == ["law___order", "common_crawl__", "Wikipedia__en_", None]


def test_lines_end_at_line_feeds_alone(tmp_path: Path) -> None:
    """Not at other characters that end lines of text, which JSON allows in a string."""
    text = "one\u2028two\u2029three\u0085four\x1cfive"
    raw = json.dumps({"text": text.replace("\x1c", " ")}, ensure_ascii=False)
    lines = tmp_path / "lines.jsonl"
    lines.write_bytes(f"{raw}\r\n\n{raw}\r\n".encode())
    assert (
        converted(tmp_path, "text", "--input", lines)
        == (TextItem(task="text", text=text.replace("\x1c", " "), domain="lines"),) * 2
    )
    plain = tmp_path / "plain.txt"
    plain.write_bytes(f"{text} end\r\n".encode())
    assert converted(tmp_path, "lambada", "--input", plain) == (
        ClozeItem(task="lambada", context=text, continuation="end"),
    )


@for_each(
    "name, line, words",
    [
        ("arc", "{", r"--input .*/file.jsonl, line 2: Expecting property name"),
        ("arc", {"question": {}}, r"the item behind line 1 is none of arc: KeyError 'choices'; give the authors' file"),
        ("arc", ARC | {"answerKey": "E"}, "the item behind line 1 is none of arc: 'E' is not in list"),
        ("hellaswag", HELLASWAG | {"label": ""}, "is none of hellaswag: invalid literal for int"),
        ("hellaswag", HELLASWAG | {"label": 3}, "line 2: answer 3 of 2 choices, counted from 0; correct it"),
        ("hellaswag", HELLASWAG | {"endings": ["a", " "]}, r"line 2: .*length >= 1 - at `\$.choices\[1\]`; correct it"),
    ],
)
def test_a_line_of_another_form_is_refused(name: str, line: object, words: str, tmp_path: Path) -> None:
    good = {"arc": ARC, "hellaswag": HELLASWAG}[name]
    with pytest.raises(ValueError, match=words):
        converted(tmp_path, name, "--input", written(tmp_path / "file.jsonl", good, line))
    assert not (tmp_path / "items.jsonl").exists()


@for_each("name", sorted(FORMATS))
def test_what_a_reader_cannot_read_is_one_sentence(tmp_path: Path, name: str) -> None:
    """Nesting beyond Python's stack, a field beyond csv's limit, a null character, half of a quoted field."""
    end = {"mmlu": "test/x_test.csv"}.get(name, "x.jsonl")
    (tmp_path / "x-labels.lst").write_text("0\n")
    for line in ("[" * 100_000, '{"text": ' * 100_000, "x" * 200_000 + ",a,b,c,d,A", "\0", '"'):
        path = written(tmp_path / end, line)
        with pytest.raises(ValueError, match=f"--input {path}") as caught:
            converted(tmp_path, name, "--input", path)
        assert len(str(caught.value)) < 2000


def test_flags_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "file.jsonl", ARC)
    for words, reason in (
        (["--from", "glue"], "--from glue: unknown format; use hellaswag"),
        (["--from", "arc", "--shots", "2"], "--shots 2 with --from arc: leave it out"),
        (["--from", "arc", "--task", "arc easy"], "--task 'arc easy': names have up to 64 letters, digits and _ "),
        (["--from", "arc"], "exists; add --overwrite"),
    ):
        with pytest.raises(ValueError, match=reason):
            main(["--input", str(path), "--output", str(path), *words])
    with pytest.raises(ValueError, match="no item; give files"):
        converted(tmp_path, "arc", "--input", written(tmp_path / "none.jsonl"))
