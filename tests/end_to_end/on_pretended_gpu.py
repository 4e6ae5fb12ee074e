"""Run a program on the pretended GPU: `on_pretended_gpu.py REPORT PROGRAM FLAG ...`; findings are added to REPORT."""

import gc
import json
import runpy
import sys
from pathlib import Path

import torch

from tests.helpers.pretended_gpu import pretended_gpu
from tests.helpers.programs import ROOT

report, program, *flags = sys.argv[1:]
sys.argv = [program, *flags]
with pretended_gpu() as findings:
    try:
        runpy.run_path(str(ROOT / program), run_name="__main__")
    finally:
        line = {"findings": [list(finding) for finding in findings.found], "waits": findings.waits}
        line["deterministic"] = torch.are_deterministic_algorithms_enabled()
        line["frozen"] = gc.get_freeze_count() > 0
        with Path(report).open("a") as file:
            file.write(json.dumps(line) + "\n")
