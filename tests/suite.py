"""Run every test, in three sessions of pytest: `python -m tests.suite`; exits with 1 when one of them failed.

The fault suite mostly waits, for leases and for what it killed to come back, and so do some others: they run beside
what measures no time, with what only reads files. Then what measures time has the machine for itself.

Thousands of tests on real processes meet a starved machine now and then. A few that failed are run once more, alone:
what fails again has failed, and what does not is named at the end, as something to be mended.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Final

BESIDE: Final = (
    *("tests/faults", "tests/workers/embedded", "tests/workers/test_rollout.py"),
    *("tests/gates/files", "tests/gates/placement", "tests/gates/sources"),
)
TIMED: Final = ("tests/gates", "tests/workers", "tests/journeys")
MOST_AGAIN: Final = 3
"""Tests of all sessions that are run once more. Where more have failed, it was not the machine."""


def others(root: Path) -> list[str]:
    """Return every other place with tests, so that a new one is run without being named here."""
    named = {*BESIDE, *TIMED}
    found = (path for path in sorted((root / "tests").iterdir()) if path.is_dir() or path.name.startswith("test_"))
    places = (path.relative_to(root).as_posix() for path in found if path.name != "__pycache__")
    return [place for place in places if place not in named]


class Session:
    """One session of pytest, in this process's group: Ctrl-C is for it too."""

    def __init__(self, arguments: Sequence[str], memory: Path, output: IO[bytes] | None = None) -> None:
        """Begin it. `memory` is the folder in which it notes what failed."""
        self._memory = memory
        command = [sys.executable, "-m", "pytest", "-o", f"cache_dir={memory}", *arguments]
        self._process = subprocess.Popen(command, stdout=output, stderr=output)

    def finish(self) -> int:
        """Wait for it and return its exit status; at Ctrl-C it clears up first, which takes as long as it takes."""
        try:
            return self._process.wait()
        except KeyboardInterrupt:
            self._process.wait()
            raise

    def failed(self) -> list[str]:
        """Return the tests that failed; none when the session came to no orderly end."""
        noted = self._memory / "v" / "cache" / "lastfailed"
        if self._process.returncode != 1 or not noted.is_file():
            return []
        return sorted(json.loads(noted.read_text("utf-8")))


def again(sessions: Sequence[Session], statuses: Sequence[int], memory: Path) -> int:
    """Run what failed once more, if it is little. Returns the exit status of the whole."""
    suspects = [session.failed() for session in sessions]
    tests = [test for some in suspects for test in some]
    is_told = all(status == 0 or some for status, some in zip(statuses, suspects, strict=True))
    if not tests or not is_told or len(tests) > MOST_AGAIN:
        return int(any(statuses))
    print(f"\nOnce more, alone: {', '.join(tests)}", flush=True)
    status = Session(tests, memory).finish()
    if status == 0:
        print(f"\nUNSTEADY, failed once and passed alone; to be mended: {', '.join(tests)}", flush=True)
    return int(status != 0)


def main() -> int:
    """Run the sessions and return the exit status."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as told:
        memory = Path(folder)
        beside = Session(BESIDE, memory / "beside", told)
        try:
            other = Session(others(Path(__file__).parents[1]), memory / "others")
            statuses = [other.finish()]
            print("\nWhat mostly waits, and ran beside these tests:", flush=True)
        finally:
            status = beside.finish()
        statuses.append(status)
        told.seek(0)
        sys.stdout.buffer.write(told.read())
        print("\nWhat measures time, alone:", flush=True)
        timed = Session([*TIMED, *(f"--ignore={place}" for place in BESIDE)], memory / "timed")
        statuses.append(timed.finish())
        return again([other, beside, timed], statuses, memory / "again")


if __name__ == "__main__":
    sys.exit(main())
