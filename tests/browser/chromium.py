"""A headless Chromium, driven over its DevTools protocol through a pipe: no port, no further package."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
MISSING = (
    "no Chromium is on PATH; on Debian and Ubuntu: apt-get install chromium-headless-shell (or chromium); "
    "another one can be named by CHROMIUM=/path/to/it"
)
SECONDS = 60.0


class Chromium:
    """One page of one browser.

    Attributes:
        events: everything that the browser has reported so far.
    """

    def __init__(self, profile: Path, width: int = 1280, height: int = 900) -> None:
        """
        Raises:
            FileNotFoundError: there is no Chromium.
        """
        program = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
        if program is None:
            raise FileNotFoundError(MISSING)
        theirs, self._to = os.pipe()
        self._from, ours = os.pipe()
        # The browser reads its descriptor 3 and writes its descriptor 4.
        shell = 'exec 3<&"$1" 4>&"$2"; shift 2; exec "$@"'
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run"]
        flags += [f"--user-data-dir={profile}", f"--window-size={width},{height}", "--hide-scrollbars"]
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "bash", str(theirs), str(ours), program, *flags, "about:blank"],
            pass_fds=(theirs, ours),
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs)
        os.close(ours)
        self.events: list[dict[str, Any]] = []
        self._rest, self._number, self._session = b"", 0, ""
        targets = self.send("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self.send("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Asks for something and waits for the answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + SECONDS
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self._from, 1 << 20) if ready else b""
            assert data, f"Chromium said nothing more (exit code {self._process.poll()})"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def open(self, url: str) -> None:
        """Goes to a page and waits until it has loaded."""
        self.send("Page.navigate", url=url)
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._receive())

    def value(self, expression: str) -> Any:
        """What a JavaScript expression gives; promises are waited for."""
        found = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def settled(self) -> None:
        """Waits until what was asked for has been drawn."""
        self.value("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def mouse(self, kind: str, x: float, y: float, **parameters: Any) -> None:
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **parameters)

    def screenshot(self, path: Path) -> None:
        import base64

        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot")["data"]))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)
