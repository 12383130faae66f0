"""Run every test, in six sessions of pytest: `python -m tests.suite`; exits with 1 when one of them failed.

The fault suite mostly waits, for leases and for what it killed to come back, and so does much of the runner's: they run
beside what measures no time. Then come whole journeys, which leave a processor to what measures time and mostly waits.
In the end what a second process would make slow has the machine for itself.

Thousands of tests on real processes meet a starved machine now and then. A few that failed are run once more, alone:
what fails again has failed, and what does not is named at the end, as something to be mended.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Final

FAULTS: Final = ("tests/faults", "tests/workers/embedded", "tests/workers/test_rollout.py")
EXHAUSTIVE: Final = tuple(f"tests/registry/test_{part}.py" for part in ("api_fuzz", "api_schemathesis", "every_column"))
"""What tries everything that can be asked or altered. It takes long, and what is killed leaves a processor to it."""
WAITING: Final = tuple(f"tests/registry/test_{part}.py" for part in ("api_processes", "uploads"))
"""What waits for processes that start, and for bytes that come slowly."""
RUNNER: Final = (
    *(f"tests/{part}" for part in ("bench", "cases", "engines", "gates", "workers/launchers")),
    *(
        f"tests/workers/test_{part}.py"
        for part in ("agent", "evaluation", "holds", "launcher", "live", "pauses", "quarantines", "runner", "staging")
    ),
)
BESIDE: Final = {
    "what is killed, and all that can be asked": (*FAULTS, *EXHAUSTIVE, *WAITING),
    "runners, engines and gates": RUNNER,
}
"""Sessions that run beside the others, by what they are about."""
JOURNEYS: Final = ("tests/journeys",)
PATIENT: Final = (
    "tests/gates/test_pulse.py",
    *(f"tests/workers/test_{part}.py" for part in ("recording", "rehearsal", "vitals")),
    *("tests/workers/demo/test_traffic.py", "tests/workers/traffic"),
)
"""What measures time and takes little of a processor: it waits for intervals, engines and the gateway."""
TIMED: Final = (
    "tests/gates/files/test_header_bounds.py",
    *(f"tests/gates/test_{part}.py" for part in ("load", "machine", "rollback")),
    "tests/workers/test_llamacpp_server.py",
)
"""What a busy machine would make slow, and what judges that it was slow: it runs last, alone."""
PHASES: Final[tuple[Mapping[str, Sequence[str]], ...]] = (
    BESIDE,
    {"whole journeys": JOURNEYS, "what waits": PATIENT},
    {"what measures time": TIMED},
)
"""What runs one after the other; the sessions of each run at once, and those of the first beside every other test."""
MOST_AGAIN: Final = 3
"""Tests of all sessions that are run once more. Where more have failed, it was not the machine."""


def phases() -> Iterator[dict[str, list[str]]]:
    """Yield what runs one after the other: the arguments of sessions that run at once, by what they are about.

    The first of all has every test that is not named here, so that a new one is run.
    """
    first, *later = PHASES
    named = [place for phase in PHASES for places in phase.values() for place in places]
    left_out = [f"--ignore={place}" for phase in later for places in phase.values() for place in places]
    everything_else = ["tests", *(f"--ignore={place}" for place in named)]
    yield {"everything else": everything_else, **{name: [*places, *left_out] for name, places in first.items()}}
    yield from ({name: list(places) for name, places in phase.items()} for phase in later)


def _compiling() -> dict[str, str]:
    """Return the environment for hundreds of processes: what one of them compiled, the next has not to compile."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


class Session:
    """One session of pytest, in this process's group: Ctrl-C is for it too."""

    def __init__(self, arguments: Sequence[str], memory: Path, output: IO[bytes] | None = None) -> None:
        """Begin it. `memory` is the folder in which it notes what failed."""
        self._memory = memory
        command = [sys.executable, "-m", "pytest", "-o", f"cache_dir={memory}", *arguments]
        self._process = subprocess.Popen(command, env=_compiling(), stdout=output, stderr=output)

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


def together(wanted: Mapping[str, Sequence[str]], memory: Path) -> tuple[list[Session], list[int]]:
    """Run sessions at once. The first says what it does as it does it; what the others say is told at their end."""
    (first, arguments), *rest = wanted.items()
    print(f"\n{first[0].upper()}{first[1:]}:", flush=True)
    with contextlib.ExitStack() as files:
        told = {name: files.enter_context(tempfile.TemporaryFile()) for name, _ in rest}
        beside = [Session(given, memory / name, told[name]) for name, given in rest]
        try:
            shown = Session(arguments, memory / first)
            statuses = [shown.finish()]
        finally:
            ended = [session.finish() for session in beside]
        for name, output in told.items():
            print(f"\nBeside these tests, {name}:", flush=True)
            output.seek(0)
            sys.stdout.buffer.write(output.read())
            sys.stdout.buffer.flush()
    return [shown, *beside], [*statuses, *ended]


def main() -> int:
    """Run the sessions and return the exit status."""
    with tempfile.TemporaryDirectory() as folder:
        sessions: list[Session] = []
        statuses: list[int] = []
        for wanted in phases():
            ran, ended = together(wanted, Path(folder))
            sessions += ran
            statuses += ended
        return again(sessions, statuses, Path(folder) / "again")


if __name__ == "__main__":
    sys.exit(main())
