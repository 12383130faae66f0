"""An engine in two processes, as most engines for accelerators are: a web process in front, an engine behind it.

The web process answers `/health`, `/v1/models`, `/metrics` and `/props` by itself, whatever becomes of the engine.
This is the program of the web process; `tests.support.split_engine` is the driver.
"""

import json
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

TITLE = "scripted-engine-core"
CORE = """
import sys, time
steps = 0
for line in sys.stdin:
    request = line.split()
    for _ in range(int(request[0])):
        time.sleep(float(request[1]))
        steps += 1
        print("step", steps, flush=True)
    print("done", steps, flush=True)
"""
"""Per line of its input: tokens, and seconds for each. Tells each step that it made."""


class Core:
    """The engine behind; one request at a time."""

    def __init__(self) -> None:
        """Start it."""
        self.steps = 0
        self.running = 0
        self._turn = threading.Lock()
        self._child = subprocess.Popen(
            [sys.executable, "-c", CORE, TITLE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def generate(self, tokens: int, seconds: float) -> None:
        """Have it generate. Raises BrokenPipeError when it is gone; waits for ever when it hangs."""
        self.running += 1
        try:
            with self._turn:
                assert self._child.stdin is not None
                assert self._child.stdout is not None
                self._child.stdin.write(f"{tokens} {seconds}\n")
                self._child.stdin.flush()
                while not (line := self._child.stdout.readline()).startswith("done"):
                    if not line:
                        raise BrokenPipeError("the engine is gone")
                    self.steps = int(line.split()[1])
        finally:
            self.running -= 1

    def wait(self) -> None:
        """Wait for its end."""
        self._child.wait()


class _Web(BaseHTTPRequestHandler):
    core: Core
    told: dict[str, object]

    def do_GET(self) -> None:
        pages = {
            "/health": {"status": "ok"},
            "/v1/models": {"data": [{"id": self.told["model"], "meta": {"n_ctx": self.told["context"]}}]},
            "/props": self.told["props"],
        }
        if self.path == "/metrics":
            self._send(200, f"llamacpp:n_decode_total {self.core.steps}\n".encode(), "text/plain")
        else:
            self._send(200 if self.path in pages else 404, json.dumps(pages.get(self.path, {})).encode())

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        tokens = int(asked.get("max_tokens", 1))
        try:
            self.core.generate(tokens, float(str(self.told["token_seconds"])))
        except OSError as error:
            self._send(500, json.dumps({"error": {"message": str(error)}}).encode())
            return
        message = {"role": "assistant", "content": "Hi"}
        choice = {"index": 0, "message": message, "finish_reason": "length"}
        usage = {"prompt_tokens": 3, "completion_tokens": tokens, "total_tokens": 3 + tokens}
        self._send(200, json.dumps({"model": self.told["model"], "choices": [choice], "usage": usage}).encode())

    def _send(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def main() -> None:
    """Serve until killed; with `exits` the web process ends with status 0 a while after the engine behind it."""
    told = json.loads(sys.argv[1])
    for line in told["lines"]:
        print(line, flush=True)
    _Web.core, _Web.told = Core(), told
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Web)
    port_file = Path(told["port_file"])
    part = port_file.with_suffix(".part")
    part.write_text(json.dumps({"pid": os.getpid(), "port": server.server_address[1]}))
    part.replace(port_file)

    def end() -> None:
        _Web.core.wait()
        time.sleep(float(told["exits"]))
        os._exit(0)

    if told["exits"] is not None:
        threading.Thread(target=end, daemon=True).start()
    server.serve_forever()


if __name__ == "__main__":
    main()
