"""Engines that only speak: what is started passes all on to a script in this process, whatever starts it.

An image has a program for it, and a Python environment a distribution. Which script answers goes by the name that is
served, which every engine is told.
"""

import base64
import hashlib
import json
import socket
import sys
import threading
import venv
from contextlib import suppress
from pathlib import Path

from tests.support.scripted_http import ScriptedHttp, read_request

PROGRAMS = {"trtllm": "trtllm-serve", "tgi": "text-generation-launcher"}
"""Engine of an image → the program that is started in it."""
MODULES = {"sglang": "sglang/launch_server.py", "transformers": "transformers/cli/transformers.py"}
"""Engine of an environment → the file that is started in it."""
_PASS_ON = """
import json
import socket
import sys
import threading


def pass_on(source, sink):
    try:
        while piece := source.recv(65536):
            sink.sendall(piece)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        pass


with open({places!r}) as file:
    places = json.load(file)
place = next(places[word] for word in sys.argv if word in places)
listening = socket.create_server(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])))
while True:
    outer, _ = listening.accept()
    inner = socket.create_connection(("127.0.0.1", place))
    for pair in ((outer, inner), (inner, outer)):
        threading.Thread(target=pass_on, args=pair, daemon=True).start()
"""


class Spoken(ScriptedHttp):
    """Answers several at once, and lives on when somebody hangs up."""

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.url.rpartition(":")[2])

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, suppress(OSError, ValueError):  # what is no whole request gets no answer
            asked = read_request(connection)
            connection.sendall(self.script(asked) or b"")


class Starters:
    """Makes what starts one engine, in a folder. `names` maps a served name to the script that answers under it."""

    def __init__(self, place: Path, engine: str, names: dict[str, Spoken]) -> None:
        """Write down who answers."""
        place.mkdir(parents=True, exist_ok=True)
        self._place, self._engine = place, engine
        places = place / f"{engine}.json"
        places.write_text(json.dumps({name: server.port for name, server in names.items()}), encoding="ascii")
        self._text = _PASS_ON.format(places=str(places))

    def environment(self, version: str) -> Path:
        """Make a Python environment in which the engine is installed, and return its folder."""
        prefix = self._place / f"env-{self._engine}"
        venv.create(prefix, symlinks=True)
        (site,) = prefix.glob("lib/python3*/site-packages")
        started = Path(MODULES[self._engine])
        files = {str(started): self._text}
        files |= {str(folder / "__init__.py"): "" for folder in started.parents if folder.name}
        told = f"{self._engine}-{version}.dist-info"
        files[f"{told}/METADATA"] = f"Metadata-Version: 2.1\nName: {self._engine}\nVersion: {version}\n"
        lines = []
        for name, text in files.items():
            (site / name).parent.mkdir(parents=True, exist_ok=True)
            (site / name).write_text(text, encoding="ascii")
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
            lines.append(f"{name},sha256={digest},{len(text)}\n")
        (site / told / "RECORD").write_text("".join(lines) + f"{told}/RECORD,,\n", encoding="ascii")
        return prefix

    def image(self) -> dict[str, str]:
        """Make an image's program, and return what its name leads to on this machine."""
        program = PROGRAMS[self._engine]
        starter = self._place / program
        starter.write_text(f"#!{sys.executable} -IS\n{self._text}", encoding="ascii")
        starter.chmod(0o755)
        return {program: str(starter)}


def image_of(engine: str) -> str:
    """Return the image of an engine."""
    return f"registry.example/{engine}@sha256:{hashlib.sha256(engine.encode()).hexdigest()}"
