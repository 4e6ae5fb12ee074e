"""Errors of a command as one sentence, also for the other ranks."""

import contextlib
import traceback
from collections.abc import Iterator
from typing import NoReturn

from megazero.checkpoint import AgreedFailure
from megazero.cluster import failures, launch
from megazero.engine.mesh.peer_errors import PeerLost
from megazero.engine.step.engine import LossScaleExhausted
from megazero.engine.zero.off_device import StatesLost
from megazero.flags.cli import Command
from megazero.log import log
from megazero.optional import missing_package
from megazero.run.stopping import DeadRun, interrupted_words
from megazero.world import World


@contextlib.contextmanager
def reporting_errors(command: Command, world: World) -> Iterator[None]:
    """Report an error within, here and to the other ranks, before this rank ends."""
    try:
        yield
    except ValueError as error:
        fail(world, f"error: {error}")
    except (AgreedFailure, LossScaleExhausted, DeadRun, StatesLost) as error:
        fail(world, str(error))
    except PeerLost as error:
        # At once, because this rank may be ended before they answer.
        log.error(f"{error}{place_of(error)}; asking the others why")
        fail(world, failures.explain_lost(world, error), report=False)
    except ModuleNotFoundError as error:
        fail(world, f"this run {missing_package(error)}")
    except KeyboardInterrupt:
        log.error(interrupted_words(command.config) if world.rank == 0 else "interrupted")
        launch.exit_now(130)
    except Exception as error:
        traceback.print_exc()
        fail(world, f"{type(error).__name__}: {error}{place_of(error)}")


def place_of(error: BaseException) -> str:
    """Name the operation of the step that raised an exception, if the interpreter has noted one."""
    return "".join(f" {note}" for note in getattr(error, "__notes__", [])[:1])


def fail(world: World, message: str, report: bool = True) -> NoReturn:
    """Report an error here and to the other ranks, and end at once, so that waits for this rank fail promptly."""
    log.error(message)
    if report:
        failures.report_failure(world, message)
    launch.exit_now(1)
