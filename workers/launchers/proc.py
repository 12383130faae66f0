"""What /proc tells of processes: who they are, whose they are, and on which ports they listen.

A process is known by pid, start time and boot id together: a pid alone may be given to another process. The
start time is in clock ticks since boot, as the kernel counts it, so that no clock change can alter it.
"""

import os
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from workers.launchers.base import Launched

PROC = Path("/proc")
MARK = "SLUICEGATE_ENGINE"
"""Variable by which the processes of an engine are known as ours."""
_MARK_FILE = ".mark"
_MARK_LENGTH = 32
_LISTEN = "0A"


@dataclass(frozen=True)
class Seen:
    """One process as the kernel shows it now. `start_time` in ticks since boot; a zombie has `is_dead`."""

    pid: int
    parent: int
    group: int
    session: int
    start_time: str
    is_dead: bool


def boot_id() -> str:
    """Return the identity of this boot of the machine."""
    return (PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def look(pid: int) -> Seen | None:
    """Return what the kernel shows of a process, or None when there is no such process."""
    try:
        text = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, parent, group, session, *rest = text[text.rindex(")") + 2 :].split()
    return Seen(pid, int(parent), int(group), int(session), rest[15], state in "ZX")


def start_time(pid: int) -> str | None:
    """Return the start time of a process in clock ticks since boot; None when it does not run."""
    seen = look(pid)
    return None if seen is None or seen.is_dead else seen.start_time


def is_stopped(pid: int) -> bool:
    """Tell whether a process stands still by a signal, or at a debugger's word."""
    try:
        text = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return text[text.rindex(")") + 2] in "Tt"


def processes() -> Iterator[Seen]:
    """Yield every process of this machine that can be seen, zombies too."""
    for entry in PROC.iterdir():
        if entry.name.isdigit() and (seen := look(int(entry.name))) is not None:
            yield seen


def tree(launched: Launched, *, with_descendants: bool = True) -> list[Seen]:
    """Return what an engine started and still runs: its group, its session and its descendants; not itself.

    One that has a session of its own is a descendant as long as everything between it and the engine lives, so this
    is asked before anything is ended. A pid that was given away leads to nothing; while its group or session has a
    member, the kernel gives it to nobody.
    """
    now = look(launched.pid)
    if launched.boot_id != boot_id() or (now is not None and now.start_time != launched.start_time):
        return []
    everything = [seen for seen in processes() if not seen.is_dead and int(seen.start_time) >= int(launched.start_time)]
    below = {launched.pid} if with_descendants else set()
    while with_descendants and (more := {seen.pid for seen in everything if seen.parent in below} - below):
        below |= more
    return [
        seen
        for seen in everything
        if seen.pid != launched.pid and (seen.pid in below or launched.pid in {seen.group, seen.session})
    ]


def mark(workdir: Path) -> str:
    """Return what everything that is started for a replica's folder has in its environment, made when it is missing.

    Nobody can guess it, and another runner that sees the same folder name in a place of its own has another one.
    """
    if (there := _mark(workdir)) is not None:
        return there
    made = secrets.token_hex(16)
    # Whole or not at all: with a mark cut short, what was marked before would be somebody else's for ever.
    beside = workdir / f"{_MARK_FILE}.{made[:8]}"
    with beside.open("x", encoding="ascii") as file:
        file.write(made)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(workdir / _MARK_FILE)
    return made


def _mark(workdir: Path) -> str | None:
    """Return the mark of a folder; None when it has none, or one that was not written whole."""
    try:
        text = (workdir / _MARK_FILE).read_text(encoding="ascii")
    except FileNotFoundError:
        return None
    return text if len(text) == _MARK_LENGTH else None


def strays(workdir: Path) -> list[Launched]:
    """Find running processes of an engine by its folder: what a lost worker left, or what left its group.

    A process is known by the mark that it was started with, wherever it went and whatever session it has. Where a
    folder has none, it is known by having the folder as its HOME, as every engine has. Who merely works in the folder,
    as a person who reads a log there, is nobody of ours.
    """
    there = _mark(workdir)
    if there is None:
        marks = {f"HOME={folder}".encode() for folder in (workdir.resolve(), workdir.absolute())}
    else:
        marks = {f"{MARK}={there}".encode()}
    found = []
    for seen in processes():
        try:
            is_ours = not marks.isdisjoint((PROC / str(seen.pid) / "environ").read_bytes().split(b"\0"))
        except OSError:
            continue
        if is_ours and not seen.is_dead and seen.pid != os.getpid():
            found.append(Launched(seen.pid, seen.start_time, boot_id()))
    return found


def working_in(folder: Path, program: str) -> list[Launched]:
    """Find running processes of a program, by the name of its file, whose working directory is a folder."""
    place = folder.resolve()
    found = []
    for seen in processes():
        here = PROC / str(seen.pid)
        try:
            is_it = (here / "cwd").readlink() == place and (here / "exe").readlink().name.split(" ")[0] == program
        except OSError:
            continue
        if is_it and not seen.is_dead:
            found.append(Launched(seen.pid, seen.start_time, boot_id()))
    return found


def arguments(pid: int) -> list[str]:
    """Return the command line of a process; empty when it does not run."""
    try:
        text = (PROC / str(pid) / "cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [word.decode("utf-8", errors="replace") for word in text.split(b"\0")[:-1]]


def listens(port: int, pids: Iterable[int]) -> bool:
    """Tell whether one of these processes has a TCP socket that listens on a port: not merely anybody."""
    sockets = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    return bool(sockets) and any(not sockets.isdisjoint(_descriptors(pid)) for pid in pids)


def _listening_inodes(port: int) -> Iterator[str]:
    for table in ("tcp", "tcp6"):
        try:
            lines = (PROC / "net" / table).read_text(encoding="ascii").splitlines()[1:]
        except FileNotFoundError:  # a machine without IPv6
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                yield fields[9]


def _descriptors(pid: int) -> set[str]:
    found = set()
    try:
        entries = list((PROC / str(pid) / "fd").iterdir())
    except OSError:
        return set()
    for entry in entries:
        try:
            found.add(str(entry.readlink()))
        except OSError:
            continue
    return found
