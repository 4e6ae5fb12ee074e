"""Run a program, or -m MODULE, on the pretended GPU: `on_pretended_gpu.py REPORT PROGRAM FLAG ...`.

Findings, and the host's waits, are added to REPORT.
"""

import gc
import json
import os
import runpy
import sys
from pathlib import Path
from unittest.mock import patch

os.environ.setdefault("TRITON_INTERPRET", "1")  # triton reads it when it is imported
os.environ.pop("TORCH_CUDA_SANITIZER", None)  # it hooks into CUDA; the pretended GPU has its model of streams

import torch

from megazero.cluster import launch
from tests.helpers.programs import ROOT
from tests.pretended_gpu import pretended_gpu

report, *sys.argv = sys.argv[1:]
exit_now = launch.exit_now


def write_report() -> None:
    line = {"findings": [list(finding) for finding in findings.found], "waits": findings.waits}
    line["deterministic"] = torch.are_deterministic_algorithms_enabled()
    line["frozen"] = freeze.call_count
    with Path(report).open("a") as file:
        file.write(json.dumps(line) + "\n")


def report_and_exit(code: int) -> None:
    write_report()
    exit_now(code)


with (
    patch.object(gc, "freeze", wraps=gc.freeze) as freeze,
    patch.object(launch, "exit_now", report_and_exit),
    pretended_gpu() as findings,
):
    try:
        if sys.argv[0] == "-m":
            module = sys.argv.pop(1)
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(str(ROOT / sys.argv[0]), run_name="__main__")
    finally:
        write_report()
