"""What the command line says of boots."""

from collections.abc import Sequence

from registry.cli.output import Output
from schemas.boots import Boot
from schemas.runner import Agreement

MOST = 10
"""Boots that are printed; `--json` has them all."""


def show_boots(out: Output, boots: Sequence[Boot]) -> None:
    """Print what the newest boots of a bundle took, cold and warm told apart, and how they agree with it."""
    if not boots:
        return
    out.say("")
    out.table(
        [
            "BOOT",
            "CACHES",
            "IN MEMORY",
            "STAGE",
            "LOAD",
            "COMPILE",
            "WARM",
            "READY",
            "GATES",
            "IDENTITY",
            "RUNNER",
            "AT",
        ],
        (
            [
                one.kind,
                "" if one.is_cold is None else "cold" if one.is_cold else "warm",
                "" if one.page_cache_percent is None else f"{one.page_cache_percent} %",
                "there" if one.was_staged else _took(one.stage_ms),
                _took(one.loading_ms),
                _took(one.compile_ms),
                _took(one.warming_ms),
                _took(one.ready_ms),
                _took(one.gates_ms),
                one.agreement,
                one.runner,
                f"{one.booted_at:%Y-%m-%d %H:%M:%S}Z",
            ]
            for one in boots[:MOST]
        ),
        spare=("AT", "RUNNER", "IN MEMORY"),
    )
    newest = boots[0]
    silent = [one.item for one in newest.compared or () if one.outcome is Agreement.NOT_REPORTED]
    if silent:
        out.say(f"the newest does not say of itself: {', '.join(silent)}")
    for one in newest.findings:
        out.say(f"{one.severity} {one.code}: {one.message}")


def _took(duration_ms: int | None) -> str:
    return "" if duration_ms is None else f"{duration_ms / 1000:.2f} s"
