"""The newest checkpoint that was seen from here, by service and project: what it covers cannot be cut off unseen.

A service can be made to forget its last checkpoints together with what they covered; a person's own folder cannot be
made to by the service.
"""

import json
import os
from pathlib import Path
from typing import Any

from registry.cli.output import Output

FILE = "checkpoints.json"


class Seen:
    """A small file. When it cannot be used nothing is remembered, and `note` is told why."""

    def __init__(self, folder: Path, output: Output) -> None:
        """Read the file in a folder."""
        self.path, self._output = folder / FILE, output
        self._known: dict[str, Any] = {}
        try:
            read = json.loads(self.path.read_text("utf-8"))
            self._known = read if isinstance(read, dict) else {}
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            output.note(f"{self.path} cannot be read ({error}): what was seen before is not held against it", "warn")

    def digest(self, service: str, project: str) -> str | None:
        """Return the digest of the newest checkpoint that was seen of a project."""
        found = self._known.get(f"{service} {project}")
        return str(found["digest"]) if isinstance(found, dict) and "digest" in found else None

    def keep(self, service: str, project: str, *, digest: str, number: int) -> None:
        """Remember a checkpoint that was verified, or just made."""
        self._known[f"{service} {project}"] = {"digest": digest, "number": number}
        part = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            part.write_text(json.dumps(self._known, indent=2) + "\n", "utf-8")
            part.replace(self.path)
        except OSError as error:
            self._output.note(f"{self.path} cannot be written ({error.strerror}): this is not remembered", "warn")
