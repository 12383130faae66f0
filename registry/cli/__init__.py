"""The command line: `sluicegate`. It speaks to a service over HTTP and knows nothing of its inside.

Exit status: 0 done or passed; 1 the candidate failed, was rejected or rolled back; 2 usage or invalid document;
3 undecided (inconclusive, errored, time-out); 4 not reachable or not allowed.
"""

import signal
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. Never raises, never shows a traceback."""
    try:
        # Here, since loading it takes most of a plain command's time: Ctrl-C meanwhile is no defect.
        from registry.cli.program import main as run

        return run(argv)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 128 + signal.SIGINT
