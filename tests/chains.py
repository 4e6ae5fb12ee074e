"""Chains of resumes at random: layouts, lengths, saves in the background. `python -m tests.chains --chains 200`.

Each chain is a run of 9 iterations that stops at random places and resumes in random layouts, every loss compared with
the single process that never stopped. Prints the number of chains and the largest deviation; exit code 1 at the first
that is too large. `--load N`: N processes that compute at the same time, so that ranks run late.
"""

import argparse
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.helpers.chains import LAYOUTS, TOLERANCE, configured, deviation, make_corpus, train
from tests.helpers.ranks import Forked, Ranks

ITERATIONS = 9
BUSY = "import time\nwhile True:\n    sum(range(10**6))\n    time.sleep(0.001)"


def chain(draw: random.Random) -> list[tuple[str, int]]:
    """(layout, last iteration) of each part of a run."""
    stops = sorted(draw.sample(range(1, ITERATIONS), draw.choice([1, 2, 2, 3, 4])))
    return [(draw.choice(list(LAYOUTS)), stop) for stop in [*stops, ITERATIONS]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chains", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first chain; the next has the next one")
    parser.add_argument("--load", type=int, default=2, help="processes that compute beside the ranks")
    parser.add_argument("--minutes", type=float, default=0, help="end after this time, and say how many chains ran")
    options = parser.parse_args()
    start = Forked(["torch", "torch.distributed", "megazero.engine.step.engine"])
    pools = {world: Ranks(world, start, reuse_groups=True) for world in {world for world, _, _ in LAYOUTS.values()}}
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(options.load)]
    began, worst, resumes, number = time.monotonic(), dict.fromkeys(TOLERANCE, 0.0), 0, 0
    try:
        with tempfile.TemporaryDirectory(prefix="megazero-chains-") as folder:
            corpus = make_corpus(Path(folder))
            wanted = {p: pools[1].run(train, 1, configured("alone", corpus, ITERATIONS, p))[0] for p in TOLERANCE}
            for number in range(1, options.chains + 1):
                draw = random.Random(options.seed + number - 1)
                precision, parts = draw.choice(list(TOLERANCE)), chain(draw)
                root = str(Path(folder, "saved"))
                for name, stop in parts:
                    background = draw.random() < 0.5
                    config = configured(name, corpus, stop, precision, save=root, load=root, async_save=background)
                    world = LAYOUTS[name][0]
                    found = pools[world].run(train, world, config)[0]
                    off = deviation(found, wanted[precision])
                    worst[precision] = max(worst[precision], off)
                    if not off < TOLERANCE[precision]:
                        seed = options.seed + number - 1
                        print(f"seed {seed}: {precision} {parts}: {name} deviates by {off:g}: {found}")
                        return 1
                resumes += len(parts) - 1
                subprocess.run(["rm", "-r", root], check=True)
                if options.minutes and time.monotonic() - began > 60 * options.minutes:
                    break
    finally:
        for process in busy:
            process.kill()
        for pool in pools.values():
            pool.stop()
    largest = ", ".join(f"{off:.1e} in {precision}" for precision, off in worst.items())
    print(f"{number} chains with {resumes} resumes in {time.monotonic() - began:.0f} s: largest deviation {largest}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
