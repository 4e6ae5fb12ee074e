"""Tests in other environments: `python -m tests.environments NAME [PYTEST ARGUMENT ...]`.

| NAME | Python | packages |
|---|---|---|
| floors | the oldest | the oldest of all that pyproject.toml allows, extras included |
| oldest | 3.12 | the oldest torch, without extras but transformers |
| 3.12, 3.13 | that | requirements.txt |

An environment is made once, in build/environments. On Linux, torch comes with CUDA, which needs no GPU: 5 GB. So CI
makes none; tests/helpers/oldest_torch.py imitates the operators of the oldest torch there.
"""

import itertools
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TESTS = ["pytest>=8", "pytest-timeout>=2.3", "pytest-xdist>=3.6"]
CURRENT = ["-r", "requirements.txt"]


def floor(requirement: str) -> str:
    """Return PACKAGE==VERSION with the oldest version that a requirement allows."""
    return re.sub(r">=([\w.]+).*", r"==\1", requirement)


EXTRAS = {name: list(needed) for name, needed in PROJECT["optional-dependencies"].items()}
FLOORS = [floor(each) for each in (*PROJECT["dependencies"], *itertools.chain(*EXTRAS.values()))]
OLDEST = [floor(each) if each.startswith("torch>=") else each for each in (*PROJECT["dependencies"], *EXTRAS["hf"])]
ENVIRONMENTS = {
    "floors": (f"python{PROJECT['requires-python'].removeprefix('>=')}", FLOORS),
    "oldest": ("python3.12", OLDEST),
    "3.12": ("python3.12", CURRENT),
    "3.13": ("python3.13", CURRENT),
}


def make(name: str) -> Path:
    """Return the interpreter of an environment, which is made if it is missing or incomplete."""
    interpreter, requirements = ENVIRONMENTS[name]
    folder = ROOT / "build" / "environments" / name
    python, ready = folder / "bin" / "python", folder / "ready"
    if not ready.exists():
        found = shutil.which(interpreter)
        if found is None:
            raise SystemExit(f"{interpreter} is not on PATH")
        subprocess.run([found, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *requirements, *TESTS], cwd=ROOT, check=True)
        ready.touch()
    return python


def main(name: str, *arguments: str) -> int:
    command = [make(name), "-m", "pytest", "-n", "2", "--dist", "worksteal", *arguments]
    return subprocess.run(command, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
