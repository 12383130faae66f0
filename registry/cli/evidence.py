"""`sluicegate evidence`: read the log, have it verified."""

import itertools
from typing import Annotated

import typer

from registry.cli.documents import resolve_release
from registry.cli.failures import Exit, Usage
from registry.cli.follow import line
from registry.cli.options import Json, Limit, examples, group
from registry.cli.output import Output
from registry.cli.profile import connect
from registry.client import Client
from schemas.evidence import Agreement, Kind, Recomputation, Verification

app = group("Evidence: signed, hash-chained entries of what happened.")

Stream = Annotated[str | None, typer.Option("--stream", help="Only this stream, as `evidence list` shows it.")]
OfRelease = Annotated[str | None, typer.Option("--release", help="Only of this release.")]


def _stream(client: Client, stream: str | None, release: str | None) -> str | None:
    if stream is not None and release is not None:
        raise Usage("name a stream or a release, not both")
    return stream if release is None else f"release/{resolve_release(release, client)}"


@app.command(
    "list",
    epilog=examples(
        "sluicegate evidence list --release 01a2289b-8894",
        "sluicegate evidence list --release 01a2289b-8894 --after 1200 --envelopes --json > evidence.json",
    ),
)
def list_(
    stream: Stream = None,
    release: OfRelease = None,
    after: Annotated[
        int | None,
        typer.Option("--after", min=0, help="Of one stream or release: only entries with a higher sequence."),
    ] = None,
    envelopes: Annotated[bool, typer.Option("--envelopes", help="With the signed envelopes, for --json.")] = False,
    limit: Limit = 200,
    as_json: Json = False,
) -> int:
    """List entries, oldest first."""
    output = Output(as_json=as_json)
    with connect() as client:
        asked = _stream(client, stream, release)
        if after is not None and asked is None:
            raise Usage("--after needs --stream or --release: sequences of several streams are not committed in order")
        entries = client.evidence.list(stream=asked, after=after, envelopes=envelopes)
        found = list(itertools.islice(entries, limit))

    def human(out: Output) -> None:
        for entry in found:
            text, tone = line(entry)
            out.say(
                f"{entry.sequence:>6}  {entry.recorded_at:%Y-%m-%d} {text}  [{entry.stream} {entry.position}]", tone
            )
        if not found:
            out.say("none")

    output.result({"items": found}, human)
    return Exit.DONE


@app.command(
    epilog=examples(
        "sluicegate evidence follow --target chat@prod",
        "sluicegate evidence follow --kind promoted --kind traffic_restored --timeout 3600",
        "sluicegate evidence follow --after $CURSOR --timeout 0.5 --json",
    )
)
def follow(
    stream: Stream = None,
    release: OfRelease = None,
    target: Annotated[str | None, typer.Option("--target", "-t", help="Only of this target and its releases.")] = None,
    kind: Annotated[list[Kind] | None, typer.Option("--kind", help="Only of this kind; repeatable.")] = None,
    after: Annotated[str | None, typer.Option("--after", help="Go on after this cursor, which --json gives.")] = None,
    timeout: Annotated[float | None, typer.Option("--timeout", min=0, help="End after so many seconds.")] = None,
    as_json: Json = False,
) -> int:
    """Print the log, then each new entry as it happens, until --timeout or Ctrl-C. Survives restarts of the service.

    With --json it prints one object at the end: `items`, and the `cursor` to go on from. It needs --timeout then.
    """
    output = Output(as_json=as_json)
    if as_json and timeout is None:
        raise Usage("--json prints one object at the end: say with --timeout when that is")
    found, cursor = [], after
    with connect() as client:
        for event in client.events(
            after=after,
            stream=_stream(client, stream, release),
            target=target,
            kinds=kind or (),
            seconds=timeout,
            on_away=lambda problem: output.note(f"{problem.detail}; waiting for it", "warn"),
        ):
            cursor = event.cursor
            if as_json:
                found.append(event.entry)
            else:
                text, tone = line(event.entry)
                output.say(f"{event.entry.recorded_at:%Y-%m-%d} {text}  [{event.entry.stream}]", tone)
    output.result({"items": found, "cursor": cursor}, lambda _: None)
    return Exit.DONE


@app.command(
    epilog=examples(
        "sluicegate evidence verify",
        "sluicegate evidence verify --release 01a2289b-8894 --json",
        "sluicegate evidence verify --release 01a2289b-8894 --recompute",
    )
)
def verify(
    stream: Stream = None,
    release: OfRelease = None,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Also compute each gate's verdict again from its raw records.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Have chains, signatures and phases recomputed from what is stored.

    Exit status: 0 everything is as it was signed; 1 it is not, or there was nothing to verify; 3 with --recompute, a
    verdict cannot be computed again, since its records are gone or another version of the gate made them.
    """
    output = Output(as_json=as_json)
    results: list[Recomputation] = []
    with connect() as client:
        asked = _stream(client, stream, release)
        found = client.evidence.verify(stream=asked)
        if recompute:
            for entry in client.evidence.list(stream=asked):
                if entry.kind is Kind.GATE_RECORDED:
                    output.note(f"recomputing {entry.body['gate']} of {entry.stream}")
                    results.append(client.evidence.recompute(entry.entry_digest))
    told = found.model_dump(mode="json") | ({"recomputations": results} if recompute else {})
    output.result(told, lambda out: _show(out, found, results))
    if not found.verified or any(one.outcome is Agreement.DIFFERENT for one in results):
        return Exit.FAILED
    return Exit.UNDECIDED if any(one.outcome is Agreement.IMPOSSIBLE for one in results) else Exit.DONE


def _show(out: Output, found: Verification, results: list[Recomputation]) -> None:
    read = f"{found.entries} entries in {found.streams} streams"
    if found.verified:
        out.say(f"verified: {read}", "good")
    else:
        out.say(f"not verified: {read}, {len(found.faults)} faults", "bad")
        out.table(["STREAM", "POSITION", "WHAT IS WRONG"], ([f.stream, f.position, f.problem] for f in found.faults))
    for one in results:
        tone = {Agreement.SAME: "good", Agreement.IMPOSSIBLE: "warn"}.get(one.outcome, "bad")
        why = "".join(f"; {fault}" for fault in one.faults)
        verdict = one.recomputed or one.recorded or "no verdict"
        out.say(f"{one.gate or 'a gate'} of {one.stream} {one.position}: {one.outcome}, {verdict}{why}", tone)
