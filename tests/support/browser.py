"""A real browser without a window, told what to do over a pipe."""

import base64
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
MISSING = "chromium is not installed: no page was looked at in a browser"


class Browser:
    """Headless Chromium with one page. Speaks the DevTools protocol, JSON ended by NUL, on descriptors 3 and 4."""

    def __init__(self) -> None:
        """Prepare; `with` starts and ends it."""
        if CHROMIUM is None:
            raise RuntimeError(MISSING)
        self._program = CHROMIUM
        self._ids = itertools.count(1)
        self._buffer = b""
        self._session: str | None = None
        self.console: list[str] = []
        """What pages complained of: exceptions, refused scripts and styles, answers that were errors."""

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="sluicegate-browser-", ignore_cleanup_errors=True)
        (their_in, self._out), (self._in, their_out) = os.pipe(), os.pipe()
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        options += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
        options += ["--hide-scrollbars", "--remote-debugging-pipe", f"--user-data-dir={self._folder.name}"]

        def attach() -> None:
            # Both are moved up first, so that neither is closed by the other's move.
            upper = [os.dup(their_in), os.dup(their_out)]
            os.dup2(upper[0], 3)
            os.dup2(upper[1], 4)

        self._process = subprocess.Popen(
            [self._program, *options],
            close_fds=False,
            preexec_fn=attach,  # noqa: PLW1509 - the protocol's descriptors have fixed numbers
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(their_in)
        os.close(their_out)
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._out)
        os.close(self._in)
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()

    def look(self, *, width: int, height: int = 900, dark: bool = False) -> None:
        """Take the size and the colours of a device."""
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str) -> None:
        """Go to a page and wait until it is there."""
        self.run(f"window.left = true; location.href = {json.dumps(url)}")
        self.wait("!window.left && document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """Return what a script in the page gives."""
        found = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{script}: {found['exceptionDetails'].get('exception', {}).get('description')}")
        return found["result"].get("value")

    def wait(self, condition: str, *, seconds: float = 20.0) -> None:
        """Wait until a script gives something true."""
        ends = time.monotonic() + seconds
        while not self._holds(condition):
            if time.monotonic() > ends:
                raise RuntimeError(f"it did not happen: {condition}\n{self.run('document.body.innerText')}")
            time.sleep(0.05)

    def _holds(self, condition: str) -> bool:
        try:
            return bool(self.run(condition))
        except RuntimeError as error:
            # The page that was asked has gone, and the next one is not there yet.
            if "navigated" in str(error):
                return False
            raise

    def screenshot(self, path: Path) -> None:
        """Write the whole page as PNG."""
        taken = self._call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(taken["data"]))

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        identity = next(self._ids)
        message: dict[str, Any] = {"id": identity, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == identity:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _note(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.console.append(str(parameters["exceptionDetails"].get("exception", {}).get("description")))
            case "Log.entryAdded" if parameters["entry"]["level"] == "error":
                self.console.append(f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}")

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            read = os.read(self._in, 1 << 20)
            if not read:
                raise RuntimeError("the browser has ended")
            self._buffer += read
        raw, _, self._buffer = self._buffer.partition(b"\0")
        parsed: dict[str, Any] = json.loads(raw)
        return parsed
