"""Rotary positions as `rope_parameters` of Hugging Face's configurations, and back."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from megazero.engine.options.model_options import HIGH_FREQUENCY, LOW_FREQUENCY, SLOW, ModelOptions
from megazero.families.parts.model_types import Conversion, Options


class Scaling(NamedTuple):
    """Keys of one rope_type."""

    options: Mapping[str, str]  # their key -> field of ModelOptions
    fixed: Mapping[str, float] = {}  # their key -> the value that ours computes


FACTOR = {"factor": "rope_scaling_factor"}
LENGTH = {"original_max_position_embeddings": "rope_trained_length"}
GROWTH = {"mscale": "mscale", "mscale_all_dim": "mscale_all_dim"}
YARN = GROWTH | {"beta_fast": "beta_fast", "truncate": "yarn_correction_range_round_to_int"}
SCALINGS = {  # by rope_type
    "default": Scaling({}),
    "linear": Scaling(FACTOR),
    "llama3": Scaling(FACTOR | LENGTH, {"low_freq_factor": LOW_FREQUENCY, "high_freq_factor": HIGH_FREQUENCY}),
    "yarn": Scaling(FACTOR | LENGTH | YARN, {"beta_slow": SLOW}),
}
# Keys of yarn for which transformers takes null, and 0, as missing. A null factor is a ratio of lengths, and a null
# truncate is false; any other null stops transformers.
NULL_IS_MISSING = (*GROWTH, "beta_fast", "beta_slow")


def rope_parameters(model: ModelOptions, partial: bool = False, by_kind: bool = False) -> Options:
    """Return a model's rotary positions as theirs.

    Args:
        partial: whether their class can rotate a part of each head.
        by_kind: whether their class has parameters of layers with a window and of others.
    """
    part: Options = {"partial_rotary_factor": model.rotary_percent} if partial else {}
    kind = "default" if model.rope_scaling_factor == 1 else model.rope_scaling_type
    scaling = {theirs: getattr(model, ours) for theirs, ours in SCALINGS[kind].options.items()}
    scaling = {theirs: value for theirs, value in scaling.items() if value or theirs not in GROWTH}
    every = part | {"rope_type": kind, "rope_theta": model.rotary_base, **scaling, **SCALINGS[kind].fixed}
    if not by_kind:
        return every
    local = part | {"rope_type": "default", "rope_theta": model.local_rotary_base}
    rounds = {} if every.get("truncate", True) else {"truncate": False}
    return {"full_attention": every, "sliding_attention": local if model.local_rotary_base else dict(every)} | rounds


def rotary_options(given: Mapping[str, Any], partial: bool = False, longest: int = 0) -> Options:
    """Return the fields of ModelOptions for rope_parameters, those of all layers or those by kind.

    Args:
        partial: whether their class can rotate a part of each head.
        longest: max_position_embeddings.

    Raises:
        ValueError: they ask for another computation than ours. It names the key and its value.
    """
    if "full_attention" not in given:
        return _options(given, partial, longest)
    kinds, truncate = [given["full_attention"], given["sliding_attention"]], bool(given.get("truncate", True))
    if truncate and any(not each.get("truncate", True) for each in kinds):
        raise ValueError(
            "config.json has truncate false in rope_parameters of a kind of layers; transformers reads it outside of "
            "the kinds alone, and computes true"
        )
    kinds = [each | {"truncate": truncate} if each["rope_type"] == "yarn" else each for each in kinds]
    found, local = (_options(each, partial, longest) for each in kinds)
    if local == found:
        return found
    base, percent = local["rotary_base"], found["rotary_percent"]
    if local != {"rotary_base": base, "rotary_percent": percent}:
        raise ValueError(
            f"config.json has {given['sliding_attention']} in rope_parameters; this version computes layers with a "
            "window with another rope_theta alone, unscaled"
        )
    return found | {"local_rotary_base": base}


def _options(given: Mapping[str, Any], partial: bool, longest: int) -> Options:
    rope = {key: value for key, value in given.items() if key != "type"}
    kind = rope.pop("rope_type")
    if kind not in SCALINGS:
        raise ValueError(f"config.json has rope_type {kind}; this version computes {', '.join(SCALINGS)} only")
    options, fixed = SCALINGS[kind]
    if kind == "yarn":
        rope |= {"truncate": bool(rope.get("truncate", True))}
        rope = {key: value for key, value in rope.items() if value or key not in NULL_IS_MISSING}
        if rope.get("factor", 1) is None and rope.get("original_max_position_embeddings"):
            rope["factor"] = longest / rope["original_max_position_embeddings"]
    needed = {"rope_theta", "partial_rotary_factor", *options, *fixed}
    if null := [key for key, value in rope.items() if value is None and key in needed]:
        raise ValueError(f"config.json has {null[0]} null in rope_parameters, for which transformers has no value")
    rope = {key: value for key, value in rope.items() if value is not None}
    base, percent = float(rope.pop("rope_theta")), float(rope.pop("partial_rotary_factor", 1.0))
    if percent != 1 and not partial:
        raise ValueError(f"config.json has partial_rotary_factor {percent:g}; this architecture rotates whole heads")
    found = {"rotary_base": base, "rotary_percent": percent}
    scaling: Options = {ours: rope.pop(theirs) for theirs, ours in options.items() if theirs in rope}
    factor = scaling["rope_scaling_factor"] = float(scaling.get("rope_scaling_factor", 1.0))
    if not factor >= 1:
        raise ValueError(f"config.json has factor {factor:g} in rope_parameters; a context is stretched by at least 1")
    if kind == "yarn":
        from megazero.engine.kernels.rotary import Rotary

        growth = {name: scaling[name] for name in GROWTH if name in scaling}
        fixed = {**fixed, "attention_factor": Rotary(0, 1.0, factor, "yarn", **growth).amplitude}
    for key, value in rope.items():
        if key not in fixed or not math.isclose(float(value), fixed[key], rel_tol=1e-9):
            can = f"computes {fixed[key]:g} only" if key in fixed else "does not compute it"
            raise ValueError(
                f"config.json has {key} {value} in rope_parameters of rope_type {kind}; this version {can}"
            )
    return found | ({} if factor == 1 else {"rope_scaling_type": kind, **scaling})


def _rotary(*further: str) -> Conversion:
    """Return the conversion of rotary positions. further: the options of ours that not all of their classes have."""
    partial, by_kind = "rotary_percent" in further, "local_rotary_base" in further
    return Conversion(
        ("rotary_base", "rope_scaling_factor", "rope_scaling_type", "rope_trained_length", *YARN.values(), *further),
        lambda model: {"rope_parameters": rope_parameters(model, partial, by_kind)},
        lambda config: rotary_options(config.rope_parameters, partial, config.max_position_embeddings),
    )


ROTARY = _rotary()
PARTIAL_ROTARY = _rotary("rotary_percent")
LOCAL_ROTARY = _rotary("local_rotary_base")
