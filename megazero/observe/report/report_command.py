"""`megazero report`, also scripts/report.py: the command that writes the page of a run or of several, or serves it."""

import html
import http.server
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from megazero.files import explain, replace_file
from megazero.flags.cli import read_flags
from megazero.log import log
from megazero.observe.report.comparison import comparison
from megazero.observe.report.page import REPORT, page
from megazero.observe.report.runs import EVENTS, METRICS, read_run
from megazero.optional import missing_package

HOST, HOST_NAMES = "127.0.0.1", ("127.0.0.1", "localhost")
RELOAD_SECONDS = 10
SHARE = 5  # a page is made again after this many times its seconds


@dataclass(frozen=True)
class ReportOptions:
    """Write report.html of a run, or one page that compares several: curves, numbers and options. It needs no network.

    A run keeps its own report.html; this makes one for a run that was killed, or is older.

    examples:
      python scripts/report.py runs/a
      python scripts/report.py runs/a runs/b --output comparison.html
      python scripts/report.py runs/a runs/b --serve
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """The --log-dir folders."""
    output: Path | None = None
    """File to write. Default: report.html in the folder of the run; comparison.html for several."""
    serve: bool = False
    """Serve the page at the loopback address instead, made again when metrics grow, until Ctrl-C."""
    port: Annotated[int, tyro.conf.arg(metavar="INT")] = 8050
    """--serve: the port; 0: a free one."""


def write_reports(argv: list[str]) -> int:
    """Run a command line, and return the exit code."""
    options = read_flags(ReportOptions, argv, "scripts/report.py")
    try:
        if not options.runs:
            raise ValueError("no run is named; give the --log-dir folder of one or more")
        if options.serve:
            serve(options.runs, options.port)
        else:
            log.info(f"wrote {write_page(options.runs, options.output)}")
    except ModuleNotFoundError as error:
        log.error(f"this {missing_package(error)}")
        return 1
    except ValueError as error:
        log.error(f"error: {error}")
        return 1
    return 0


def write_page(folders: Sequence[Path], output: Path | None) -> Path:
    """Write the page of one run or several; ValueError if a folder holds no iteration, or it cannot be written."""
    path = output or (folders[0] / REPORT if len(folders) == 1 else Path("comparison.html"))
    text = page_of(folders)
    try:
        replace_file(path, text)
    except OSError as error:
        raise ValueError(f"{path}: the report cannot be written: {error.strerror}") from None
    return path


def page_of(folders: Sequence[Path], live: int = 0) -> str:
    """Return the page of one run or several. live: as of `comparison`."""
    return page(read_run(folders[0]), live) if len(folders) == 1 else comparison(folders, live)


# -- serving


class PageServer(http.server.ThreadingHTTPServer):
    """Serves the page of log folders, and makes it again after their files have grown."""

    daemon_threads = True

    def __init__(self, folders: Sequence[Path], port: int) -> None:
        """OSError if the port cannot be used."""
        super().__init__((HOST, port), PageHandler)
        self.folders, self.lock = folders, threading.Lock()
        self.page, self.made_of, self.due = "", list[int](), 0.0

    def current(self) -> str:
        """Return the page; ValueError if a folder holds no iteration."""
        with self.lock:
            files = [folder / name for folder in self.folders for name in (METRICS, EVENTS)]
            sizes = [file.stat().st_size if file.is_file() else 0 for file in files]
            began = time.monotonic()
            if not self.page or (sizes != self.made_of and began >= self.due):
                self.page, self.made_of = page_of(self.folders, RELOAD_SECONDS), sizes
                self.due = began + (1 + SHARE) * (time.monotonic() - began)
            return self.page


class PageHandler(http.server.BaseHTTPRequestHandler):
    """Answers requests for /."""

    server: PageServer

    def do_GET(self) -> None:
        # A page of another site whose name leads to this address has that name here.
        if self.path != "/" or self.headers.get("Host", "").split(":")[0] not in HOST_NAMES:
            self.send_error(404)
            return
        try:
            status, text = 200, self.server.current()
        except ValueError as error:
            status, text = 503, f"<pre>{html.escape(str(error))}</pre>"
        content = text.encode("utf-8", "surrogateescape")
        self.send_response(status)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        if status != 200:
            self.send_header("Refresh", str(RELOAD_SECONDS))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *words: object) -> None:
        """Print no line per request."""


def serve(folders: Sequence[Path], port: int) -> None:
    """Serve until Ctrl-C. ValueError if the port cannot be used."""
    try:
        server = PageServer(folders, port)
    except (OSError, OverflowError) as error:
        raise ValueError(f"--port {port}: {explain(error) if isinstance(error, OSError) else error}") from None
    log.info(f"serving http://{HOST}:{server.server_port}; Ctrl-C ends it")
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.server_close()
