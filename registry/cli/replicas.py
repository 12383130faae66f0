"""What the command line says of engine instances."""

from collections.abc import Sequence

from registry.cli.output import Output
from schemas.failures import FAILURES, Cause


def failed_replica(out: Output, state: str, failure: str | None, why: str, log_tail: Sequence[str] | None) -> None:
    """Print why a replica failed, what that means, what to do, and the last lines of its log."""
    known = FAILURES[Cause(failure)] if failure in set(Cause) else None
    out.say("")
    out.say(f"replica {state}: {why}", "bad")
    if known is not None:
        out.fields([("  means", known.meaning), ("  advice", known.advice)])
    for line in log_tail or ():
        out.say(f"  | {line}")
