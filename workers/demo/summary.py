"""The summary that ends the demonstration."""

from collections.abc import Sequence
from typing import Final

from workers.demo.report import Outcome
from workers.demo.screen import Screen

_TONES: Final = {"promoted": "good", "superseded": "good", "rejected": "bad", "rolled_back": "bad"}


def summarise(screen: Screen, outcome: Outcome, different: Sequence[str]) -> None:
    """Say what became of each release and why, how fast traffic went back, and what the evidence says."""
    screen.space()
    screen.table(
        ["RELEASE", "BUNDLE", "PHASE", "REASON"],
        ([one.bundle_name, one.bundle[7:19], str(one.phase), one.reason or ""] for one in outcome.releases),
    )
    screen.space()
    rollback, streams = outcome.rollback, outcome.streams
    names = {one.bundle: one.bundle_name for one in outcome.releases}
    pairs = [
        ("breach to first weight change", _seconds(rollback.to_first_change_seconds)),
        ("breach to observed restore", _seconds(rollback.to_restored_seconds)),
        ("streams", f"{streams.sent} sent, {len(streams.broken)} broken"),
        ("evidence", f"{outcome.entries} entries, {'verified' if outcome.verified else 'NOT verified'}"),
        ("engine", outcome.engine),
        ("model", f"sha256:{outcome.model_sha256}"),
    ]
    for served in outcome.served:
        split = " + ".join(f"{arm.weight_bp / 100:g} % {names.get(arm.bundle, arm.bundle)}" for arm in served.split)
        pairs.append((f"served at {served.at:%H:%M:%S.%f}Z", split or "nothing"))
    pairs += [(f"time of: {title}", f"{seconds:.1f} s") for title, seconds in screen.chapters]
    pairs.append(("time in all", f"{screen.seconds:.1f} s"))
    screen.fields(pairs)
    screen.space()
    if not different:
        screen.text("Everything came out as it should.", "good")
    for sentence in different:
        screen.text(f"NOT as it should be: {sentence}", "bad")


def _seconds(value: float | None) -> str:
    return "not seen" if value is None else f"{value:.2f} s"
