"""Pictures by the product's own commands: a plan (docs/plan.md), pipeline schedules (docs/extending.md)."""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.reports.pictures import PICTURES

ROOT = Path(__file__).resolve().parents[2]
PLAN = (
    "--preset zero-100b --precision fp16 --grad-dtype fp16 --num-layers 16 --global-batch-size 1600 --plan "
    "--world-size 400 --device-type v100-32gb"
)


def picture() -> dict[str, str]:
    """Draw docs/pictures/plan.png by --plan; no block of a page changes."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, ROOT / "pretrain_gpt.py", *PLAN.split(), "--log-dir", folder]
        subprocess.run(list(map(str, command)), cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        shutil.copy(Path(folder) / "plan.png", PICTURES / "plan.png")
    return {}


# schedule -> virtual stages per rank
DRAWN = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero-bubble": 1, "zero-bubble-v": 2}


def schedules() -> dict[str, str]:
    """Draw every schedule by scripts/draw_schedule.py; no block of a page changes."""
    for name, chunks in DRAWN.items():
        flags = ["--schedule", name, "--virtual", str(chunks), "--output", str(PICTURES / f"{name}.png")]
        command = [sys.executable, str(ROOT / "scripts" / "draw_schedule.py"), *flags]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return {}
