"""The house rules of docs/architecture.md, held against the source of megazero/: who may import whom, and more.

Every rule is a function from sources to complaints. The code must give none, and a planted fault must give one.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "megazero"
TABLE_ROW = re.compile(r"^\| (\d) \| `(\w+/?)` \|", re.MULTILINE)
HEAVY = {"transformers", "tokenizers", "datasets", "wandb", "tensorboard", "matplotlib", "sentencepiece", "rich"}
HEAVY_MODULES = {"torch.utils.tensorboard"}
PARSERS = {"argparse", "getopt", "optparse", "tyro", "click", "fire"}
CONTAINERS = {"list", "dict", "set", "defaultdict", "Counter", "deque", "OrderedDict", "WeakKeyDictionary"}
MUTATORS = {"append", "extend", "insert", "add", "update", "setdefault", "pop", "popitem", "popleft", "appendleft"}
MUTATORS |= {"remove", "discard", "clear", "sort", "reverse", "subtract"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)

# "zero", "data.loader", "checkpoint" (its __init__) -> what is written there
Sources = dict[str, ast.Module]


@functools.cache
def sources() -> Sources:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name:
            found[name] = ast.parse(path.read_text())
    return found


@functools.cache
def floors() -> dict[str, int]:
    """ "zero" or "data/" -> floor, as the table says."""
    return {name: int(floor) for floor, name in TABLE_ROW.findall((ROOT / "docs" / "architecture.md").read_text())}


def row_of(module: str) -> str:
    """The table has one row for a whole package."""
    top, *rest = module.split(".")
    return f"{top}/" if rest or (PACKAGE / top).is_dir() else top


def imports(tree: ast.AST, known: set[str], outside_functions: bool = False) -> Iterator[tuple[int, str]]:
    """(line, full name) of whatever is imported; `from megazero import zero` is megazero.zero."""
    for node in walk(tree, into_functions=not outside_functions):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            for alias in node.names:
                full = f"{base}.{alias.name}"
                is_module = full.removeprefix("megazero.") in known or not full.startswith("megazero.")
                yield node.lineno, full if is_module else base


def walk(tree: ast.AST, into_functions: bool = True) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(tree):
        yield child
        if into_functions or not isinstance(child, FUNCTIONS):
            yield from walk(child, into_functions)


def own_imports(sources: Sources, module: str) -> set[str]:
    found = (name for _, name in imports(sources[module], set(sources)) if name.startswith("megazero"))
    return {name.removeprefix("megazero").removeprefix(".") for name in found}


def is_of(name: str, modules: set[str]) -> bool:
    """torch.distributed.checkpoint is of torch.distributed."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


# -- the rules


def floors_are_kept(sources: Sources) -> Iterator[str]:
    table = floors()
    for module in sources:
        for other in own_imports(sources, module):
            if other in sources and table[row_of(other)] > table[row_of(module)]:
                yield f"{module} (floor {table[row_of(module)]}) imports {other} (floor {table[row_of(other)]})"
            if other not in sources:
                yield f"{module} imports megazero.{other}, which is no module"


def no_cycles(sources: Sources) -> Iterator[str]:
    try:
        TopologicalSorter({module: own_imports(sources, module) for module in sources}).prepare()
    except CycleError as error:
        yield " imports ".join(error.args[1])


def imports_are_absolute(sources: Sources) -> Iterator[str]:
    for module, tree in sources.items():
        yield from (f"{module}:{line}: {name}" for line, name in imports(tree, set(sources)) if name.startswith("."))


def floor_0_is_pure(sources: Sources) -> Iterator[str]:
    allowed = sys.stdlib_module_names | {"megazero"}
    for module, tree in sources.items():
        if floors()[row_of(module)] == 0:
            for line, name in imports(tree, set(sources)):
                top = name.split(".")[0]
                if top not in allowed and (module, top) != ("config", "tyro"):
                    yield f"{module}:{line} imports {name}"


def torch_distributed_stays_in_mesh(sources: Sources) -> Iterator[str]:
    for module, tree in sources.items():
        if row_of(module) not in ("mesh", "checkpoint/"):
            for line, name in imports(tree, set(sources)):
                if is_of(name, {"torch.distributed"}):
                    yield f"{module}:{line} imports {name}"
            for node in ast.walk(tree):
                if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
                    yield f"{module}:{node.lineno} uses torch.distributed"


