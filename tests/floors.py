"""Tests with the oldest Python and packages that pyproject.toml allows: `make test-floors`.

    python -m tests.floors [PACKAGE==VERSION ...] [PYTEST ARGUMENTS]

It makes `.venv-floors`. A version that is given, such as torch==2.13.0, replaces a package's floor.
"""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".venv-floors"
# Tests of the code that calls these packages. -n 0: pytest's workers need pytest-xdist.
TESTS = [f"tests/unit/{folder}" for folder in ("data", "flags", "interop")]


def floors(project: dict, pins: dict[str, str]) -> list[str]:
    """Return PACKAGE==VERSION for each requirement of pyproject.toml, the oldest version unless `pins` has another."""
    extras = project["optional-dependencies"].values()
    found = []
    for requirement in [*project["dependencies"], *(one for extra in extras for one in extra)]:
        name, floor = re.match(r"([\w.-]+)>=([\w.]+)", requirement).groups()
        found.append(f"{name}=={pins.get(name, floor)}")
    return found


def main(words: list[str]) -> int:
    """Install the floors, run pytest, and return its exit code."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = dict(word.split("==") for word in words if "==" in word)
    oldest = f"python{project['requires-python'].removeprefix('>=')}"
    python = shutil.which(oldest) or sys.exit(f"{oldest}, the oldest Python of pyproject.toml, is not on PATH")
    wanted = [*floors(project, pins), "pytest", "pytest-timeout", "pytest-xdist"]
    print(" ".join(wanted), flush=True)
    subprocess.run([python, "-m", "venv", FOLDER], check=True)
    subprocess.run([FOLDER / "bin" / "python", "-m", "pip", "install", "--quiet", *wanted], check=True)
    given = [word for word in words if "==" not in word] or TESTS
    command = [FOLDER / "bin" / "python", "-m", "pytest", "-n", "0", "-m", "not slow and not gpu", *given]
    return subprocess.run(command, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
