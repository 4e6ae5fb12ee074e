"""House rules that neither ruff nor import-linter knows, and that those two are asked in the default suite.

Every rule is a function from sources to complaints. The code must give none, and a planted fault must give one.
"""

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megazero.flags.flag_names import all_flags
from tests.helpers.table import for_each

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "megazero"
CONTAINERS = {"list", "dict", "set", "defaultdict", "Counter", "deque", "OrderedDict", "WeakKeyDictionary"}
MUTATORS = {"append", "extend", "insert", "add", "update", "setdefault", "pop", "popitem", "popleft", "appendleft"}
MUTATORS |= {"remove", "discard", "clear", "sort", "reverse", "subtract"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)

# "engine.zero.zero", "data.loader", "checkpoint" (its __init__) -> its syntax tree
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


def only_the_mesh_compares_sizes(sources: Sources) -> Iterator[str]:
    """On an axis of size 1 a collective is the identity: whoever asks `axis.size > 1` does the axis' work."""
    for module, tree in sources.items():
        for node in ast.walk(tree):
            if not module.startswith(("engine.mesh.", "cluster.", "world")) and isinstance(node, ast.Compare):
                sides = [node.left, *node.comparators]
                sizes = [s for s in sides if isinstance(s, ast.Attribute) and s.attr == "size"]
                if sizes and any(isinstance(s, ast.Constant) for s in sides):
                    yield f"{module}:{node.lineno} {ast.unparse(node)}"


# Numbers of ranks along an axis, and of a rank along one.
AXIS_SIZES = {"pp", "dp", "cp", "data", "tp", "shard", "shards", "replica", "replicas", "world", "world_size"}
AXIS_SIZES |= {f"{axis}_{of}" for axis in ("pp", "dp", "cp", "tp") for of in ("size", "rank")}
AXIS_SIZES |= {f"{axis}_model_parallel_size" for axis in ("tensor", "context", "pipeline")} | {"zero_shard_size"}
RANKS = {"rank", "ranks", "stage", "coord"}
MULTIPLYING = {"engine.plan.layout.topology", "flags.batch_ramp", "verify.shrink"}


def only_layout_multiplies_axes(sources: Sources) -> Iterator[str]:
    """A product, quotient or remainder of two sizes of axes, or of a rank and one, counts ranks: Layout's work.

    `options`, which cannot import it, has the quotient that derives dp.
    """
    for module, tree in sources.items():
        for node in ast.walk(tree):
            if module not in MULTIPLYING and isinstance(node, (ast.BinOp, ast.Call)):
                factors = list(_factors(node))
                sizes = [name for name in factors if name in AXIS_SIZES]
                if sizes and len(sizes) + sum(name in RANKS for name in factors) > 1:
                    yield f"{module}:{node.lineno} {ast.unparse(node)}"