def strangers_stay_strangers(sources: Sources) -> Iterator[str]:
    for module, stranger in (("zero", "pipeline"), ("zero", "model"), ("pipeline", "zero")):
        if stranger in own_imports(sources, module):
            yield f"{module} imports {stranger}"


def only_config_parses_arguments(sources: Sources) -> Iterator[str]:
    for module, tree in sources.items():
        if module == "config":
            continue
        for line, name in imports(tree, set(sources)):
            if is_of(name, PARSERS):
                yield f"{module}:{line} imports {name}"
        for node in tree.body:
            is_script = isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"
            if not is_script and any(
                "sys.argv" in ast.unparse(n) for n in ast.walk(node) if isinstance(n, ast.Attribute)
            ):
                yield f"{module}:{node.lineno} reads sys.argv"


def only_mesh_reads_the_environment(sources: Sources) -> Iterator[str]:
    names = {"os.environ", "os.environb", "os.getenv", "os.putenv"}
    for module, tree in sources.items():
        if module != "mesh":
            yield from (f"{module}:{line} {name}" for line, name in imports(tree, set(sources)) if name in names)
            for node in ast.walk(tree):
                if isinstance(node, ast.Attribute) and ast.unparse(node) in names:
                    yield f"{module}:{node.lineno} {ast.unparse(node)}"


def nothing_is_global(sources: Sources) -> Iterator[str]:
    for module, tree in sources.items():
        yield from (f"{module}:{node.lineno}" for node in ast.walk(tree) if isinstance(node, ast.Global))


def no_module_level_state(sources: Sources) -> Iterator[str]:
    """No function changes a list, dict or set of any module, nor sets what belongs to something imported."""
    everyones = {name for tree in sources.values() for name in _containers(tree)}
    for module, tree in sources.items():
        imported = set()
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                imported |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        shared = set(_containers(tree)) | imported & everyones
        for function in (node for node in ast.walk(tree) if isinstance(node, FUNCTIONS)):
            local = _local_names(function)
            for line, target, is_set in _changed(function):
                name = re.split(r"\W", target)[0]
                if name not in local and name in (shared | imported if is_set else shared):
                    yield f"{module}:{line} changes {target}"


def _containers(tree: ast.Module) -> Iterator[str]:
    literals = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
    for node in tree.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            value = node.value
            made = isinstance(value, ast.Call) and ast.unparse(value.func).split(".")[-1] in CONTAINERS
            if isinstance(value, literals) or made:
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    yield ast.unparse(target)


