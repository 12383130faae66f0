"""The command line: `sluicegate`. It speaks to a service over HTTP and knows nothing of its inside.

Exit status: 0 done or passed; 1 the candidate failed, was rejected or rolled back; 2 usage or invalid document;
3 undecided (inconclusive, errored, time-out); 4 not reachable or not allowed.
"""

from registry.cli.program import main

__all__ = ["main"]
