"""Rotary positions in config.json: `rope_parameters`."""

from __future__ import annotations

import math
from typing import Any

from megazero.config.schema import ModelConfig
from megazero.kernels.rotary import HIGH_FREQUENCY, LOW_FREQUENCY

Options = dict[str, Any]
LOCAL, GLOBAL = "sliding_attention", "full_attention"
# Options of a scaling that have one value here: of YaRN in turns per trained length, as in its paper.
FIXED = {
    "llama3": {"low_freq_factor": LOW_FREQUENCY, "high_freq_factor": HIGH_FREQUENCY},
    "yarn": {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True},
    "linear": {},
}
TRAINED = "original_max_position_embeddings"


def rope_parameters(model: ModelConfig) -> Options:
    """Return the rotary positions of layers without a window."""
    found: Options = {"rope_theta": model.rotary_base, "rope_type": "default"}
    if model.rotary_percent != 1.0:
        found["partial_rotary_factor"] = model.rotary_percent
    if model.rope_scaling_factor != 1.0:
        kind = model.rope_scaling_type
        found |= {"rope_type": kind, "factor": model.rope_scaling_factor, **FIXED[kind]}
        if kind != "linear":
            found[TRAINED] = model.rope_trained_length
    return found


def from_rope_parameters(theirs: Options) -> Options:
    """Return the fields of ModelConfig. ValueError for a scaling that is not computed here."""
    given = {key: value for key, value in theirs.items() if value is not None}
    kind, ours = given.pop("rope_type"), {"rotary_base": float(given.pop("rope_theta"))}
    if (share := float(given.pop("partial_rotary_factor", 1.0))) != 1.0:
        ours["rotary_percent"] = share
    if kind != "default":
        if kind not in FIXED:
            raise ValueError(
                f"config.json has rope_parameters of rope_type {kind}; this version computes default, "
                f"{', '.join(FIXED)} only"
            )
        factor = float(given.pop("factor"))
        ours |= {"rope_scaling_type": kind, "rope_scaling_factor": factor}
        if TRAINED in given:
            ours["rope_trained_length"] = int(given.pop(TRAINED))
        if math.isclose(given.get("attention_factor", 0), 0.1 * math.log(factor) + 1, rel_tol=1e-6):
            del given["attention_factor"]  # YaRN's own
        given = {key: value for key, value in given.items() if FIXED[kind].get(key) != value}
    if given:
        key, value = next(iter(given.items()))
        raise ValueError(
            f"config.json has {key} {value} in rope_parameters of rope_type {kind}; this version does not compute that"
        )
    return ours


def by_kind_of_layer(model: ModelConfig) -> Options:
    """Return the rotary positions of layers with a window, and of those without."""
    local = {"rope_theta": model.local_rotary_base or model.rotary_base, "rope_type": "default"}
    return {LOCAL: local, GLOBAL: rope_parameters(model)}


def from_kinds_of_layer(theirs: dict[str, Options]) -> Options:
    """Return the fields of ModelConfig. ValueError for a scaling that is not computed here."""
    local = from_rope_parameters(theirs[LOCAL])
    if local.keys() != {"rotary_base"}:
        raise ValueError(
            f"config.json has rope_parameters {theirs[LOCAL]} for {LOCAL}; this version computes rope_type default "
            "there only"
        )
    return from_rope_parameters(theirs[GLOBAL]) | {"local_rotary_base": local["rotary_base"]}
