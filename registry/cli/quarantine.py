"""`sluicegate bundle quarantine` and `lift`: let nothing go on with a bundle, until a person answers for it."""

from typing import Annotated

import typer
from pydantic import ValidationError

from registry.cli.documents import read_bundle, resolve
from registry.cli.failures import Exit, invalid_act
from registry.cli.options import BundleName, Json, Reason, examples
from registry.cli.output import Output
from registry.cli.profile import connect
from schemas.api import Quarantine

QUARANTINE_EXAMPLES = examples('sluicegate bundle quarantine 3c3aff2a --reason "its publisher withdrew it"')
LIFT_EXAMPLES = examples(
    'sluicegate bundle lift 3c3aff2a --reason "a disk of runner gpu-7 was bad; replaced, the store is sound"',
    'sluicegate bundle lift 3c3aff2a --reason "read the report" --if-match quarantined:4',
)


def quarantine(bundle: BundleName, reason: Reason, as_json: Json = False) -> int:
    """Let nothing go on with a bundle until a manager lifts this.

    No release or run begins with it, and none is approved. A release without traffic is rejected, one in canary or
    in its soak is taken back. What is live and over serves on: `target show` says so, and people decide.
    """
    output = Output(as_json=as_json)
    with connect() as client:
        try:
            state = client.bundles.quarantine(resolve(bundle, client.bundles, read_bundle, "bundle"), reason)
        except ValidationError as error:
            raise invalid_act(error) from None

    def human(out: Output) -> None:
        out.say(f"quarantined: {state.name} {state.digest}", "warn")
        show_quarantine(out, state.quarantine)

    output.result(state, human)
    return Exit.DONE


def lift(
    bundle: BundleName,
    reason: Reason,
    if_match: Annotated[
        str | None,
        typer.Option("--if-match", help="Version that `bundle show` gave: nothing is done when it has changed since."),
    ] = None,
    as_json: Json = False,
) -> int:
    """Let a quarantined bundle be used again, whatever it is quarantined for. Its releases begin anew."""
    output = Output(as_json=as_json)
    with connect() as client:
        digest = resolve(bundle, client.bundles, read_bundle, "bundle")
        was_quarantined = client.bundles.get(digest).quarantine is not None
        try:
            state = client.bundles.lift(digest, reason, if_match=if_match)
        except ValidationError as error:
            raise invalid_act(error) from None
    said = "lifted" if was_quarantined else "nothing has changed: it was lifted already"
    output.result(state, lambda out: out.say(f"{said}: {state.name} {state.digest}", "good"))
    return Exit.DONE


def show_quarantine(out: Output, found: Quarantine | None) -> None:
    """Print what a bundle is quarantined for, if it is."""
    if found is None:
        return
    out.say(f"QUARANTINED since {found.since:%Y-%m-%d %H:%M:%S}Z ({found.version})", "bad")
    out.table(
        ["CAUSE", "BY", "AT", "WHY", "ENTRY"],
        (
            [one.cause.replace("_", " "), one.by, f"{one.at:%Y-%m-%d %H:%M:%S}Z", one.reason, one.entry[7:19]]
            for one in found.grounds
        ),
    )
