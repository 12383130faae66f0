"""Runs one of our programs so that it dies by SIGKILL at a named place of its own code, when a test wants it to.

`python -P -m tests.support.fall FOLDER GROUP MODULE ARGUMENT…` runs MODULE as it is, but for the boundaries of GROUP
(`runner`, `control` or `api`): at each, it looks for a file of the point's name in FOLDER, and whoever takes the file
away is gone at once. So a test arms a point by making the file, one process dies of it, once, and the file is the
proof that it did. The wall clock of the service is off by what `set_clock` says. GROUP `stack` is `sluicegate up`,
whose own processes are run like this.
"""

import functools
import importlib
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

GROUPED: Final = {"workers.app": "control", "workers.runner": "runner"}
"""Celery application → the group of points of its process."""

Test = Callable[[tuple[Any, ...], dict[str, Any], Any], bool]
_done = threading.local()


@dataclass(frozen=True)
class Point:
    """A place: before or after a function of ours, when what it was given, or has returned, is as `test` says."""

    function: str
    """MODULE:NAME or MODULE:CLASS.NAME."""
    is_after: bool
    test: Test = lambda _words, _named, _result: True


def _job(kind: str) -> Test:
    """In the thread that does a job of this kind."""
    return lambda _words, _named, _result: threading.current_thread().name.startswith(f"{kind}-")


def _said(job: str, kind: str, state: str | None = None) -> Test:
    """A report of this kind of entry, of a job of this kind."""

    def test(words: tuple[Any, ...], named: dict[str, Any], result: Any) -> bool:
        report = words[2]
        is_it = report.kind == kind and (state is None or report.body.get("state") == state)
        return is_it and _job(job)(words, named, result)

    return test


def _entry(*kinds: str) -> Test:
    """An entry of one of these kinds."""
    return lambda words, _named, _result: words[1].kind in kinds


def _something(_words: tuple[Any, ...], _named: dict[str, Any], result: Any) -> bool:
    return result is not None


def _noted(kind: str) -> Test:
    """A commit in the thread that has appended such an entry before."""

    def test(_words: tuple[Any, ...], _named: dict[str, Any], _result: Any) -> bool:
        kinds: set[str] = getattr(_done, "kinds", set())
        return kind in kinds

    return test


_CLAIM, _REPORT = "registry.client.jobs:Runners.claim", "registry.client.jobs:Jobs.report"
_COMPLETE, _TAKE = "registry.client.jobs:Jobs.complete", "workers.control:Control.claim"
_APPLY, _RESTORE = "workers.traffic.envoy:EnvoyGateway.apply", "workers.traffic.envoy:EnvoyGateway.restore"
_APPEND, _COMMIT = "registry.evidence:_put", "sqlalchemy.orm:Session.commit"

POINTS: Final[dict[str, dict[str, Point]]] = {
    "runner": {
        "runner.claim.before": Point(_CLAIM, is_after=False),
        "runner.claim.after": Point(_CLAIM, is_after=True, test=_something),
        "runner.gate.mid-work": Point("workers.evaluation:start_and_wait", is_after=True),
        "runner.gate.before-record": Point(_REPORT, is_after=False, test=_said("evaluate", "gate_recorded")),
        "runner.gate.after-record": Point(_REPORT, is_after=True, test=_said("evaluate", "gate_recorded")),
        "runner.evaluate.before-completion": Point(_COMPLETE, is_after=False, test=_job("evaluate")),
        "runner.evaluate.after-completion": Point(_COMPLETE, is_after=True, test=_job("evaluate")),
        "runner.serve.after-start": Point(
            "workers.launchers.process:ProcessLauncher.start", is_after=True, test=_job("serve")
        ),
        "runner.serve.after-keeping": Point("workers.live:Shelf.write", is_after=True),
        "runner.serve.before-record": Point(_REPORT, is_after=False, test=_said("serve", "replica_changed", "ready")),
        "runner.serve.after-record": Point(_REPORT, is_after=True, test=_said("serve", "replica_changed", "ready")),
    },
    "control": {
        "control.lease.before": Point(_TAKE, is_after=False),
        "control.lease.after": Point(_TAKE, is_after=True, test=_something),
        "control.look": Point("workers.watch:look", is_after=True),
        "control.publish.before": Point(_APPLY, is_after=False),
        "control.publish.after": Point(_APPLY, is_after=True),
        "control.shift.in-transaction": Point(_APPEND, is_after=True, test=_entry("traffic_shifted")),
        "control.shift.after-record": Point(_COMMIT, is_after=True, test=_noted("traffic_shifted")),
        "control.promote.in-transaction": Point(_APPEND, is_after=True, test=_entry("replaced")),
        "control.promote.after-record": Point(_COMMIT, is_after=True, test=_noted("promoted")),
        "control.restore.before": Point(_RESTORE, is_after=False),
        "control.restore.after": Point(_RESTORE, is_after=True),
        "control.restore.in-transaction": Point(_APPEND, is_after=True, test=_entry("traffic_restored")),
    },
    "api": {
        "api.create.in-transaction": Point(_APPEND, is_after=True, test=_entry("created")),
        "api.create.after-commit": Point(_COMMIT, is_after=True, test=_noted("created")),
        "api.report.in-transaction": Point(_APPEND, is_after=True, test=_entry("gate_recorded")),
        "api.report.after-commit": Point(_COMMIT, is_after=True, test=_noted("gate_recorded")),
        "api.rollback.in-transaction": Point(_APPEND, is_after=True, test=_entry("rollback_requested")),
    },
}


