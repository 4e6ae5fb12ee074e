"""Compile every Triton kernel for an absent GPU: `python -m tests.helpers.compile_kernels 90`.

The launches of `kernels` are called on CPU tensors, with a driver that knows a target and nothing else; the
kernels are compiled to machine code, and not run. Prints a line per kernel: name, warps, registers, loads, atomics,
spilled bytes.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # read by the imports that follow

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction
from triton.runtime.driver import driver

from megazero.engine.kernels import operators
from megazero.engine.kernels.dropout import Dropout, Rows
from megazero.engine.kernels.eager import LogitMap
from megazero.engine.kernels.kernel_table import TRITON
from megazero.engine.kernels.rotary import Rotary


class Driver:
    """All that compiling asks of a GPU's driver."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target


def launch_all() -> None:
    """Launch every kernel once per variant that a run compiles: with rows of aligned and of odd length."""
    rows = (Rows(0, 0, 1), Rows(1, 0, 1))
    for columns, dtype in ((1024, torch.bfloat16), (51, torch.float32)):
        x = torch.zeros(2, columns, dtype=dtype)
        dropout = Dropout(0.1, 0, 0, "mlp", TRITON.dropout)
        dropout(x, rows)
        dropout.onto(x, x, rows)
        labels, numbers = torch.zeros(2, dtype=torch.int64), torch.zeros(2)
        for to_logits in (LogitMap(), LogitMap(0.5, 30.0)):
            TRITON.loss.sums(x, labels, columns - 3, to_logits)
            TRITON.loss.grad_(x, labels, columns - 3, numbers, numbers, to_logits)

    for columns, dtype in ((768, torch.bfloat16), (8192, torch.bfloat16), (8192, torch.float32), (51, torch.float32)):
        x, weight = torch.zeros(2, columns, dtype=dtype), torch.zeros(columns, dtype=dtype)
        numbers = torch.zeros(2, 1)
        TRITON.rms_norm(x, weight, 1e-5)
        for residual in (None, x):
            TRITON.rms_norm_grad(x, x, weight, numbers, residual)
            TRITON.layer_norm_grad(x, x, weight, weight, numbers, numbers, residual)
        operators.swiglu(torch.zeros(2, 2 * columns, dtype=dtype))
        operators.swiglu_grad(x, torch.zeros(2, 2 * columns, dtype=dtype))
        operators.gelu_grad_(x, x.clone())
        many = torch.zeros(40, dtype=torch.int64)
        operators.add_rows(x.float(), many, many == 0, torch.zeros(40, columns, dtype=dtype))
    for dim, rotary, dtype in (
        (64, Rotary(64, 1e4), torch.bfloat16),
        (128, Rotary(128, 1e4), torch.bfloat16),
        (128, Rotary(128, 1e4), torch.float32),
        (128, Rotary(32, 1e4), torch.bfloat16),
        (256, Rotary(64, 1e4, interleaved=True), torch.bfloat16),
    ):
        tables = rotary.tables(2, dtype, torch.device("cpu"))
        heads = tuple(torch.zeros(1, 2, n, dim, dtype=dtype) for n in (32, 8, 8))
        for positions in (None, torch.zeros(1, 2, dtype=torch.int64)):
            operators.rotary(heads, heads, tables, positions, positions is None)


def resources(kernel: Any) -> tuple[int, int]:
    """Return (registers per thread, bytes that are spilled), as reported by ptxas."""
    folder = Path(triton.__file__).parent / "backends/nvidia/bin"
    ptxas = max(folder.glob("ptxas*"))  # of two, the newer one, which knows all of this triton's PTX
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(kernel.asm["ptx"])
        file.flush()
        arch = re.search(r"\.target (sm_\w+)", kernel.asm["ptx"])
        assert arch is not None
        command = [str(ptxas), "-v", f"-arch={arch[1]}", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stdout + said.stderr
    text = said.stdout + said.stderr
    return int(re.search(r"Used (\d+) registers", text)[1]), int(re.search(r"(\d+) bytes spill stores", text)[1])


def main(capability: int) -> None:
    made: list[Any] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        assert all(0 < size < 2**31 for size in grid[:1]) and all(0 < size < 2**16 for size in grid[1:]), grid
        made.append(run(self, *args, grid=grid, warmup=True, **options))

    JITFunction.run = compile_only
    driver.set_active(Driver(capability))
    launch_all()
    for kernel in {id(kernel): kernel for kernel in made}.values():
        registers, spilled = resources(kernel)
        warps = kernel.metadata.num_warps
        ptx = kernel.asm["ptx"]
        vectors, atomics = ("ld.global.v4.b32" in ptx), len(re.findall(r"\b(?:atom|red)\.", ptx))
        found = f"{'16-byte' if vectors else 'narrow'} loads, {atomics} atomics, {spilled} spilled"
        print(f"{kernel.name} {warps} warps, {registers} registers, {found}")


if __name__ == "__main__":
    main(int(sys.argv[1]))
