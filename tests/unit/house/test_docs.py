"""README and docs: names exist, shown output is printed, and pages stay short."""

import ast
import re
import shlex
from pathlib import Path

import pytest

from megazero.flags.flag_names import flags
from megazero.flags.foreign.flag_table import find_entry, retired
from megazero.flags.foreign.translate import OWN_WORDS
from tests.helpers.programs import ROOT, warm
from tests.helpers.table import for_each

README = ROOT / "README.md"
DOCS = ROOT / "docs"
# 20,000 until mixture of experts had its pages, 20,750 until optimizers and their states had theirs, 22,000 until files
# of states, and runs on fewer nodes than they began with, 23,500 until nodes came back, 24,300 until `megazero verify`,
# 24,450 until each chapter of extending.md ended with it, 24,560 until multi-token prediction, 24,800 until
# fine-tuning, 26,700 until recipes, 27,300 until running averages and live reports, 27,750 until README's tables of
# features, proofs and commands became a page, 28,480 until containers and nodes without SLURM,
# 29,150 until questions and messages, 30,150 until the tutorial and a page of choices,
# 31,500 until tasks, 33,000 until sweeps of recipes
MAX_WORDS = 33_100
README_LINES = 120
# Programs of `benchmarks/reports` write these pages whole; of other pages they write marked blocks.
GENERATED = {
    "results/families.md",
    "results/modules.md",
    "results/flags.md",
    "results/paper_speed.md",
    "results/silent_bugs.md",
}
# Flags of sbatch, srun, salloc, torchrun, pip, git and lm_eval.
FOREIGN = "nodes ntasks-per-node gpus-per-node gpus-per-task cpus-per-task exclusive exclude time partition mem "
FOREIGN += "account signal requeue dependency job-name cpu-bind nproc-per-node nproc_per_node nnodes hostfile "
FOREIGN += "repo-type include local-dir no-deps nv bind container- container-image container-mounts "
FOREIGN += "container-workdir rdzv-backend "
FOREIGN += "index-url no-install-recommends model_args model tasks diff-filter"
# Dated records, which are looked up and not read whole.
RECORDS = ("decisions/", "log/")


def written_by_hand(page: Path) -> str:
    """Return a page's text without generated blocks and, in docs/results, without tables of measurements."""
    name = page.relative_to(DOCS).as_posix()
    if name in GENERATED or name.startswith(RECORDS):
        return ""
    text = re.sub(r"<!-- (.*?) -->\n.*?<!-- end of \1 -->", "", page.read_text(), flags=re.DOTALL)
    return re.sub(r"^\|.*$", "", text, flags=re.MULTILINE) if name.startswith("results/") else text


def table(text: str, first_column: str) -> list[list[str]]:
    """Return the cells of the table whose header begins with `first_column`."""
    rows = text[text.index(f"| {first_column} |") :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_the_readme_is_read_in_a_few_minutes() -> None:
    assert len(README.read_text().splitlines()) <= README_LINES


def test_every_feature_has_a_flag_and_a_test() -> None:
    rows = table((DOCS / "features.md").read_text(), "feature")
    assert len(rows) > 40
    for feature, flag, test in rows:
        for name in re.findall(r"`([^`]+)`", flag):
            known = {*flags(), *OWN_WORDS}
            assert name[2:] in known if name.startswith("--") else (ROOT / name).is_file(), f"{feature}: {name}"
        (file,) = re.findall(r"`([^`]+)`", test)
        assert list((ROOT / "tests").rglob(file)), f"{feature}: {file}"


@pytest.mark.second
def test_the_plan_of_its_page_is_printed(tmp_path: Path) -> None:
    command, shown = re.search(
        r"```\nmegazero plan ([^`]*)\n```\n```\n([^`]*)```", (DOCS / "plan.md").read_text()
    ).groups()
    words = shlex.split(command.replace("\\\n", " ").replace("plans/100b", str(tmp_path)))
    printed = [line.rstrip() for line in warm("pretrain_gpt.py", "--plan", *words).stdout.splitlines()]
    assert "\n".join(printed).startswith(shown.rstrip("\n"))


def test_the_end_of_the_quickstart_is_that_of_the_readme() -> None:
    """Its words; seconds and losses depend on the machine."""
    source = (ROOT / "scripts" / "quickstart.py").read_text()
    (shown,) = re.findall(r"^# (Done, .*)$", README.read_text(), re.MULTILINE)
    for words in filter(str.strip, re.split(r"[\d.]+|->", shown)):
        assert words.strip() in re.sub(r"\[/?bold\]|\\\n", "", source), words


def test_flags_of_the_pages_exist() -> None:
    """Ours, those of other systems with an answer, and those of scripts and benchmarks, but none that is retired."""
    sources = [
        path
        for folder in ("scripts", "data_tools", "benchmarks", "tests", "megazero/console")
        for path in (ROOT / folder).rglob("*")
    ]
    text = "\n".join(path.read_text() for path in sources if path.suffix in (".py", ".sh", ".sbatch"))
    known = {
        *re.findall(r"--([a-z][\w-]+)", text),
        *(name.replace("_", "-") for name in re.findall(r"^    (\w+): ", text, re.M)),
    }
    known |= {*flags(), *FOREIGN.split(), "help-all"}
    pages = [README, ROOT / "CONTRIBUTING.md", *DOCS.glob("*.md")]
    missing = []
    for page in pages:
        for flag in set(re.findall(r"(?<![\w-])--([a-z][\w-]*\w)", page.read_text())):
            entry = find_entry(flag.replace("_", "-"))
            if flag in retired() or (entry is None and not {flag, flag.removeprefix("no-")} & known):
                missing.append(f"{page.name}: --{flag}")
    assert not missing


@for_each("page", [README, ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))])
def test_lines_are_short(page: Path) -> None:
    """Rows of tables cannot be wrapped; those of the README fit."""
    long = [line for line in page.read_text().splitlines() if len(line) > 120]
    if page != README:
        shown = re.findall(r"^```.*?^```", page.read_text(), re.DOTALL | re.MULTILINE)
        long = [
            line for line in long if not line.startswith(("|", "- `")) and not any(line in block for block in shown)
        ]
    assert not long


