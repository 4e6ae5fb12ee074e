"""`Exports`: a run's checkpoints as Hugging Face folders, written by a thread of rank 0 while training continues."""

import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from megazero import checkpoint
from megazero.checkpoint.folders import folder_name, iteration_of, leftovers, partial_folder, retire
from megazero.checkpoint.locking import check_owner
from megazero.flags.config import CheckpointConfig
from megazero.log import log
from megazero.run.checkpoints import Checkpoints
from megazero.run.run_state import Progress

# Writes the checkpoint of the first folder as the second one, which appears whole or not at all.
Write = Callable[[Path, Path], object]


def guard_exports(options: CheckpointConfig, load: Path | None) -> None:
    """Refuse a --save-hf with exports, unless the run resumes from --save: they would be replaced.

    Args:
        load: the checkpoint from which the run starts.
    """
    found = sorted(Path(options.save_hf).glob("iter_*")) if options.save_hf else []
    resumes = load is not None and load.parent.resolve() == Path(options.save).resolve() and not options.finetune
    if found and not resumes:
        raise ValueError(
            f"--save-hf {options.save_hf} holds {found[-1].name} of an earlier run; name another folder, or resume "
            "that run with --load and its --save"
        )


class Exports:
    """One rank's part in the exports of a run with --save-hf; all ranks call each method together, and rank 0 writes.

    An export is made from the checkpoint of its iteration. One runs at a time: a second one waits for it.
    """

    def __init__(self, checkpoints: Checkpoints, write: Write) -> None:
        self.checkpoints, self.write = checkpoints, write
        self.options = checkpoints.config.checkpoint
        self.root, self.leads = Path(self.options.save_hf), checkpoints.mesh.rank == 0
        self.exported_at: int | None = None  # iteration of the newest export
        minutes = checkpoints.config.parallel.distributed_timeout_minutes
        self._group = checkpoint.slow_group(minutes)
        self._thread = ThreadPoolExecutor(1, "export")
        self._running: Future[None] | None = None

    def resume(self, progress: Progress) -> None:
        """Clear the remains of an export that was killed, and repeat it if it was of the checkpoint that is loaded."""
        if self.leads:
            for leftover in leftovers(self.root):
                shutil.rmtree(leftover, ignore_errors=True)
        saved, interval = self.checkpoints.saved_at, self.options.save_hf_interval
        if saved is not None and (self.root / folder_name(saved)).exists():
            self.exported_at = saved
        elif saved is not None and interval and saved % interval == 0:
            self.export(progress)

    def export(self, progress: Progress, last: bool = False) -> None:
        """Save a checkpoint, and start to export it to --save-hf/iter_NNNNNNN, once per iteration.

        Args:
            last: wait for the end of the export.

        Raises:
            ValueError, AgreedFailure: the last export cannot be written. Others are reported by a warning.
        """
        iteration = progress.iteration
        if self.exported_at != iteration:
            self.finish()
            self.checkpoints.save(progress, last)
            self.checkpoints.finish_save()
            if self.checkpoints.saved_at == iteration:  # else the save failed, and has reported it
                self.exported_at = iteration
                if self.leads:
                    self._running = self.checkpoints.reading = self._thread.submit(self._export, folder_name(iteration))
        if last:
            self.finish(all_ranks=True, strict=True)

    def finish(self, all_ranks: bool = False, strict: bool = False) -> None:
        """Wait for the export that runs.

        Args:
            all_ranks: the other ranks wait too, longer than their collectives may.
            strict: raise its error on every rank; else it is a warning.
        """
        running, self._running = self._running, None
        watchdog = self.checkpoints.watchdog
        doing, watchdog.doing = watchdog.doing, ""

        def wait() -> None:
            try:
                if running is not None:
                    running.result()
            except Exception as error:  # of the thread: training continues without its export
                if strict:
                    raise
                log.warning(f"cannot export to --save-hf {self.root}: {error}. Training continues")

        if all_ranks:
            checkpoint.together(f"exporting to {self.root}", self._group, wait)
        else:
            wait()
        watchdog.doing = doing
        if running is not None:
            self.checkpoints.prune()

    def _export(self, name: str) -> None:
        start, output, save = time.perf_counter(), self.root / name, Path(self.options.save)
        partial = partial_folder(self.root, iteration_of(output))
        self.write(save / name, partial)
        check_owner(save)
        replaced = retire(output, save) if output.exists() else None  # of an iteration that the run repeats
        partial.rename(output)
        if replaced:
            shutil.rmtree(replaced, ignore_errors=True)
        log.info(f"exported {output} in {time.perf_counter() - start:.1f} s")
