"""Make docs/results/families.md: the families of --architecture, from their files.

python -m benchmarks.reports.families
"""

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.reports.blocks import markdown
from megazero import families
from megazero.families import FAMILIES, TRAITS, Family
from megazero.flags.flag_names import as_flag
from megazero.flags.presets import preset_names, preset_values
from megazero.interop.huggingface.configuration import LACKING

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "results" / "families.md"
HEAD = """# Families
Made by `python -m benchmarks.reports.families`. A family is a file of
[`megazero/families`](../../megazero/families/__init__.py); [how to add one](../extending.md#add-an-architecture). Every
family of the table except `parallel`, whose layers are gptj's, is tested with values of its options that are no
defaults:

| test | it shows |
|---|---|
| [`unit/engine/model/test_families.py`](../../tests/unit/engine/model/test_families.py) | logits and gradients of \
transformers' class, in fp64 to 1e-10 and in fp32; its configuration there and back; its number of parameters; \
`--plan` |
| [`unit/flags/test_presets.py`](../../tests/unit/flags/test_presets.py) | the sizes of its published models, and \
their number of weights in transformers; its presets |
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
ACTIVATIONS = {"gelu": "GELU", "gelu-tanh": "tanh GELU", "relu": "ReLU", "squared-relu": "squared ReLU"}
ACTIVATIONS |= {"swiglu": "SwiGLU", "geglu-tanh": "tanh GEGLU", "swiglu-clamped": "clamped SwiGLU"}
BIASES = {"qkv": "q, k, v", "proj": "projection", "mlp": "MLP", "experts": "experts", "logits": "logits"}


def structure(family: Family) -> str:
    """Describe the traits of a family."""
    traits = family.traits
    biases = ", ".join(BIASES[name] for name in traits["linear_biases"])
    parts = [
        PARALLEL[traits["parallel_norms"]].format(NORMS[traits["norm"]], PLACES[traits["norm_place"]]),
        ACTIVATIONS[traits["activation"]],
        f"biases: {biases}" if biases else "no biases",
        "learned positions" if traits["learned_positions"] else "rotary positions",
    ]
    parts += ["attention sinks"] * traits["attention_sinks"] + ["q, k, v in one weight"] * traits["fused_qkv"]
    return "; ".join(parts + ["embeddings x sqrt(hidden size)"] * traits["root_embedding"])


def flag_of(name: str, value: Any) -> str:
    return as_flag(name.replace("_", "-"), f"{value:g}" if isinstance(value, float) else value)


def lines() -> dict[str, int]:
    """Return the number of lines of each family's file."""
    modules = [sys.modules[name] for name in sys.modules if name.startswith(f"{families.__name__}.")]
    return {m.FAMILY.name: len(inspect.getsource(m).splitlines()) for m in modules if hasattr(m, "FAMILY")}


def page() -> Iterator[str]:
    """Yield the lines of the page."""
    yield HEAD
    presets: dict[str, list[str]] = {name: [] for name in FAMILIES}
    for preset in preset_names():
        presets[preset_values(preset).get("architecture", "gpt2")].append(f"`{preset}`")
    rows, long = [], lines()
    for name, family in FAMILIES.items():
        classes = [f"`{row.model_type}`, {row.model_class}" for row in family.models]
        defaults = [f"`{flag_of(*option)}`" for option in family.options.items() if option[0] not in TRAITS]
        cells = ["; ".join(classes), structure(family), ", ".join(defaults), ", ".join(presets[name])]
        rows.append([f"`{name}`", *cells, str(long[name])])
    columns = ["architecture", "`model_type` and class of transformers", "structure", "defaults", "presets"]
    yield markdown([*columns, "lines of its file"], rows)
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
