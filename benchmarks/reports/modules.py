"""Make docs/results/modules.md: every module of megazero with the first paragraph of its docstring, folder by folder.

python -m benchmarks.reports.modules
"""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "results" / "modules.md"
HEAD = """# Modules
Made by `python -m benchmarks.reports.modules` from docstrings.
[Architecture](../architecture.md) explains how they work together.
"""


def summary(path: Path) -> str:
    """Return the first paragraph of a module's docstring in one line."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split()).replace("|", "\\|")


def page() -> Iterator[str]:
    """Yield the lines of the page."""
    yield HEAD
    for init in sorted((ROOT / "megazero").rglob("__init__.py"), key=lambda path: path.parent):
        folder = init.parent
        yield f"## {folder.relative_to(ROOT)}/\n{summary(init)}\n\n| module | contents |\n|---|---|"
        for path in sorted(folder.glob("*.py")):
            if path != init:
                yield f"| `{path.stem}` | {summary(path)} |"
        yield ""


if __name__ == "__main__":
    PAGE.write_text("\n".join(page()), encoding="utf-8")