def arm(folder: Path, *points: str) -> None:
    """Have one process die at each of these points, the next time that one comes there."""
    known = {name for group in POINTS.values() for name in group}
    assert set(points) <= known, set(points) - known
    folder.mkdir(exist_ok=True)
    for point in points:
        (folder / point).touch()


def armed(folder: Path) -> set[str]:
    """Return the points at which nobody has died yet."""
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def set_clock(folder: Path, seconds: float) -> None:
    """Have the wall clocks of the API and of the control worker be so far off, from now on."""
    folder.mkdir(exist_ok=True)
    beside = folder.parent / ".clock"
    beside.write_text(str(seconds))
    beside.replace(folder.parent / "clock")


def _unsettle(folder: Path) -> None:
    """Let `time.time` and `time.time_ns` be off by what the test says. Before anybody else has taken hold of them."""
    place, seconds, nanoseconds = folder.parent / "clock", time.time, time.time_ns

    def offset() -> float:
        try:
            return float(place.read_text())
        except FileNotFoundError:
            return 0.0

    time.time = lambda: seconds() + offset()
    time.time_ns = lambda: nanoseconds() + int(offset() * 1e9)


def _fall(folder: Path, name: str) -> None:
    try:
        (folder / name).unlink()
    except FileNotFoundError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def _guarded(folder: Path, points: dict[str, Point], function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def guarded(*words: Any, **named: Any) -> Any:
        for name, point in points.items():
            if not point.is_after and point.test(words, named, None):
                _fall(folder, name)
        result = function(*words, **named)
        for name, point in points.items():
            if point.is_after and point.test(words, named, result):
                _fall(folder, name)
        return result

    return guarded


def _note(function: Callable[..., Any]) -> Callable[..., Any]:
    """Remember for the commit what this thread has appended."""

    @functools.wraps(function)
    def noting(*words: Any, **named: Any) -> Any:
        _done.kinds = getattr(_done, "kinds", set()) | {str(words[1].kind)}
        return function(*words, **named)

    return noting


def _forget(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def forgetting(*words: Any, **named: Any) -> Any:
        result = function(*words, **named)
        _done.kinds = set()
        return result

    return forgetting


def _replace(place: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    module, _, path = place.partition(":")
    owner: Any = importlib.import_module(module)
    *outer, name = path.split(".")
    for each in outer:
        owner = getattr(owner, each)
    setattr(owner, name, wrap(getattr(owner, name)))


def install(folder: Path, group: str) -> None:
    """Put the points of a group into this process."""
    places: dict[str, dict[str, Point]] = {}
    for name, point in POINTS[group].items():
        places.setdefault(point.function, {})[name] = point
    for place, points in places.items():
        _replace(place, functools.partial(_guarded, folder, points))
    if _COMMIT in places:
        _replace(_APPEND, _note)
        _replace(_COMMIT, _forget)


def _stack(folder: Path, arguments: list[str]) -> int:
    from workers.embedded import parts, supervisor  # only the stack needs them
    from workers.embedded.__main__ import main  # as above
    from workers.embedded.part import Backoff  # as above

    plain = parts.python

    def python(*words: str) -> tuple[str, ...]:
        line = plain(*words)
        group = "api" if "registry.api" in words else next((GROUPED[word] for word in words if word in GROUPED), None)
        if group is None:
            return line
        start = line.index("-m")
        return (*line[: start + 1], "tests.support.fall", str(folder), group, *line[start + 1 :])

    parts.python = python
    # The supervisor gives a part up that ends six times in a minute; here that many ends are what is looked at.
    supervisor.Backoff = lambda: Backoff(first_seconds=0.1, longest_seconds=0.3, crashes=10_000)  # type: ignore[assignment,misc,attr-defined] # made without a word
    return main(arguments)


def _main() -> None:
    folder, group, *rest = sys.argv[1:]
    if group == "stack":
        raise SystemExit(_stack(Path(folder), rest))
    if group != "runner":  # an engine shares the clock of its runner's machine
        _unsettle(Path(folder))
    install(Path(folder), group)
    sys.argv = rest
    runpy.run_module(rest[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
