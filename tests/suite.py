"""Run every test, in four sessions of pytest: `python -m tests.suite`; exits with 1 when one of them failed.

The fault suite mostly waits, for leases and for what it killed to come back, and so does much of the runner's: they run
beside what measures no time. Then what measures time has the machine for itself.

Thousands of tests on real processes meet a starved machine now and then. A few that failed are run once more, alone:
what fails again has failed, and what does not is named at the end, as something to be mended.
"""

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Final

FAULTS: Final = ("tests/faults", "tests/workers/embedded", "tests/workers/test_rollout.py")
EXHAUSTIVE: Final = tuple(f"tests/registry/test_{part}.py" for part in ("api_fuzz", "api_schemathesis", "every_column"))
"""What tries everything that can be asked or altered. It takes long, and what is killed leaves a processor to it."""
RUNNER: Final = (
    *(f"tests/{part}" for part in ("bench", "cases", "engines", "gates/files", "gates/placement", "gates/sources")),
    "tests/workers/launchers",
    *(
        f"tests/workers/test_{part}.py"
        for part in ("agent", "evaluation", "holds", "launcher", "live", "pauses", "quarantines", "runner", "staging")
    ),
)
BESIDE: Final = {
    "what is killed, and all that can be asked": (*FAULTS, *EXHAUSTIVE),
    "runners, engines and files": RUNNER,
}
"""Sessions that run beside the others, by what they are about."""
TIMED: Final = (
    "tests/journeys",
    "tests/gates/files/test_header_bounds.py",
    *(f"tests/gates/test_{part}.py" for part in ("load", "machine", "pulse", "rollback")),
    *(f"tests/workers/test_{part}.py" for part in ("llamacpp_server", "recording", "rehearsal", "vitals")),
    *("tests/workers/demo/test_traffic.py", "tests/workers/traffic"),
)
"""What a busy machine would make slow, and what judges that it was slow: it runs last, alone."""
MOST_AGAIN: Final = 3
"""Tests of all sessions that are run once more. Where more have failed, it was not the machine."""


def others() -> list[str]:
    """Return the arguments for every other test, so that a new one is run without being named here."""
    named = [*(place for places in BESIDE.values() for place in places), *TIMED]
    return ["tests", *(f"--ignore={place}" for place in named)]


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


def together(memory: Path) -> tuple[list[Session], list[int]]:
    """Run what measures no time, all sessions at once; what those beside the first say is told at their end."""
    with contextlib.ExitStack() as files:
        told = {name: files.enter_context(tempfile.TemporaryFile()) for name in BESIDE}
        later = [f"--ignore={place}" for place in TIMED]
        beside = [Session([*places, *later], memory / name, told[name]) for name, places in BESIDE.items()]
        try:
            other = Session(others(), memory / "others")
            statuses = [other.finish()]
        finally:
            ended = [session.finish() for session in beside]
        for name, output in told.items():
            print(f"\nBeside these tests, {name}:", flush=True)
            output.seek(0)
            sys.stdout.buffer.write(output.read())
            sys.stdout.buffer.flush()
    return [other, *beside], [*statuses, *ended]


def main() -> int:
    """Run the sessions and return the exit status."""
    with tempfile.TemporaryDirectory() as folder:
        memory = Path(folder)
        sessions, statuses = together(memory)
        print("\nWhat measures time, alone:", flush=True)
        timed = Session(TIMED, memory / "timed")
        statuses.append(timed.finish())
        return again([*sessions, timed], statuses, memory / "again")


if __name__ == "__main__":
    sys.exit(main())
