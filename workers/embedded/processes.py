"""Who runs for a data directory, written down so that the next start finds what a killed one left behind."""

import json
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from workers.launchers.process import Condition, Launched, ProcessLauncher, ProcessState, strays
from workers.traffic.desired import write_atomically

GRACE_SECONDS: Final = 10.0
ENGINE_GRACE_SECONDS: Final = 30.0
_AT_ONCE: Final = 16

Say = Callable[[str], None]


def record(path: Path, running: Iterable[tuple[str, Launched]]) -> None:
    """Write down the processes of a stack, in the order in which they should be ended."""
    items = [
        {"name": name, "pid": each.pid, "start_time": each.start_time, "boot_id": each.boot_id}
        for name, each in running
    ]
    write_atomically(path, json.dumps(items, indent=1).encode() + b"\n")


def end_leftovers(path: Path, say: Say) -> None:
    """End what an earlier supervisor of this data directory left running, in its order. Repeating is harmless.

    Only a process that is provably the recorded one is touched: same pid, start time and boot.
    """
    found = _read(path, say)
    for item in found if isinstance(found, list) else []:
        # A runner's live engines have sessions of their own, and are not this stack's to end.
        state = _end(item, grace_seconds=GRACE_SECONDS, spares_other_sessions=True)
        if state is not None:
            say(f"ended {item.get('name')} (pid {item['pid']}), left by an earlier start: {state}")
    path.unlink(missing_ok=True)


def end_engines(runner: Path, say: Say, *, grace_seconds: float = ENGINE_GRACE_SECONDS) -> None:
    """End every engine of a runner's data folder, after the runner has stopped: it leaves live ones serving.

    What the runner keeps of a live replica stays, so that it boots that one again at the next start without waiting
    for its own lease to run out.
    """
    found = [_read(path, say) for path in sorted((runner / "replicas").glob("*.json"))]
    items = [item for item in found if isinstance(item, dict)]
    if items:
        with ThreadPoolExecutor(min(_AT_ONCE, len(items))) as pool:
            states = list(pool.map(lambda item: _end(item, grace_seconds=grace_seconds), items))
        for item, state in zip(items, states, strict=True):
            if state is not None:
                say(f"engine (pid {item['pid']}): {state}")
    # What a runner that was killed never wrote down: each engine works in a folder of its own.
    left = [
        each for kind in ("replicas", "engines") for folder in (runner / kind).glob("*/") for each in strays(folder)
    ]
    for each in left:
        say(f"engine (pid {each.pid}): {ProcessLauncher().kill(each)}")


def end_all(processes: Iterable[Launched], *, grace_seconds: float) -> None:
    """End processes one after the other: SIGTERM, then SIGKILL."""
    launcher = ProcessLauncher()
    for each in processes:
        launcher.stop(each, grace_seconds=grace_seconds)


def _read(path: Path, say: Say) -> object:
    """Return what a file of ours holds; None when there is none, or it is damaged."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        say(f"{path} is damaged and was ignored")
        return None


def _end(item: object, *, grace_seconds: float, spares_other_sessions: bool = False) -> ProcessState | None:
    """End a recorded process. Returns None when it does not run any more, or is no such record."""
    if not isinstance(item, dict):
        return None
    pid, started, boot = item.get("pid"), item.get("start_time"), item.get("boot_id")
    if not isinstance(pid, int) or not isinstance(started, str) or not isinstance(boot, str):
        return None
    launcher = ProcessLauncher()
    found = launcher.adopt(pid, started, boot)
    if found is None or launcher.state(found).condition is not Condition.RUNNING:
        return None
    return launcher.stop(found, grace_seconds=grace_seconds, spares_other_sessions=spares_other_sessions)
