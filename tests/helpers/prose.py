"""Rules of our English. `python -m tests.helpers.prose megazero/run docs/run.md` lists the sentences that break them.

The rules hold in docstrings, comments, messages, `--help` and documents. Code in backticks and quotations are exempt.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("megazero", "scripts", "data_tools", "benchmarks", "tests", "docs", ".ci")
# Decisions and the log are dated: they keep the words of their day. These files quote what they forbid.
EXEMPT = (
    "docs/decisions",
    "docs/log",
    "tests/helpers/prose.py",
    "tests/unit/house/test_prose.py",
    "tests/unit/house/test_house.py",
)

# (the pattern, what to write instead)
RULES = [
    (r"\bwhat(ever)?\b(?![^.]*\?)", "a noun: 'what autograd keeps' is 'saved tensors'"),
    (
        r"[,;] for (it|they|there|these|those|this|that|we|you|nothing|no)\b(?![^.]* (example|instance))"
        r"|[,;] for (the|a|an|its|their|each|every|all|one) ([\w`-]+ ){1,5}(is|are|was|were|has|have|does|do"
        r"|can|cannot|may|must|would|will)\b",
        "because, since",
    ),
    (r"\b(says?|said|saying|tells?|told|telling)\b|\bno word (from|of)\b", "report, print, warn, name, state"),
    (r"\b(go|goes|going|went|gone) on\b", "resume, continue"),
    (r"\bnot there\b|\b(is|are|was|were) there\b(?![^.]*\?)", "missing; exists"),
    (r"\b(lies?|lain)\b|\blay (in|at|on|behind)\b", "is in, is at"),
    (r"\bbeside\b", "next to"),
    (r"\balike\b", "equal, the same"),
    (r"\bso many\b", "n"),
    (
        r"\b(is|are|was|were|be|has|have|had|does|do|did|it|them|this|named|called|set|made) otherwise\b"
        r"|\botherwise (than|named|called)\b",
        "different; differs",
    ),
    (
        r"\b(anew|afresh|thereof|lest|amiss|somebody|nobody|in its stead|under way)\b",
        "again; because; a plain word",
    ),
    (r"(?<=[.:;] )(?-i:Of) (a|an|the|all|each|these|those)\b", "the subject first"),
    (r"\bneeds? (it|them) not\b|\b(is|are) void\b", "does not need; is invalid"),
    (r"\b(settles?|settled|adopts?|adopted|laden|doomed)\b", "the field's word"),
]
COMPILED = [(re.compile(pattern, re.IGNORECASE), instead) for pattern, instead in RULES]

# A docstring begins with a verb, or with the noun that it defines: docs/glossary.md.
VAGUE_OPENING = re.compile(
    r"(Of|What|For|Through|Where|Whether|By|In which|As|How|Which|Who|When|With|That|Those|To)\b"
)


def of_text(text: str) -> Iterator[str]:
    """Yield a complaint for each phrase of `text` that breaks a rule."""
    plain = re.sub(r"`[^`]*`|\"[^\"]*\"|“[^”]*”|(?<!\w)'[^'\n]*'(?!\w)", "``", text)
    plain = re.sub(r"\s+", " ", plain)
    for pattern, instead in COMPILED:
        for match in pattern.finditer(plain):
            around = plain[max(0, match.start() - 40) : match.end() + 40]
            yield f"'{match.group()}' in '...{around}...': write {instead}"


def of_python(source: str, messages: bool = True) -> Iterator[tuple[int, str]]:
    """Yield (line, complaint) of docstrings, comments and, with `messages`, of every string that is a phrase."""
    tree = ast.parse(source)
    docstrings = set()
    for node in ast.walk(tree):
        for statement in () if isinstance(node, (ast.Lambda, ast.IfExp)) else getattr(node, "body", ()):
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                docstrings.add(statement.value)
                text = statement.value.value
                if isinstance(text, str) and VAGUE_OPENING.match(text.strip()):
                    yield statement.lineno, f"'{text.strip().splitlines()[0]}' opens with a word that defines nothing"
        yield from ((node.lineno, complaint) for complaint in _conditional_product(node))
        if isinstance(node, ast.JoinedStr):  # its parts are constants, too: one sentence with holes
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "``" for part in node.values)
            if messages:
                yield from ((node.lineno, complaint) for complaint in of_text(text))
    joined = {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in joined:
            if node in docstrings or (messages and len(re.findall(r"[a-z] +[a-z]", node.value)) > 1):
                yield from ((node.lineno, complaint) for complaint in of_text(node.value))
    yield from _comments(source)


def _comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, complaint); lines of one comment are one text."""
    block: list[str] = []
    start = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if block and token.start[0] != last + 1:
                yield from ((start, complaint) for complaint in of_text(" ".join(block)))
                block = []
            start = start if block else token.start[0]
            last = token.start[0]
            block.append(token.string.lstrip("# "))
    yield from ((start, complaint) for complaint in of_text(" ".join(block)))


