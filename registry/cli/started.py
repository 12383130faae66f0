"""Runs what `sluicegate up` and `sluicegate demo` become: `python -m registry.cli.started MODULE ARGUMENTS`.

What it loads takes a moment, and until then nobody else heeds Ctrl-C.
"""

import runpy
import signal
import sys


def main() -> None:
    """Run a module as if it had been called alone."""
    module = sys.argv.pop(1)
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        raise SystemExit(128 + signal.SIGINT) from None


if __name__ == "__main__":
    main()
