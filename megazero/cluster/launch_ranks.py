"""The ranks of one machine under torchrun, for `launcher`.

If a rank fails, its message is printed last, and its exit code is this program's. torchrun's own messages and its
traceback go to LOG_DIR/torchrun.log.
"""

import json
import logging
import os
import secrets
import shutil
import sys
import time
from pathlib import Path

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from megazero.called_as import program_name
from megazero.cluster.elastic import node_agent
from megazero.cluster.listening import LOOPBACK, host_store
from megazero.world import BEGUN

BAD_FLAGS = 2  # exit code of a command line that cannot be read
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
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(8)}"
    given = BEGUN in os.environ  # by pretrain.sbatch, which reads the file at the end
    begun = Path(os.environ.setdefault(BEGUN, str(log_dir / f"{name}.begun")))
    try:
        if wait_minutes:
            node_agent.run_agent(log_dir, arguments, 60 * float(wait_minutes), lambda error: _report(error, log_dir))
        else:
            _run_alone(log_dir, name, arguments)
    except node_agent.Ended as end:
        print(f"\n{program_name('scripts/launch.sh')}: {end}", file=sys.stderr)
        return end.code
    except ChildFailedError as error:
        text, code = _report(error, log_dir)
        _, failure = _first(error)
        message = _message(failure)
        if not begun.exists() and (message.startswith("error: ") or code == BAD_FLAGS):  # all ranks refuse the run
            said = message or _end_of(_stderr(failure, log_dir))
            text = "" if _on_console(said, log_dir) else said
            for folder in log_dir.glob(f"{name}_*"):
                shutil.rmtree(folder, ignore_errors=True)
        if text:
            print(f"\n{text}", file=sys.stderr)
        return code
    except SignalException as error:
        print(f"{program_name('scripts/launch.sh')}: ended by {error.sigval.name}", file=sys.stderr)
        return 128 + error.sigval
    finally:
        if not given:
            begun.unlink(missing_ok=True)
    return 0


def _run_alone(log_dir: Path, name: str, arguments: list[str]) -> None:
    """Run torchrun's `arguments` on this machine, whose ranks meet at a store that no other machine reaches.

    torchrun's own choice for one machine is a store at all addresses, and agents that unpickle values of its clients.
    Its static rendezvous unpickles nothing. It opens its store with multi_tenant at a port of this process that has a
    store already: that of the first one.

    name: begins the name of the folder of the ranks' logs.
    """
    store = host_store(LOOPBACK, 0, multi_tenant=True)
    where = ["--rdzv-backend", "static", "--rdzv-endpoint", f"{store.host}:{store.port}"]
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
    log = _stderr(failure, log_dir)
    where = f" ({log})" if log else ""
    said = f" {_message(failure)}" if _message(failure) else f"\n{_end_of(log)}" if log else ""
    return f"rank {rank} {how}{where}" + (f":{said}" if said.strip() and not _on_console(said[1:], log_dir) else "")


def _stderr(failure: ProcessFailure, log_dir: Path) -> Path | None:
    """Return the file of a rank's stderr; None if the console had it."""
    logs = log_dir.glob(f"*/attempt_*/{failure.local_rank}/stderr.log")
    return max(logs, key=lambda path: path.stat().st_mtime, default=None)


def _end_of(log: Path | None) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-LAST_LINES:]) if log else ""


def _message(failure: ProcessFailure) -> str:
    """Return the message that a rank has left; empty if it has left none."""
    return str(failure.message["message"]) if isinstance(failure.message, dict) else ""


def _on_console(text: str, log_dir: Path) -> bool:
    """Return whether the first rank of this machine has printed a text: its stderr is on the console."""
    for name in ("error.json", "stderr.log"):
        found = sorted(log_dir.glob(f"*/attempt_*/0/{name}"), key=lambda path: path.stat().st_mtime)
        content = found[-1].read_text(errors="replace") if found else ""
        if text in content or json.dumps(text) in content:
            return True
    return False


if __name__ == "__main__":
    sys.exit(launch_ranks(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