def _factors(node: ast.AST) -> Iterator[str]:
    """Yield the last names of what a product, a quotient or a remainder is made of: `a.dp * b` has dp and b."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.Div, ast.FloorDiv, ast.Mod)):
        yield from (name for side in (node.left, node.right) for name in _factors(side))
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("divmod", "math.prod"):
        yield from (name for argument in node.args for name in _factors(argument))
    elif isinstance(node, ast.Call):  # a size by the name of its flag
        yield from ("tp" for word in node.args if isinstance(word, ast.Constant) and "parallel-size" in str(word.value))
    elif isinstance(node, (ast.List, ast.Tuple)):
        yield from (name for each in node.elts for name in _factors(each))
    elif isinstance(node, ast.UnaryOp):
        yield from _factors(node.operand)
    elif isinstance(node, (ast.Attribute, ast.Name)):
        last = node.attr if isinstance(node, ast.Attribute) else node.id
        yield ast.unparse(node).split(".")[-2] if last == "size" and isinstance(node, ast.Attribute) else last


def only_the_stage_names_layers(sources: Sources) -> Iterator[str]:
    """No other module compares names of layers: plans read what a layer declares."""
    for module, tree in sources.items():
        for node in ast.walk(tree) if module != "engine.model.stage" else ():
            if isinstance(node, ast.Constant) and node.value in LAYER_NAMES:
                yield f"{module}:{node.lineno} {node.value!r}"
            elif isinstance(node, ast.ImportFrom) and node.module == "megazero.engine.model.stage":
                for alias in node.names:
                    if alias.name.isupper():
                        yield f"{module}:{node.lineno} {alias.name}"


def only_the_log_prints(sources: Sources) -> Iterator[str]:
    """Lines for the user go through `megazero.log`, except the results of commands."""
    for module, tree in sources.items():
        for node in ast.walk(tree) if module not in PRINTING else ():
            if isinstance(node, (ast.Name, ast.Attribute)) and ast.unparse(node) in PRINTERS:
                yield f"{module}:{node.lineno} {ast.unparse(node)}"


PRINTERS = {"print", "sys.stdout.write", "sys.stderr.write"}
PRINTING = {"log", "verify.command", "cluster.elastic.node_agent", "flags.help", "command.rehearsal.rehearsal_report"}
PRINTING |= {"cluster.launcher", "cluster.launch_ranks", "console.commands"}
PRINTING |= {f"console.{name}_tool" for name in ("checkpoint", "generate", "program", "report")}


def a_class_name_has_one_meaning(sources: Sources) -> Iterator[str]:
    """No two classes of the package share a name."""
    found: dict[str, str] = {}
    for module, tree in sources.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and found.setdefault(node.name, module) != module:
                yield f"{module}:{node.lineno} {node.name} is a class of {found[node.name]} too"


def options_are_told_at_their_fields(sources: Sources) -> Iterator[str]:
    """No table names more than MOST_NAMED flags: a fact about a flag is metadata of its field (decision 0054)."""
    names = {name for name in all_flags() if "-" in name}
    for module, tree in sources.items():
        if module in NAMING or module.startswith("families."):
            continue
        for node in tree.body:
            if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)) and node.value is not None:
                words = {each.value for each in ast.walk(node.value) if isinstance(each, ast.Constant)}
                if len(found := {str(word).removeprefix("--") for word in words} & names) > MOST_NAMED:
                    yield f"{module}:{node.lineno} {len(found)} flags"


MOST_NAMED = 5
NAMING = {"flags.rules"}  # each rule next to the values that give way


def private_names_of_torch_are_in_one_module(sources: Sources) -> Iterator[str]:
    """A later torch may take them away: `torch_private` says why each is used. `node_agent` overrides an agent's."""
    for module, tree in sources.items():
        for node in ast.walk(tree) if module not in USING_PRIVATE else ():
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
                names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            elif isinstance(node, ast.Attribute) and ast.unparse(node).split(".")[0] in ("torch", "dist"):
                names = [node.attr]
            else:
                continue
            if any(re.match("_[A-Za-z]", name) for name in names):
                yield f"{module}:{node.lineno} {'.'.join(names)}"


USING_PRIVATE = {"torch_private", "cluster.elastic.node_agent"}


def a_function_name_has_one_meaning(sources: Sources) -> Iterator[str]:
    """No two modules have a public function of one name, nor share their own. Kernels implement one operator twice."""
    found, files = dict[str, str](), dict[str, str]()
    packages = {name.rpartition(".")[0] for name in sources}
    for module, tree in sources.items():
        last = module.rpartition(".")[2]
        if module not in packages and files.setdefault(last, module) != module:
            yield f"{module} is named as {files[last]}"
        for node in tree.body if not module.startswith(IMPLEMENTING) else ():
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                if found.setdefault(node.name, module) != module:
                    yield f"{module}:{node.lineno} {node.name} is a function of {found[node.name]} too"


IMPLEMENTING = ("engine.kernels.", "engine.optim.")


def nothing_forks(sources: Sources) -> Iterator[str]:
    """A rank has threads of gloo or NCCL: a lock that one of them holds would stay locked in a forked child.

    `cluster.local` forks ranks from a process that is no rank.
    """
    for module, tree in sources.items():
        if module == "cluster.local":
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = {alias.name for alias in node.names} | {getattr(node, "module", None)}
            else:
                names = {node.attr} if isinstance(node, ast.Attribute) else set()
            if found := names & {"multiprocessing", "fork", "DataLoader", "ProcessPoolExecutor"}:
                yield f"{module}:{node.lineno} {found}"


