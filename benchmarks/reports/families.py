"""Make docs/results/families.md: the families of --architecture, from their rows in two tables.

python -m benchmarks.reports.families
"""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megazero.engine.options.architectures import ARCHITECTURES, ArchitectureTraits
from megazero.flags.architecture_flags import flags_of

from benchmarks.reports.blocks import markdown
from megazero.flags.flag_names import as_flag
from megazero.flags.presets import preset_names, preset_values
from megazero.interop.huggingface.configuration import LACKING
from megazero.interop.huggingface.families import MODELS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "results" / "families.md"
FILES = ("tensor_names.py", "gpt_families.py", "families.py")  # of MODELS and its constants
TABLES = {"engine/options/architectures.py": "ARCHITECTURES", "flags/architecture_flags.py": "ARCHITECTURE_FLAGS"}
HEAD = """# Families
Made by `python -m benchmarks.reports.families`. A family is a row of `ARCHITECTURES` in
[`megazero/engine/options/architectures.py`](../../megazero/engine/options/architectures.py) and, if transformers
has it, a row of `MODELS` in
[`megazero/interop/huggingface/families.py`](../../megazero/interop/huggingface/families.py);
[how to add one](../extending.md#add-an-architecture). Every family of the table except `parallel`, whose layers are
gptj's, is tested with values of its options that are no defaults:

| test | it shows |
|---|---|
| [`unit/engine/model/test_families.py`](../../tests/unit/engine/model/test_families.py) | logits and gradients of \
transformers' class, in fp64 to 1e-10 and in fp32; its configuration there and back; its number of parameters; \
`--plan` |
| [`unit/flags/test_presets.py`](../../tests/unit/flags/test_presets.py) | the published sizes of its presets, and \
their number of weights in transformers |
| [`parallel/test_families.py`](../../tests/parallel/test_families.py) | plain PyTorch's losses and norms in fp64 in \
four layouts, and the predicted bytes |
| [`end_to_end/test_huggingface_families.py`](../../tests/end_to_end/test_huggingface_families.py) | export, import, \
and generation with a cache on two ranks |

`parallel` is tested by [`parallel/test_parity.py`](../../tests/parallel/test_parity.py). Some of these tests are marked
slow.
"""
REFUSED = """
## Model types of transformers that are refused
`--hf-config` names the same reason.
"""
NORMS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm", "rmsnorm-1p": "RMSNorm of weight 1 + w"}
PLACES = {"before": "before", "after": "after", "around": "before and after"}
PARALLEL = (
    "{} {} attention and MLP",
    "attention and MLP side by side, one {} {} them",
    "attention and MLP side by side, a {} {} each",
)
ACTIVATIONS = {"gelu": "GELU", "gelu-tanh": "tanh GELU", "swiglu": "SwiGLU", "geglu-tanh": "tanh GEGLU"}
ACTIVATIONS |= {"swiglu-clamped": "clamped SwiGLU"}
BIASES = {"qkv": "q, k, v", "proj": "projection", "mlp": "MLP", "experts": "experts", "logits": "logits"}


def structure(traits: ArchitectureTraits) -> str:
    """Describe the traits of an architecture that no flag changes."""
    biases = ", ".join(BIASES[name] for name in traits.biases)
    parts = [
        PARALLEL[traits.parallel].format(NORMS[traits.norm], PLACES[traits.norms]),
        ACTIVATIONS[traits.activation],
        f"biases: {biases}" if biases else "no biases",
        "learned positions" if traits.learned_positions else "rotary positions",
    ]
    parts += ["attention sinks"] * traits.sinks
    parts += ["q, k, v in one weight"] * traits.fused_qkv + ["embeddings x sqrt(hidden size)"] * traits.root_embedding
    return "; ".join(parts)


def flag_of(name: str, value: Any) -> str:
    return as_flag(name, f"{value:g}" if isinstance(value, float) else value)


class Source(NamedTuple):
    """Rows of a table in a module, and the definitions of its module.

    Attributes:
        rows: the expression of each row, by the name of its architecture; a family can have several.
        lines: of each row.
        definitions: constants, functions and classes at the top of the module, by name, without the table.
    """

    rows: dict[str, list[ast.expr]]
    lines: dict[str, int]
    definitions: dict[str, ast.stmt]


def lines_of(first: ast.expr | ast.stmt, last: ast.expr | ast.stmt) -> int:
    return (last.end_lineno or last.lineno) - first.lineno + 1


