"""Converted items have the requests of lm-eval's own tasks. Skipped where lm-eval is not installed."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.data.test_task_formats import ARC, HELLASWAG, PIQA, ROW, converted, written

pytestmark = pytest.mark.second
LAMBADA = {"text": "He gave it\n to  Sarah"}
CSV = [f"{ROW}C", "Who?,a,b,c,d,A"]
QUESTIONS = [
    {"question": 'Which, of "these"?\nis it', "choices": ["one", "two, three", "four", "five"], "answer": 2},
    {"question": "Who?", "choices": list("abcd"), "answer": 0},
]
EXAMPLES = [
    {"question": "When?", "choices": list("1234"), "answer": 3},
    {"question": "Where?", "choices": list("wxyz"), "answer": 1},
]
HUB_ARC = {
    "question": ARC["question"]["stem"],
    "choices": {"text": ["dry", "wet"], "label": ["1", "2"]},
    "answerKey": ARC["answerKey"],
}
# format -> (lm-eval's file, rows as the hub has them, the authors' file and its lines)
TASKS: dict[str, tuple[str, list[Any], str, list[Any]]] = {
    "hellaswag": ("hellaswag/hellaswag.yaml", [HELLASWAG | {"label": "1"}], "hellaswag_val.jsonl", [HELLASWAG]),
    "arc": ("arc/arc_easy.yaml", [HUB_ARC], "ARC-Easy-Test.jsonl", [ARC]),
    "piqa": ("piqa/piqa.yaml", [PIQA | {"label": 1}], "valid.jsonl", [PIQA]),
    "lambada": ("lambada/lambada_openai.yaml", [LAMBADA], "lambada_test.jsonl", [LAMBADA]),
    "mmlu": ("mmlu/default/mmlu_anatomy.yaml", QUESTIONS, "test/anatomy_test.csv", CSV),
}


def of_lm_eval(folder: Path, file: str, rows: list[Any], shots: int) -> list[tuple[str, str]]:
    """Return the (context, continuation) pairs of lm-eval's task on these rows."""
    import lm_eval
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks._yaml_loader import load_yaml

    files = {"test": str(written(folder / "rows.json", *rows))}
    if "mmlu" in file:
        files["dev"] = str(written(folder / "dev.json", *EXAMPLES))
    own = load_yaml(Path(lm_eval.__file__).parent / "tasks" / file)
    local = {"dataset_path": "json", "dataset_name": None, "num_fewshot": shots}
    local |= {"dataset_kwargs": {"data_files": files}}
    local |= {"training_split": None, "validation_split": None, "test_split": "test"}
    task = ConfigurableTask(config={key: value for key, value in own.items() if key != "tag"} | local)
    task.set_fewshot_seed(1)  # of a sampler that takes the first ones
    task.build_all_requests(limit=None, rank=0, world_size=1)
    return [request.args for request in task.instances]


@pytest.mark.parametrize(("name", "shots"), [*((name, 0) for name in TASKS), ("mmlu", 2)])
def test_requests_are_those_of_lm_eval(name: str, shots: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install lm-eval")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    file, rows, path, lines = TASKS[name]
    (tmp_path / "valid-labels.lst").write_text("1\n")
    written(tmp_path / "dev" / "anatomy_dev.csv", "When?,1,2,3,4,D", "Where?,w,x,y,z,B")
    words = ["--input", written(tmp_path / path, *lines), *(["--shots", shots] if shots else [])]
    items = converted(tmp_path, name, *words)
    assert [(item.context, text) for item in items for text in item.texts] == of_lm_eval(tmp_path, file, rows, shots)
    assert json.loads((tmp_path / "items.jsonl").read_text().splitlines()[0])["task"] == name
