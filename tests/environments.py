"""The default suite in other environments: `python -m tests.environments NAME [PYTEST ARGUMENT ...]`.

An environment is made once, in build/environments. On Linux, torch comes with CUDA, which needs no GPU: 5 GB. So CI
makes none; tests/helpers/oldest_torch.py imitates the operators of the oldest torch there.
"""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ["pytest>=8", "pytest-timeout>=2.3", "pytest-xdist>=3.6"]
CURRENT = ["-r", "requirements.txt"]


def oldest() -> list[str]:
    """Return the requirements of pyproject.toml without its extras, with the oldest torch."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        needed: list[str] = tomllib.load(file)["project"]["dependencies"]
    return [re.sub(r"^torch>=([\d.]+),.*", r"torch==\1.*", line) for line in needed] + ["transformers>=5.0"]


ENVIRONMENTS = {"oldest": ("python3.12", oldest()), "3.12": ("python3.12", CURRENT), "3.13": ("python3.13", CURRENT)}


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