def checkpoints_send_no_objects(sources: Sources) -> Iterator[str]:
    """Whoever unpickles runs the sender's code: ranks send JSON and tensors, by `checkpoint.messages`."""
    for module, tree in sources.items():
        for node in ast.walk(tree) if module.startswith(("checkpoint", "run.")) else ():
            names = {alias.name for alias in node.names} if isinstance(node, (ast.Import, ast.ImportFrom)) else set()
            names |= {getattr(node, "module", None), getattr(node, "attr", None), getattr(node, "id", None)}
            for name in names & {"pickle", "marshal", "cloudpickle", "dill"} | {n for n in names if _of_objects(n)}:
                yield f"{module}:{node.lineno} {name}"


def _of_objects(name: str | None) -> bool:
    return bool(name) and name.endswith(("_object", "_object_list")) and name != "read_json_object"


MOST_BY_POSITION = 4


def long_calls_name_their_arguments(sources: Sources) -> Iterator[str]:
    """A call of a class or a function of the package has at most four arguments by position, except Triton's."""
    nodes = [node for tree in sources.values() for node in tree.body]
    named = [node for node in nodes if isinstance(node, (ast.ClassDef, ast.FunctionDef))]
    known = {node.name for node in named} - {node.name for node in named if _takes_any_number(node)}
    for module, tree in sources.items():
        for node in ast.walk(tree) if not module.startswith("engine.kernels.triton.") else ():
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in known:
                if sum(not isinstance(argument, ast.Starred) for argument in node.args) > MOST_BY_POSITION:
                    yield f"{module}:{node.lineno} {node.func.id}"


def _takes_any_number(node: ast.ClassDef | ast.FunctionDef) -> bool:
    """Return whether a call may have any number of arguments: `*arguments`."""
    functions = [node] if isinstance(node, ast.FunctionDef) else [each for each in node.body if is_init(each)]
    return any(function.args.vararg for function in functions)


