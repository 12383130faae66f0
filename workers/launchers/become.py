"""Turns itself into an engine, under limits that only the new process can set for itself without a race.

`python -I -S become.py LIMITS DESCRIPTOR PROGRAM ARGUMENT…`, standard library only. LIMITS is JSON: `limits` by the
names of setrlimit(2), `nice`, and `oom`, the kernel's preference for ending this one when memory runs out. Why the
program could not be started is written to DESCRIPTOR, which closes when it could. No core is ever written, nor handed
to a program: it would hold weights and requests.
"""

import json
import os
import resource
import sys

NO_CORE = 1
"""Limit in bytes at which the kernel writes no core, and hands none to a program either, which it does at any other.

Source: coredump_pipe in the kernel's fs/coredump.c, and core(5) on `core_pattern` with a pipe.
"""


def main(arguments: list[str]) -> None:
    """Become the program; never returns."""
    told, descriptor, *program = arguments
    errors = int(descriptor)
    os.set_inheritable(errors, False)  # noqa: FBT003 - it takes no name
    try:
        orders = json.loads(told)
        for name, most in {"CORE": NO_CORE, **orders["limits"]}.items():
            number = getattr(resource, f"RLIMIT_{name}")
            hard = resource.getrlimit(number)[1]
            allowed = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(number, (allowed, allowed))
        if orders["nice"]:
            os.nice(orders["nice"])
        with open("/proc/self/oom_score_adj", "r+", encoding="ascii") as file:  # noqa: PTH123 - no pathlib: it is slow
            # Whoever set the runner's own higher lets nobody lower it.
            if int(file.read()) < orders["oom"]:
                file.seek(0)
                file.write(str(orders["oom"]))
        os.execvp(program[0], program)  # noqa: S606 - no shell is the point
    except (OSError, ValueError) as error:
        os.write(errors, str(getattr(error, "strerror", None) or error).encode())
        sys.exit(127)


if __name__ == "__main__":
    main(sys.argv[1:])
