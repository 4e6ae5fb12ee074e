"""The ranks of one machine under torchrun, for `launcher`.

If a rank fails, its message is printed last, and its exit code is this program's. torchrun's own messages and its
traceback go to LOG_DIR/torchrun.log.
"""

import logging
import secrets
import sys
import time
from pathlib import Path

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from megazero.called_as import program_name
from megazero.cluster.elastic import node_agent
from megazero.cluster.listening import LOOPBACK, host_store

LAST_LINES = 20  # of the stderr of a rank that failed without a message


def launch_ranks(log_dir: Path, wait_minutes: str, arguments: list[str]) -> int:
    """Run torchrun with `arguments`, and return the exit code. Creates `log_dir`.

    wait_minutes: with --elastic, how long to wait for nodes; else empty.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    file = logging.FileHandler(log_dir / "torchrun.log")
    file.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch")]:
        logger = logging.getLogger(name)
        if logger.handlers:
            logger.handlers = [file]
    try:
        if wait_minutes:
            node_agent.run_agent(log_dir, arguments, 60 * float(wait_minutes), lambda error: _report(error, log_dir))
        else:
            _run_alone(log_dir, arguments)
    except node_agent.Ended as end:
        print(f"\n{program_name('scripts/launch.sh')}: {end}", file=sys.stderr)
        return end.code
    except ChildFailedError as error:
        text, code = _report(error, log_dir)
        print(f"\n{text}", file=sys.stderr)
        return code
    except SignalException as error:
        print(f"{program_name('scripts/launch.sh')}: ended by {error.sigval.name}", file=sys.stderr)
        return 128 + error.sigval
    return 0


def _run_alone(log_dir: Path, arguments: list[str]) -> None:
    """Run torchrun's `arguments` on this machine, whose ranks meet at a store that no other machine reaches.

    torchrun's own choice for one machine is a store at all addresses, and agents that unpickle values of its clients.
    Its static rendezvous unpickles nothing. It opens its store with multi_tenant at a port of this process that has a
    store already: that of the first one.
    """
    store = host_store(LOOPBACK, 0, multi_tenant=True)
    where = ["--rdzv-backend", "static", "--rdzv-endpoint", f"{store.host}:{store.port}"]
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(8)}"
    run.main(["--log-dir", str(log_dir), *where, "--rdzv-id", name, *arguments])


def _report(error: ChildFailedError, log_dir: Path) -> tuple[str, int]:
    """Return the message of the rank that failed first, and its exit code, as a shell's."""
    rank, failure = _first(error)
    return _failure_text(rank, failure, log_dir), failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode


def _first(error: ChildFailedError) -> tuple[int, ProcessFailure]:
    """Return the rank that failed first. Ranks with a message come before those without, which lost a peer."""
    explained = {rank: failure for rank, failure in error.failures.items() if failure.error_file_data}
    found = explained or error.failures
    rank = min(found, key=lambda rank: found[rank].timestamp)
    return rank, found[rank]


def _failure_text(rank: int, failure: ProcessFailure, log_dir: Path) -> str:
    """Name the rank that failed, how, and its message or else the end of its stderr."""
    code = failure.exitcode
    how = f"was killed by {failure.signal_name()}" if code < 0 else f"ended with exit code {code}"
    logs = sorted(log_dir.glob(f"*/attempt_*/{failure.local_rank}/stderr.log"), key=lambda path: path.stat().st_mtime)
    where = f" ({logs[-1]})" if logs else ""
    if isinstance(failure.message, dict):
        return f"rank {rank} {how}{where}: {failure.message['message']}"
    end = "\n".join(logs[-1].read_text(errors="replace").splitlines()[-LAST_LINES:]) if logs else ""
    return f"rank {rank} {how}{where}" + (f":\n{end}" if end else "")


if __name__ == "__main__":
    sys.exit(launch_ranks(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
