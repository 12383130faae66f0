"""A program on this machine that stands where podman or docker would, with the world that it knows."""

import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.support import container_program

_PROGRAM = """#!{python} -IS
import sys
from pathlib import Path

sys.path.append({folder!r})
from container_program import main

main(Path({place!r}), {kind!r}, sys.argv[1:])
"""


class ScriptedContainers:
    """The program and its world, in one folder."""

    def __init__(self, place: Path, program: str = "podman") -> None:
        """Put the program into a folder."""
        self.place = place
        self.path = place / program
        self.path.write_text(
            _PROGRAM.format(
                python=sys.executable,
                folder=str(Path(container_program.__file__).parent),
                place=str(place),
                kind=program,
            ),
            encoding="utf-8",
        )
        self.path.chmod(0o755)
        self.set(
            containers={},
            images=[],
            programs={},
            made=0,
            unreachable="",
            pull_error="",
            run_error="",
            dies="",
            out_of_memory=[],
            stubborn=False,
            log="loading\nready\n",
        )

    def world(self) -> dict[str, Any]:
        """Return what the program knows."""
        path = self.place / "containers.json"
        known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return known

    def set(self, **changes: Any) -> None:
        """Change what the program knows."""
        (self.place / "containers.json").write_text(json.dumps(self.world() | changes), encoding="utf-8")

    def change(self, handle: str, **state: Any) -> None:
        """Change the state of one container, as the world does."""
        world = self.world()
        world["containers"][handle]["State"].update(state)
        self.set(**world)

    def kill(self, handle: str) -> None:
        """Kill what really runs in a container, and return when it has ended, as somebody else would."""
        folder = self.place / "c" / handle[-4:]
        os.kill(int((folder / "pid").read_text(encoding="ascii")), signal.SIGKILL)
        while not (folder / "exit").exists():
            time.sleep(0.01)

    def calls(self, verb: str | None = None) -> list[list[str]]:
        """Return the command lines that it was given so far, of one verb or all."""
        path = self.place / "calls.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return [words for words in map(json.loads, lines) if verb is None or words[0] == verb]

    def end(self) -> None:
        """End whatever really runs in containers."""
        for file in self.place.glob("c/*/pid"):
            if not file.with_name("exit").exists():
                with suppress(ProcessLookupError):
                    os.killpg(int(file.read_text(encoding="ascii")), signal.SIGKILL)
