"""Pages of the site besides docs/, as hooks of mkdocs: README first, flags, messages and decisions, linked sources.

GitHub and the site show the same files. Two things differ. A link that leaves docs/ leads to a page of PAGES or to a
copy of the file. Python-Markdown wants an empty line before a list, and four spaces for each level of it.
"""

import ast
import itertools
import logging
import posixpath
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megazero.flags.flag_names import flags
from megazero.flags.help import help_of

ROOT = Path(__file__).resolve().parent.parent
log = logging.getLogger("mkdocs.hooks.site_pages")
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "data_tools/README.md": "data_tools.md",
    "docs/decisions": "reference/decisions.md",
}
LINK = re.compile(r"(?<=\]\()([^)#\s:]+)(?=[)#])")
FENCE, ITEM = re.compile(r"^ *```"), re.compile(r"^( *)([-*]|\d+\.) +")
ALERT = re.compile(r"^> \[!(\w+)\]\n((?:>.*\n)+)", re.MULTILINE)
STYLE = "@media (min-width: 76.25em) { .md-grid { max-width: 80rem } }\n"  # for lines of 120 characters
SHOWN = (".md", ".png", ".svg")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not in docs/, and every file that a page links."""
    generated = {
        "reference/flags.md": flags_page(),
        "reference/messages.md": messages_page(),
        "reference/decisions.md": decisions_page(),
        "style.css": STYLE,
    }
    generated |= {name: (ROOT / source).read_text() for source, name in PAGES.items() if (ROOT / source).is_file()}
    for name, text in generated.items():
        files.append(File.generated(config, name, content=text))
    linked = {
        target
        for page in files.documentation_pages()
        for target in map(lambda link, page=page: _target(link, page.src_uri), LINK.findall(page.content_string))
    }
    for target in sorted(linked - {*PAGES}):
        if (name := _on_site(target)) and files.get_file_from_path(name) is None:
            path = ROOT / target
            text = "\n".join(sorted(each.name for each in path.iterdir())) if path.is_dir() else path.read_text()
            files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Return a page as the site needs it."""
    folder = posixpath.dirname(page.file.src_uri)

    def lead(link: re.Match[str]) -> str:
        target = _target(link[0], page.file.src_uri)
        if not (name := _on_site(target)):
            log.warning(f"{page.file.src_uri}: the link {link[0]} leads to no file")
            return link[0]
        return posixpath.relpath(name, folder or ".")

    return _spaced_lists(ALERT.sub(_box, LINK.sub(lead, markdown)))


def _box(alert: re.Match[str]) -> str:
    """Return GitHub's alert as the site's box."""
    return f'!!! warning "{alert[1].capitalize()}"\n\n' + re.sub("^> ?", "    ", alert[2], flags=re.MULTILINE)


def _target(link: str, page: str) -> str:
    """Return the path in the repository that a link of a page of the site means."""
    source = next((source for source, name in PAGES.items() if name == page), f"docs/{page}")
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))


def _on_site(target: str) -> str:
    """Return the site's name of a path in the repository, or "" if there is no such path."""
    if target in PAGES:
        return PAGES[target]
    path = ROOT / target
    if target.startswith("docs/reference/"):  # generated, and judged by mkdocs
        return target.removeprefix("docs/")
    if not path.exists():
        return ""
    return target.removeprefix("docs/") if path.suffix in SHOWN else f"source/{target}.txt"


def _spaced_lists(markdown: str) -> str:
    """Return the text with lists as Python-Markdown reads them."""
    lines: list[str] = []
    columns: list[tuple[int, int]] = []  # of each open item: of its marker, and of its text
    fenced = loose = False  # loose: an empty line is in the open item, so that the next item needs one too
    for line in markdown.split("\n"):
        fence, item = FENCE.match(line), None if fenced else ITEM.match(line)
        indent = len(line) - len(line.lstrip())
        listed = bool(columns)
        while columns and line.strip() and not fenced and indent < columns[-1][1]:
            if item or indent <= columns[-1][0]:
                columns.pop()
            else:
                break
        follows_text = item and lines and lines[-1].strip() and not ITEM.match(lines[-1])
        if follows_text and (columns or not listed or loose):
            lines.append("")
        shift = 4 * len(columns) - columns[-1][1] if columns else 0
        lines.append(" " * max(indent + shift, 0) + line.lstrip() if line.strip() else line)
        loose = not item and (loose or not line.strip()) if listed else False
        if item:
            columns.append((indent, item.end()))
        fenced ^= bool(fence)
    return "\n".join(lines)