def is_init(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name == "__init__"


LAYER_NAMES = {"token_embedding", "position_embedding", "blocks.", "blocks.0", "head"}
RULES: list[Callable[[Sources], Iterator[str]]] = [
    no_module_level_state,
    only_the_mesh_compares_sizes,
    only_layout_multiplies_axes,
    only_the_stage_names_layers,
    only_the_log_prints,
    nothing_forks,
    checkpoints_send_no_objects,
    private_names_of_torch_are_in_one_module,
    options_are_told_at_their_fields,
    a_class_name_has_one_meaning,
    a_function_name_has_one_meaning,
    long_calls_name_their_arguments,
]

# (rule, module, a line that breaks the rule there)
FAULTS = [
    (no_module_level_state, "engine.zero.zero", "CACHE = {}\ndef f():\n    CACHE[1] = 2"),
    (no_module_level_state, "engine.zero.zero", "SEEN: set[int] = set()\ndef f():\n    SEEN.add(1)"),
    (no_module_level_state, "engine.zero.zero", "SEEN = [1]\nclass A:\n    def f(self):\n        del SEEN[0]"),
    (
        no_module_level_state,
        "engine.zero.zero",
        "from megazero.engine.plan.schedule.schedules import SCHEDULES\ndef f():\n    SCHEDULES.clear()",
    ),
    (no_module_level_state, "engine.zero.zero", "import torch\ndef f():\n    torch.Tensor.__add__ = None"),
    (only_the_mesh_compares_sizes, "engine.zero.zero", "def f(axis):\n    return axis.size > 1"),
    (only_the_mesh_compares_sizes, "engine.zero.zero", "def f(mesh):\n    return 1 == mesh.dp.size"),
    (
        only_layout_multiplies_axes,
        "engine.zero.zero",
        "def f(layout, stage):\n    return stage * (layout.dp * layout.tp)",
    ),
    (only_layout_multiplies_axes, "engine.zero.zero", "def f(layout, rank):\n    return rank // layout.tp"),
    (only_layout_multiplies_axes, "engine.zero.zero", "def f(coord, layout):\n    return coord.dp % layout.shard"),
    (only_layout_multiplies_axes, "engine.zero.zero", "def f(mesh):\n    return 3 + mesh.dp.size * mesh.tp.size"),
    (only_layout_multiplies_axes, "engine.zero.zero", "def f(world, tp):\n    return divmod(world.size, tp)"),
    (
        only_layout_multiplies_axes,
        "engine.zero.zero",
        "def f(get):\n    return get('x-parallel-size') * get('y-parallel-size')",
    ),
    (only_layout_multiplies_axes, "engine.zero.zero", "def f(pp, dp, tp):\n    return math.prod([pp, dp, tp])"),
    (only_the_stage_names_layers, "engine.zero.zero", "def f(name):\n    return name.startswith('blocks.')"),
    (only_the_stage_names_layers, "engine.zero.zero", "from megazero.engine.model.stage import HEAD"),
    (
        options_are_told_at_their_fields,
        "run.changes",
        "T = ('min-lr', 'train-iters', 'eval-iters', 'zero-stage', 'data-path', '--keep-last')",
    ),
    (a_class_name_has_one_meaning, "engine.zero.zero", "class Pipeline: ..."),
    (a_function_name_has_one_meaning, "engine.zero.zero", "def order_of(): ..."),
    (long_calls_name_their_arguments, "engine.zero.zero", "Zero([], [], True, 0, 0)"),
    (long_calls_name_their_arguments, "engine.zero.zero", "def f(*found):\n    return order_of(1, 2, 3, 4, 5, *found)"),
    (only_the_log_prints, "engine.zero.zero", "def f():\n    print('slow')"),
    (only_the_log_prints, "engine.zero.zero", "import sys\nsys.stderr.write('slow')"),
    (nothing_forks, "engine.zero.zero", "from torch.utils.data import DataLoader"),
    (nothing_forks, "engine.zero.zero", "import os\nos.fork()"),
    (nothing_forks, "engine.zero.zero", "import multiprocessing"),
    (checkpoints_send_no_objects, "checkpoint.nodes", "import pickle"),
    (checkpoints_send_no_objects, "run.relayout", "from pickle import dumps"),
    (checkpoints_send_no_objects, "checkpoint.nodes", "def f():\n    dist.gather_object(1)"),
    (checkpoints_send_no_objects, "checkpoint", "from torch.distributed import broadcast_object_list"),
    (private_names_of_torch_are_in_one_module, "engine.zero.zero", "from torch.utils._pytree import tree_map"),
    (private_names_of_torch_are_in_one_module, "engine.zero.zero", "torch.ops.aten._softmax(1)"),
]


@pytest.mark.second
@for_each("rule", RULES)
def test_the_code_keeps_the_rule(rule: Callable[[Sources], Iterator[str]]) -> None:
    assert list(rule(sources())) == []


@for_each(("rule", "module", "fault"), FAULTS)
def test_the_rule_sees_a_fault(rule: Callable[[Sources], Iterator[str]], module: str, fault: str) -> None:
    """Planted at the end of a module that is itself in order, among those that the faults import."""
    planted = {name: sources()[name] for name in (module, "engine.plan.schedule.schedules")}
    planted[module] = ast.Module(planted[module].body + ast.parse(fault).body, [])
    assert list(rule(planted))


def test_every_rule_has_a_fault() -> None:
    assert {rule for rule, _, _ in FAULTS} == set(RULES)


def test_links_of_pages_lead_to_files() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^)#\s:]+)(?:#[^)]*)?\)", page.read_text())]
    assert len(links) > 50
    assert not [f"{page.relative_to(ROOT)}: {link}" for page, link in links if not (page.parent / link).exists()]


@pytest.mark.second
@pytest.mark.long
@for_each("command", [["ruff", "check", "."], ["lint-imports"]])
def test_the_linter_has_no_complaint(command: list[str]) -> None:
    """Folders import downwards, plans import no torch, and so on."""
    program = Path(sys.executable).parent / command[0]
    done = subprocess.run([program, *command[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_tests_import_no_benchmarks() -> None:
    """Benchmarks import tests/helpers, and have their own tests in benchmarks/tests."""
    files = (ROOT / "tests").rglob("*.py")
    assert not [path for path in files if re.search(r"^ *(?:from|import) benchmarks", path.read_text(), re.MULTILINE)]