def _conditional_product(node: ast.AST) -> Iterator[str]:
    """Yield a complaint where a text or a list is multiplied by a condition."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        for value, factor in ((node.left, node.right), (node.right, node.left)):
            is_text = isinstance(value, (ast.JoinedStr, ast.List)) or (
                isinstance(value, ast.Constant) and isinstance(value.value, str)
            )
            called = isinstance(factor, ast.Call) and ast.unparse(factor.func) in ("bool", "isinstance", "any", "all")
            negated = isinstance(factor, ast.UnaryOp) and isinstance(factor.op, ast.Not)
            if is_text and (called or negated or isinstance(factor, (ast.Compare, ast.BoolOp))):
                yield f"{ast.unparse(node)}: a condition is an if"


def of_page(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, complaint) of a document's paragraphs; blocks of code are exempt."""
    source = re.sub(r"(?ms)^(```|~~~).*?^\1", lambda match: "\n" * match.group().count("\n"), source)
    number = 1
    for paragraph in re.split(r"(\n\s*\n|\n(?=\s*[-|]))", source):
        yield from ((number + len(paragraph) - len(paragraph.lstrip("\n")), c) for c in of_text(paragraph))
        number += paragraph.count("\n")


def of_script(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, complaint) of the comments of a shell script or a TOML file."""
    for number, line in enumerate(source.splitlines(), 1):
        if comment := re.search(r"(?:^|\s)#(?!!)(.*)", line):
            yield from ((number, complaint) for complaint in of_text(comment.group(1)))


def complaints(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, complaint) of one file. Tests and benchmarks: docstrings and comments only."""
    if path.suffix == ".py":
        yield from of_python(path.read_text(), messages=path.relative_to(ROOT).parts[0] not in ("tests", "benchmarks"))
    elif path.suffix == ".md":
        yield from of_page(path.read_text())
    else:
        yield from of_script(path.read_text())


def files(places: list[Path]) -> list[Path]:
    """Return the files with prose under `places`, without those that are exempt."""
    kinds = (".py", ".md", ".sh", ".sbatch", ".toml")
    found = [p for place in places for p in ([place] if place.is_file() else sorted(place.rglob("*")))]
    return [p for p in found if p.suffix in kinds and not str(p.relative_to(ROOT)).startswith(EXEMPT)]


def everything() -> list[Path]:
    return files([*(ROOT / folder for folder in FOLDERS), *ROOT.glob("*.md"), *ROOT.glob("*.py"), ROOT / "Makefile"])


if __name__ == "__main__":
    number = 0
    for path in files([Path(argument).resolve() for argument in sys.argv[1:]]) or everything():
        for line, complaint in complaints(path):
            number += 1
            print(f"{path.relative_to(ROOT)}:{line}: {complaint}")
    print(f"{number} complaints", file=sys.stderr)
