"""Run every test, in three sessions of pytest: `python -m tests.suite`; exits with 1 when one of them failed.

The fault suite mostly waits, for leases and for what it killed to come back, and so do some others: they run beside
what measures no time. Then what measures time has the machine for itself.
"""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Final

BESIDE: Final = ("tests/faults", "tests/workers/embedded", "tests/workers/test_rollout.py")
TIMED: Final = ("tests/gates", "tests/workers", "tests/journeys")


def others(root: Path) -> list[str]:
    """Return every other place with tests, so that a new one is run without being named here."""
    named = {*BESIDE, *TIMED}
    found = (path for path in sorted((root / "tests").iterdir()) if path.is_dir() or path.name.startswith("test_"))
    places = (path.relative_to(root).as_posix() for path in found if path.name != "__pycache__")
    return [place for place in places if place not in named]


def start(places: Sequence[str], output: IO[bytes] | None = None) -> subprocess.Popen[bytes]:
    """Begin a session of pytest, in this process's group: Ctrl-C is for it too."""
    return subprocess.Popen([sys.executable, "-m", "pytest", *places], stdout=output, stderr=output)


def finish(session: subprocess.Popen[bytes]) -> int:
    """Wait for a session; at Ctrl-C it clears up first, which takes as long as it takes."""
    try:
        return session.wait()
    except KeyboardInterrupt:
        session.wait()
        raise


def main() -> int:
    """Run the sessions and return the exit status."""
    with tempfile.TemporaryFile() as told:
        beside = start(BESIDE, told)
        try:
            statuses = [finish(start(others(Path(__file__).parents[1])))]
            print("\nWhat mostly waits, and ran beside these tests:", flush=True)
        finally:
            status = finish(beside)
        statuses.append(status)
        told.seek(0)
        sys.stdout.buffer.write(told.read())
    print("\nWhat measures time, alone:", flush=True)
    statuses.append(finish(start([*TIMED, *(f"--ignore={place}" for place in BESIDE)])))
    return int(any(statuses))


if __name__ == "__main__":
    sys.exit(main())