def definitions(tree: ast.Module) -> dict[str, ast.stmt]:
    found: dict[str, ast.stmt] = {}
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found[node.name] = node
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {name.id: node for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    return found


def architectures() -> Source:
    """Read the tables of traits and flags."""
    rows: dict[str, list[ast.expr]] = {name: [] for name in ARCHITECTURES}
    lines, known = dict.fromkeys(ARCHITECTURES, 0), dict[str, ast.stmt]()
    for file, variable in TABLES.items():
        known |= definitions(ast.parse((ROOT / "megazero" / file).read_text(encoding="utf-8")))
        table = known.pop(variable)
        assert isinstance(table, ast.Assign) and isinstance(table.value, ast.Dict)
        for key, row in zip(table.value.keys, table.value.values, strict=True):
            assert isinstance(key, ast.Constant)
            rows[key.value].append(row)
            lines[key.value] += lines_of(key, row)
    return Source(rows, lines, known)


def models() -> Source:
    """Read the table of transformers' families."""
    files = (ROOT / "megazero/interop/huggingface" / name for name in FILES)
    known = definitions(ast.parse("\n".join(file.read_text(encoding="utf-8") for file in files)))
    table = known.pop("MODELS")
    assert isinstance(table, ast.Assign) and isinstance(table.value, ast.DictComp)
    each = table.value.generators[0].iter
    assert isinstance(each, ast.Tuple)
    rows: dict[str, list[ast.expr]] = {}
    lines = dict.fromkeys(ARCHITECTURES, 0)
    for model, row in zip(MODELS.values(), each.elts, strict=True):
        rows.setdefault(model.architecture, []).append(row)
        lines[model.architecture] += lines_of(row, row)
    return Source(rows, lines, known)


def reached(known: Mapping[str, ast.stmt], nodes: list[ast.expr]) -> set[str]:
    """Return the definitions that expressions use, directly or through others."""
    found: set[str] = set()
    left: list[ast.AST] = list(nodes)
    while left:
        names = {node.id for node in ast.walk(left.pop()) if isinstance(node, ast.Name)}
        new = (names & known.keys()) - found
        found |= new
        left += [known[name] for name in new]
    return found


def own_lines(source: Source) -> tuple[dict[str, int], int]:
    """Return the lines of each family, its row and the definitions that it alone uses, and those that several use."""
    used = {name: reached(source.definitions, rows) for name, rows in source.rows.items()}
    counts, shared = dict(source.lines), 0
    for definition, node in source.definitions.items():
        users = [name for name, names in used.items() if definition in names]
        if len(users) == 1:
            counts[users[0]] += lines_of(node, node)
        else:
            shared += lines_of(node, node) if users else 0
    return counts, shared


def page() -> Iterator[str]:
    """Yield the lines of the page."""
    yield HEAD
    traits, theirs = own_lines(architectures()), own_lines(models())
    presets: dict[str, list[str]] = {name: [] for name in ARCHITECTURES}
    for preset in preset_names():
        presets[preset_values(preset).get("architecture", "gpt2")].append(f"`{preset}`")
    rows = []
    for name, entry in ARCHITECTURES.items():
        classes = [f"`{m.model_type}`, {m.model_class}" for m in MODELS.values() if m.architecture == name]
        flags = [f"`{flag_of(*default)}`" for default in flags_of(name).defaults.items()]
        lines = f"{traits[0][name]} + {theirs[0][name]}"
        rows.append(
            [f"`{name}`", "; ".join(classes), structure(entry), ", ".join(flags), ", ".join(presets[name]), lines]
        )
    columns = ["architecture", "`model_type` and class of transformers", "structure", "defaults", "presets"]
    yield markdown([*columns, "lines"], rows)
    yield f"""
Lines: of its rows in `engine/options/architectures.py`, in `flags/architecture_flags.py` and in
`interop/huggingface/families.py`, each with the constants and functions that it alone uses. Several families share
{traits[1]} and {theirs[1]} more.
"""
    yield REFUSED
    reasons: dict[str, list[str]] = {}
    for name, part in sorted(LACKING.items()):
        reasons.setdefault(part, []).append(f"`{name}`")
    yield markdown(
        ["part that no layer computes", "`model_type`"], [[part, ", ".join(n)] for part, n in reasons.items()]
    )
    yield "\nOther types were not tried.\n"


if __name__ == "__main__":
    PAGE.write_text("\n".join(page()), encoding="utf-8")