def _local_names(function: ast.AST) -> set[str]:
    names = {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return names | {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}


def _changed(function: ast.AST) -> Iterator[tuple[int, str, bool]]:
    """(line, expression, whether an item or attribute of it is set) of whatever a function changes in place."""
    for node in ast.walk(function):
        if isinstance(node, (ast.Attribute, ast.Subscript)) and isinstance(node.ctx, (ast.Store, ast.Del)):
            yield node.lineno, ast.unparse(node.value), True
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            yield node.lineno, ast.unparse(node.func.value), False


def heavy_libraries_wait(sources: Sources) -> Iterator[str]:
    for module, tree in sources.items():
        for line, name in imports(tree, set(sources), outside_functions=True):
            if is_of(name, HEAVY | HEAVY_MODULES):
                yield f"{module}:{line} imports {name} at once"


def only_mesh_compares_sizes(sources: Sources) -> Iterator[str]:
    """On an axis of size 1 a collective is the identity: whoever asks `axis.size > 1` does the axis' work."""
    for module, tree in sources.items():
        for node in ast.walk(tree):
            if module != "mesh" and isinstance(node, ast.Compare):
                sides = [node.left, *node.comparators]
                sizes = [s for s in sides if isinstance(s, ast.Attribute) and s.attr == "size"]
                if sizes and any(isinstance(s, ast.Constant) for s in sides):
                    yield f"{module}:{node.lineno} {ast.unparse(node)}"


RULES: list[Callable[[Sources], Iterator[str]]] = [
    floors_are_kept,
    no_cycles,
    imports_are_absolute,
    floor_0_is_pure,
    torch_distributed_stays_in_mesh,
    strangers_stay_strangers,
    only_config_parses_arguments,
    only_mesh_reads_the_environment,
    nothing_is_global,
    no_module_level_state,
    heavy_libraries_wait,
    only_mesh_compares_sizes,
]

# (rule, module, a line that breaks the rule there)
FAULTS = [
    (floors_are_kept, "flat", "from megazero.mesh import Axis"),
    (floors_are_kept, "zero", "def f():\n    from megazero import engine"),
    (floors_are_kept, "data.loader", "from megazero.checkpoint.shards import LocalShard"),
    (floors_are_kept, "zero", "import megazero.nonsense"),
    (no_cycles, "layout", "import megazero.config"),
    (no_cycles, "checkpoint.manifest", "from megazero.checkpoint import find"),
    (imports_are_absolute, "zero", "from .flat import ALIGN"),
    (floor_0_is_pure, "flat", "def f():\n    import torch.nn"),
    (floor_0_is_pure, "layout", "import tyro"),
    (torch_distributed_stays_in_mesh, "trainer", "import torch.distributed as dist"),
    (torch_distributed_stays_in_mesh, "model", "from torch import distributed"),
    (torch_distributed_stays_in_mesh, "model", "import torch\ntorch.distributed.barrier()"),
    (strangers_stay_strangers, "zero", "from megazero.pipeline import run"),
    (strangers_stay_strangers, "zero", "from megazero import model"),
    (strangers_stay_strangers, "pipeline", "import megazero.zero"),
    (only_config_parses_arguments, "trainer", "from argparse import ArgumentParser"),
    (only_config_parses_arguments, "trainer", "import sys\nprint(sys.argv[1])"),
    (only_mesh_reads_the_environment, "log", "import os\nos.environ['RANK']"),
    (only_mesh_reads_the_environment, "log", "from os import environ"),
    (only_mesh_reads_the_environment, "log", "import os\ndef f():\n    return os.getenv('RANK')"),
    (nothing_is_global, "zero", "def f():\n    global x"),
    (no_module_level_state, "zero", "CACHE = {}\ndef f():\n    CACHE[1] = 2"),
    (no_module_level_state, "zero", "SEEN: set[int] = set()\ndef f():\n    SEEN.add(1)"),
    (no_module_level_state, "zero", "SEEN = [1]\nclass A:\n    def f(self):\n        del SEEN[0]"),
    (no_module_level_state, "zero", "from megazero.schedule import SCHEDULES\ndef f():\n    SCHEDULES.clear()"),
    (no_module_level_state, "zero", "import torch\ndef f():\n    torch.Tensor.__add__ = None"),
    (heavy_libraries_wait, "log", "import wandb"),
    (
        heavy_libraries_wait,
        "log",
        "try:\n    from torch.utils.tensorboard import SummaryWriter\nexcept ImportError: pass",
    ),
    (only_mesh_compares_sizes, "zero", "def f(axis):\n    return axis.size > 1"),
    (only_mesh_compares_sizes, "zero", "def f(mesh):\n    return 1 == mesh.dp.size"),
]


def test_the_table_names_every_module_and_no_other() -> None:
    assert {row_of(module) for module in sources()} == set(floors())
    assert sorted(set(floors().values())) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_code_keeps_the_rule(rule: Callable[[Sources], Iterator[str]]) -> None:
    assert list(rule(sources())) == []


@pytest.mark.parametrize(("rule", "module", "fault"), FAULTS, ids=lambda x: getattr(x, "__name__", None))
def test_the_rule_sees_a_fault(rule: Callable[[Sources], Iterator[str]], module: str, fault: str) -> None:
    """Planted at the end of a module that is itself in order."""
    planted = dict(sources())
    planted[module] = ast.Module(planted[module].body + ast.parse(fault).body, [])
    assert list(rule(planted))


def test_every_rule_has_a_fault() -> None:
    assert {rule for rule, _, _ in FAULTS} == set(RULES)
