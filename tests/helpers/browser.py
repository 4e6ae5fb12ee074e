"""A page in Debian's Chromium, driven by the DevTools protocol over a pipe: no port, no driver, no package.

    python -m tests.helpers.browser runs/a/report.html docs/pictures/report.png

writes a picture of a page.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

CHROMIUM = shutil.which("chromium")
FLAGS = "--headless --no-sandbox --disable-gpu --hide-scrollbars --remote-debugging-pipe --no-first-run".split()


class Browser:
    """Chromium with one page. `faults` has exceptions, warnings of scripts, and errors."""

    def __init__(self, profile: Path, width: int = 1240, height: int = 900) -> None:
        ours, theirs = os.pipe(), os.pipe()
        command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"]
        shell = ["bash", "-c", f'exec "$@" 3<&{ours[0]} 4>&{theirs[1]}', "bash"]
        silent, inherited = subprocess.DEVNULL, (ours[0], theirs[1])
        self.process = subprocess.Popen(shell + command, pass_fds=inherited, stdout=silent, stderr=silent)
        for end in inherited:
            os.close(end)
        self.requests, self.answers = os.fdopen(ours[1], "wb", buffering=0), os.fdopen(theirs[0], "rb")
        self.events: list[dict[str, Any]] = []
        self.session, self.number = "", 0
        (page,) = (each for each in self.send("Target.getTargets")["targetInfos"] if each["type"] == "page")
        self.session = self.send("Target.attachToTarget", targetId=page["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.process.kill()
        self.process.wait()
        self.requests.close()
        self.answers.close()

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol, and return its result; events that come first are kept."""
        self.number += 1
        request = {"id": self.number, "method": method, "params": params}
        if self.session:
            request["sessionId"] = self.session
        self.requests.write(json.dumps(request).encode() + b"\0")
        answer = self._next(lambda message: message.get("id") == self.number)
        assert "error" not in answer, (method, answer["error"])
        return dict(answer["result"])

    def wait_for(self, event: str, wanted: Callable[[dict[str, Any]], bool] = lambda params: True) -> None:
        """Wait for an event, with parameters that are wanted, that has not come yet."""
        self._next(lambda message: message.get("method") == event and wanted(message["params"]))

    def _next(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        while True:
            text = bytearray()
            while not text.endswith(b"\0"):
                byte = self.answers.read(1)
                assert byte, "Chromium has ended"
                text += byte
            message: dict[str, Any] = json.loads(text[:-1])
            self.events.append(message)
            if wanted(message):
                return message

    def open(self, url: str) -> None:
        """Load a page, and wait until it has."""
        self.send("Page.navigate", url=url)
        self.wait_for("Page.loadEventFired")

    def run(self, script: str) -> Any:
        """Return the value of an expression; a promise is awaited."""
        found = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def mouse(self, *steps: tuple[str, float, float]) -> None:
        """Move, press and release the left button: ("mouseMoved" | "mousePressed" | "mouseReleased", x, y)."""
        for kind, x, y in steps:
            options = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **options)

    def picture(self, path: Path) -> None:
        """Write the window as a PNG."""
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot")["data"]))

    @property
    def faults(self) -> list[str]:
        found = []
        for event in self.events:
            method, params = event.get("method"), event.get("params", {})
            if method == "Runtime.exceptionThrown":
                found.append(str(params["exceptionDetails"]))
            elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
                found.append(str(params["args"]))
            elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
                found.append(str(params["entry"]))
        return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, Browser(Path(folder), height=1040) as shown:
        shown.open(Path(sys.argv[1]).resolve().as_uri())
        shown.picture(Path(sys.argv[2]))
