"""The ZeRO paper's formulas, and its Tables 1 and 2 as printed (arXiv 1910.02054 v3). Pure.

GB is 1e9 bytes; Psi is the number of parameters; Nd is the data-parallel degree, MP the model-parallel one.
"""

import math

K = 12  # bytes of a parameter's optimizer states: fp32 weight, momentum and variance
STAGES = {1: "Pos", 2: "Pos+g", 3: "Pos+g+p"}
DEVICE_BYTES = 32e9  # of Table 2

SIZES = {"7.5B": 7.5e9, "128B": 128e9, "1T": 1e12}
DEGREES = (1, 4, 16, 64, 256, 1024)
# model -> for each Nd, the cells Pos, Pos+g, Pos+g+p
TABLE_1 = {
    "7.5B": ("120 120 120", "52.5 41.3 30", "35.6 21.6 7.5", "31.4 16.6 1.88", "30.4 15.4 0.47", "30.1 15.1 0.12"),
    "128B": ("2048 2048 2048", "896 704 512", "608 368 128", "536 284 32", "518 263 8", "513 257 2"),
    "1T": (
        "16000 16000 16000",
        "7000 5500 4000",
        "4750 2875 1000",
        "4187 2218 250",
        "4046 2054 62.5",
        "4011 2013 15.6",
    ),
}
# MP -> base, Pos, Pos+g, Pos+g+p; Nd is 64 in every row
TABLE_2 = {
    1: "2B 7.6B 14.4B 128B",
    2: "4B 15.2B 28.8B 256B",
    4: "8B 30.4B 57.6B 0.5T",
    8: "16B 60.8B 115.2B 1T",
    16: "32B 121.6B 230.4B 2T",
}
MEASURED = {1: "1.3B 6.2B", 2: "2.5B 12.5B", 4: "5B 25B", 8: "10B 50B", 16: "20B 100B"}  # base, Pos


def bytes_per_parameter(stage: int, nd: int) -> float:
    """Return the bytes of model states of a parameter on one device, in mixed precision."""
    return {0: 4.0 + K, 1: 4 + K / nd, 2: 2 + (2 + K) / nd, 3: (4 + K) / nd}[stage]


def rounded(gigabytes: float) -> str:
    """Round half up as the paper's Table 1: whole from 100 on, one decimal from 10 on, two below."""
    decimals = 0 if gigabytes >= 100 else 1 if gigabytes >= 10 else 2
    return _shown(math.floor(gigabytes * 10**decimals + 0.5) / 10**decimals, decimals)


def truncated(gigabytes: float) -> str:
    """Truncate, as eight cells of Table 1 do, instead of rounding as `rounded` does."""
    decimals = 0 if gigabytes >= 100 else 1 if gigabytes >= 10 else 2
    return _shown(math.floor(gigabytes * 10**decimals) / 10**decimals, decimals)


def _shown(value: float, decimals: int) -> str:
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def table_1_cell(model: str, nd: int, stage: int) -> tuple[str, bool]:
    """Return the formula's cell and whether it is truncated: the one of both that the paper prints, if either."""
    gigabytes = SIZES[model] * bytes_per_parameter(stage, nd) / 1e9
    printed = TABLE_1[model][DEGREES.index(nd)].split()[stage - 1]
    cut = printed != rounded(gigabytes)
    return (truncated(gigabytes) if cut else rounded(gigabytes)), cut


def largest(stage: int, mp: int, nd: int = 64) -> float:
    """Return the parameters whose model states fill a device of Table 2, by the formula."""
    return mp * DEVICE_BYTES / bytes_per_parameter(stage, nd)


def table_2_cell(stage: int, mp: int) -> str:
    """Return the formula's cell as printed: row 1 rounded to 0.1 billion, the rows below it multiples of that."""
    billions = round(largest(stage, 1) / 1e9, 1) * mp
    return f"{billions / 1000:.1f}T".replace(".0T", "T") if billions >= 500 else f"{billions:.1f}B".replace(".0B", "B")
