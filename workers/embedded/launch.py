"""Turns itself into another program, after what only the new process can do to itself.

`python -I -S launch.py PARENT SIGNAL ACCOUNT PROGRAM ARGUMENT…`, standard library only. The program

- gets SIGNAL when the process PARENT dies, so that a supervisor killed with SIGKILL leaves nothing behind;
- runs under ACCOUNT (`-` changes nothing), because PostgreSQL refuses to run as root. It may still search the
  folders above its own, which may be root's alone: opening those to everybody would be the other way.
"""

import ctypes
import os
import pwd
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1
PR_SET_KEEPCAPS = 8
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_RAISE = 2
CAP_DAC_OVERRIDE = 1
CAP_DAC_READ_SEARCH = 2
CAPABILITY_VERSION = 0x20080522


class _Header(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


class _Data(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint32) for name in ("effective", "permitted", "inheritable")]


def become(account: str, libc: ctypes.CDLL) -> None:
    """Change to an account for good, keeping the right to search folders where the system lets it be kept."""
    entry = pwd.getpwnam(account)
    libc.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0)
    os.setgroups([])
    os.setresgid(entry.pw_gid, entry.pw_gid, entry.pw_gid)
    os.setresuid(entry.pw_uid, entry.pw_uid, entry.pw_uid)
    # A container may have dropped the narrow capability and kept the wide one, or have neither.
    for capability in (CAP_DAC_READ_SEARCH, CAP_DAC_OVERRIDE):
        header = _Header(CAPABILITY_VERSION, 0)
        sets = (_Data * 2)(_Data(*[1 << capability] * 3), _Data(0, 0, 0))
        if libc.capset(ctypes.byref(header), sets) == 0:
            libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, capability, 0, 0)
            return


def command(argv: Sequence[str], *, death_signal: int, account: str | None = None) -> list[str]:
    """Return the command line that becomes `argv`, as a child of the calling process and thread."""
    return [
        *(sys.executable, "-I", "-S", __file__, str(os.getpid()), str(int(death_signal)), account or "-"),
        *argv,
    ]


def main(arguments: list[str]) -> None:
    """Become the program; never returns."""
    parent, number, account, *program = arguments
    libc = ctypes.CDLL(None)
    if account != "-":
        become(account, libc)
    # After the change of account, which clears it.
    libc.prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != int(parent):  # it died before the line above
        sys.exit(1)
    try:
        os.execv(program[0], program)  # noqa: S606 - no shell is the point
    except OSError as error:
        sys.exit(f"{program[0]} cannot be started: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv[1:])