def flags_page() -> str:
    """Return all flags of a run by group, from the fields of the options."""
    lines = ["# Flags", "", "`megazero train --help-all`, generated. A preset is a TOML file of the same names."]
    group = ""
    for name, flag in flags().items():
        if flag.group != group:
            group = flag.group
            lines += ["", f"## {group.capitalize()}", ""]
        default = f" *Default:* `{flag.default}`." if flag.default not in ("", None, ()) else ""
        lines.append(f"- **`--{name}`** {_escaped(help_of(name))}{default}")
    return "\n".join(lines) + "\n"


def messages_page() -> str:
    """Return the texts of refusals, by module, with ... for values."""
    lines = [
        "# Messages",
        "",
        "Refusals of the programs, generated from the source; `...` are values, and texts of other",
    ]
    lines += [
        "modules. Search this page for a part of a message without values. [Questions](../questions.md) has reasons."
    ]
    for path in sorted(path for folder in ("megazero", "data_tools") for path in (ROOT / folder).rglob("*.py")):
        texts = list(dict.fromkeys(_refusals(ast.parse(path.read_text()))))
        if texts:
            lines += ["", f"## {path.relative_to(ROOT)}", "", *(f"- {_escaped(text)}" for text in texts)]
    return "\n".join(lines) + "\n"


def _refusals(tree: ast.Module) -> Iterator[str]:
    """Yield the text of each exception that is raised, by its class or by a function that returns one."""
    shared = _named_texts(tree.body)
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        named = shared | _named_texts(ast.walk(function))
        for node in ast.walk(function):
            call = node.exc if isinstance(node, ast.Raise) else node.value if isinstance(node, ast.Return) else None
            if not isinstance(call, ast.Call):
                continue
            if isinstance(node, ast.Raise) or getattr(call.func, "id", "").endswith("Error"):
                texts = (text for argument in call.args for text in _texts(argument, named))
                yield from (text for text in texts if len(re.findall(r"[a-z]{2,}", text)) > 3)


def _named_texts(nodes: Iterable[ast.AST]) -> dict[str, list[str]]:
    """Return the texts that names are assigned."""
    found: dict[str, list[str]] = {}
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            texts = [text for text in _texts(node.value, {}) if text.count(" ") > 1]
            found.setdefault(node.targets[0].id, []).extend(texts)
    return found


def _texts(node: ast.expr, named: Mapping[str, list[str]]) -> list[str]:
    """Return the strings that an expression can have, with ... for values."""
    if isinstance(node, ast.Constant):
        return [str(node.value)]
    if isinstance(node, ast.FormattedValue):
        return _texts(node.value, named) if isinstance(node.value, ast.Name) else ["..."]
    if isinstance(node, ast.Name):
        return named.get(node.id) or ["..."]
    if isinstance(node, ast.JoinedStr):
        return list(map("".join, itertools.product(*(_texts(part, named) for part in node.values))))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return list(map("".join, itertools.product(_texts(node.left, named), _texts(node.right, named))))
    if isinstance(node, ast.IfExp):
        return [*_texts(node.body, named), *_texts(node.orelse, named)]
    return ["..."]


def decisions_page() -> str:
    """Return the list of the decisions, by their titles."""
    pages = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    titles = [f"- [{page.read_text().splitlines()[0].removeprefix('# ')}](decisions/{page.name})" for page in pages]
    return "\n".join(["# Decisions", "", *titles]) + "\n"


def _escaped(text: str) -> str:
    """Return a text in which Markdown finds no markup."""
    return re.sub(r"([\\`*_{}\[\]<>#|])", r"\\\1", " ".join(text.split()))
