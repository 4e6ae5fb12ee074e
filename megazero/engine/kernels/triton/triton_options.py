"""Options of a Triton launch. Products and sums stay separate operations, because fusing them changes the rounding."""

import triton


def options(elements: int, most_warps: int = 8) -> dict[str, int]:
    """Options of a program that has `elements` in registers: 8 per thread, unless that takes too many warps."""
    return {"num_warps": max(1, min(most_warps, elements // 256)), "enable_fp_fusion": False}


def block_options(columns: int, most: int) -> dict[str, int]:
    """Options of a program that works on blocks of up to `most` columns."""
    block = min(triton.next_power_of_2(columns), most)
    return {"BLOCK": block, **options(block)}
