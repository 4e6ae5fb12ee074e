"""`Profiler`: observes iterations for a trace, for the bubble, and to find slow ranks."""

from pathlib import Path

from megazero.engine.step.engine import Engine
from megazero.flags.config import Config
from megazero.flags.rules import iteration_range
from megazero.log import log
from megazero.observe import stragglers
from megazero.observe.bubble import BubbleMeter
from megazero.observe.timeline import Timeline
from megazero.observe.trace_file import Trace


class Profiler:
    """Observes an engine's iterations as the flags ask; all ranks call every method at the same iterations."""

    def __init__(self, config: Config, engine: Engine) -> None:
        self.config, self.engine, self.mesh = config, engine, engine.mesh
        self.traced = iteration_range(config.log.profile_iterations) if config.log.profile_iterations else (0, -1)
        self.meter = BubbleMeter(config, self.mesh) if self.mesh.layout.pp > 1 else None
        self.timeline: Timeline | None = None
        self.trace: Trace | None = None

    def begin(self, iteration: int) -> None:
        """Call this before an iteration."""
        first, last = self.traced
        self.iteration, self.traces = iteration, first <= iteration <= last
        self.measures = self.meter is not None and iteration % self.config.log.log_interval == 0
        every = self.config.monitor.straggler_interval
        self.compares = every > 0 and iteration % every == 0
        if self.traces and self.trace is None:
            self.trace = Trace(self.mesh, self.engine.tracker)
        observes = self.traces or self.measures or self.compares
        self.timeline = Timeline(self.mesh.device, ranges=self.traces) if observes else None
        self.engine.interpreter.observe = self.timeline

    def end(self) -> dict[str, object]:
        """Return the iteration's additions to its record. Write the trace after its last iteration."""
        recorded, self.engine.interpreter.observe = self.timeline, None
        if recorded is None:
            return {}
        recorded.close()
        if self.trace is not None and self.traces:
            self.trace.iteration(self.iteration, recorded)
            if self.iteration == self.traced[1]:
                self.close()
        found: dict[str, object] = {}
        if self.compares:
            found |= stragglers.report_slow(self.mesh, self.iteration, recorded.computed())
        if self.meter is not None and self.measures:
            found |= self.meter.measure(recorded.computed(), simulates=self.mesh.rank == 0)
        return found

    def close(self) -> None:
        """Write the trace, if there is one: at the end of its range, or of a run that ends within it."""
        trace, self.trace = self.trace, None
        if trace is None:
            return
        path = Path(self.config.log.log_dir) / "trace-{}-{}.json".format(*self.traced)
        try:
            trace.write(path)
        except OSError as error:  # must not end the run
            log.warning(f"--profile-iterations: {path} cannot be written: {error}")
        else:
            log.info(f"wrote {path}; open it in chrome://tracing or ui.perfetto.dev")