def test_few_words_are_written_by_hand() -> None:
    counts = {page: len(written_by_hand(page).split()) for page in DOCS.rglob("*.md")}
    assert sum(counts.values()) <= MAX_WORDS, {page.name: count for page, count in counts.items() if count}
    assert {page for page in GENERATED if not (DOCS / page).is_file()} == set()


def test_every_page_is_linked() -> None:
    """From the README, CONTRIBUTING or another page, so that readers find it."""
    sources = [README, ROOT / "CONTRIBUTING.md", ROOT / "data_tools" / "README.md", *DOCS.rglob("*.md")]
    found = set()
    for source in sources:
        for link in re.findall(r"\]\(([^)#:]+\.md)[^)]*\)", source.read_text()):
            target = (source.parent / link).resolve()
            found |= {target} - {source}
    pages = {page for page in DOCS.rglob("*.md") if page.parent != DOCS / "decisions"}
    assert pages - found == set()


TOUR_LINES = 1_250


def test_the_tour_leads_to_functions_and_shows_the_printed_program() -> None:
    """Its stops exist, an hour is enough to read them, and the printed step is that of the command."""
    text, lines = (DOCS / "tour.md").read_text(), 0
    stops = re.findall(r"\[`([\w.]+)`\]\(\.\./(megazero/[\w/]+\.py)\)", text)
    assert len(re.findall(r"^\d+\. ", text, re.MULTILINE)) == 12 and len(stops) > 12
    for name, path in dict.fromkeys(stops):
        nodes = {ast.parse((ROOT / path).read_text())}
        for part in name.split("."):
            nodes = {child for node in nodes for child in node.body if getattr(child, "name", "") == part}
        (node,) = nodes
        lines += node.end_lineno - node.lineno + 1
    assert lines <= TOUR_LINES, lines
    command, shown = re.search(
        r"```bash\npython (scripts/print_program.py [^\n]*)\n```.*?```\n(.*?)```", text, re.DOTALL
    ).groups()
    printed = warm(*shlex.split(command)).stdout
    assert "\n".join(line.split("#")[0].rstrip() for line in shown.splitlines()) == printed.rstrip("\n")


def texts_of_the_programs() -> list[str]:
    """Return the strings of the programs, those of several parts joined, with "\0" for values."""

    def joined(node: ast.expr) -> str:
        if isinstance(node, ast.JoinedStr):
            return "".join(map(joined, node.values))
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return joined(node.left) + joined(node.right)
        return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else "\0"

    files = [path for folder in ("megazero", "data_tools") for path in (ROOT / folder).rglob("*.py")]
    nodes = (node for path in files for node in ast.walk(ast.parse(path.read_text())))
    return [joined(node) for node in nodes if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp)]


def test_the_messages_of_the_pages_are_printed() -> None:
    """Each part between values is in one text of the programs."""
    page = (DOCS / "questions.md").read_text()
    rows = [row for part in page.split("| message |")[1:] for row in table(f"| message |{part}", "message")]
    texts, missing = texts_of_the_programs(), []
    assert len(rows) > 30
    for shown, *_ in rows:
        parts = [part.strip(" .") for part in shown.strip("`").split("...")]
        if not any(all(part in text for part in parts if len(part) > 3) for text in texts):
            missing.append(shown)
    assert not missing
