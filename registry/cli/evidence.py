"""`sluicegate evidence`: read the log, follow it, verify it here or there, seal it, take it away, revoke a result."""

import re
import time
from pathlib import Path
from typing import Annotated

import typer

from gates import archive
from gates.archive import ARCHIVE
from registry.cli.documents import resolve_release
from registry.cli.failures import Exit
from registry.cli.files import open_regular
from registry.cli.follow import add_names, line
from registry.cli.options import LONGEST_WAIT_SECONDS, Json, Limit, Reason, examples, finite, group
from registry.cli.output import Output, size
from registry.cli.profile import connect, folder
from registry.cli.seen import Seen
from registry.client import Client
from schemas.api import PublicKey
from schemas.checkpoint import Checkpoint
from schemas.common import DIGEST_PATTERN, MAX_DOCUMENT_BYTES, MAX_INTEGER
from schemas.evidence import Agreement, Entry, Kind, Recomputation, Verification
from schemas.problems import Usage
from schemas.short import many
from schemas.stories import served_in

app = group("Evidence: signed, hash-chained entries of what happened.")

Stream = Annotated[str | None, typer.Option("--stream", help="Only this stream, as `evidence list` shows it.")]
OfRelease = Annotated[str | None, typer.Option("--release", help="Only of this release.")]
OfTarget = Annotated[str | None, typer.Option("--target", "-t", help="Only of this target and its releases.")]
OfKind = Annotated[list[Kind] | None, typer.Option("--kind", help="Only of this kind, such as promoted; repeatable.")]
ResultEntry = Annotated[str | None, typer.Argument(metavar="ENTRY", help="Whole digest of a gate result's entry.")]
ResultRelease = Annotated[str | None, typer.Option("--release", help="Or the release whose result it is, and")]
ResultGate = Annotated[str | None, typer.Option("--gate", "-g", help="the gate, whose latest result it is.")]
"""How a command names one gate result: by its entry, or by a release and a gate; see `_named`."""


TOLD_SECONDS = 2.0
"""How often is said how many blobs have been read."""
MOST_FAULTS = 20
"""Rows of what is wrong; in a damaged log one cause has very many consequences."""
_LONG = re.compile(r"[0-9a-f]{64}")


def _stream(client: Client, stream: str | None, release: str | None) -> str | None:
    if stream is not None and release is not None:
        raise Usage("name a stream or a release, not both")
    return stream if release is None else f"release/{resolve_release(release, client)}"


@app.command(
    "list",
    epilog=examples(
        "sluicegate evidence list --release 01a2289b-8894",
        "sluicegate evidence list --newest-first --limit 20",
        "sluicegate evidence list --target chat@prod --kind promoted --kind traffic_restored --json",
        "sluicegate evidence list --release 01a2289b-8894 --after 1200 --envelopes --json > evidence.json",
    ),
)
def list_(
    stream: Stream = None,
    release: OfRelease = None,
    target: OfTarget = None,
    kind: OfKind = None,
    after: Annotated[
        int | None,
        typer.Option(
            "--after", min=0, max=MAX_INTEGER, help="Of one stream or release: only entries with a higher sequence."
        ),
    ] = None,
    newest_first: Annotated[bool, typer.Option("--newest-first", help="Begin with the newest entry.")] = False,
    envelopes: Annotated[bool, typer.Option("--envelopes", help="With the signed envelopes, for --json.")] = False,
    limit: Limit = 200,
    as_json: Json = False,
) -> int:
    """List entries, oldest first, or with --newest-first the other way round."""
    output = Output(as_json=as_json)
    with connect() as client:
        asked = _stream(client, stream, release)
        if after is not None and asked is None:
            raise Usage("--after needs --stream or --release: sequences of several streams are not committed in order")
        if after is not None and newest_first:
            raise Usage("--after goes on from a sequence to newer entries: leave out --newest-first")
        if asked is not None and target is not None:
            raise Usage("name a stream, a release or a target, not more than one")
        entries = client.evidence.list(
            stream=asked,
            target=target,
            kinds=kind or (),
            after=after,
            envelopes=envelopes,
            newest_first=newest_first,
        )
        found = output.most(entries, limit)
        names = dict[str, str]()
        add_names(client, names, () if as_json else served_in(found))

    def human(out: Output) -> None:
        for entry in found:
            text, tone = line(entry, names)
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
    target: OfTarget = None,
    kind: OfKind = None,
    after: Annotated[str | None, typer.Option("--after", help="Go on after this cursor, which --json gives.")] = None,
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", min=0, max=LONGEST_WAIT_SECONDS, callback=finite, help="End after so many seconds."),
    ] = None,
    as_json: Json = False,
) -> int:
    """Print the log, then each new entry as it happens, until --timeout or Ctrl-C. Survives restarts of the service.

    With --json it prints one object at the end: `items`, and the `cursor` to go on from. It needs --timeout then.
    Ctrl-C says that cursor too.
    """
    output = Output(as_json=as_json)
    if as_json and timeout is None:
        raise Usage("--json prints one object at the end: say with --timeout when that is")
    found, cursor, names = list[Entry](), after, dict[str, str]()

    def end() -> None:
        output.result({"items": found, "cursor": cursor}, lambda _: None)

    try:
        with connect() as client:
            for event in client.events(
                after=after,
                stream=_stream(client, stream, release),
                target=target,
                kinds=kind or (),
                seconds=timeout,
                on_away=lambda problem: output.note(f"{problem.detail}; waiting for it", "warn"),
            ):
                if as_json:
                    found.append(event.entry)
                else:
                    add_names(client, names, served_in([event.entry]))
                    text, tone = line(event.entry, names)
                    output.say(f"{event.entry.recorded_at:%Y-%m-%d} {text}  [{event.entry.stream}]", tone)
                cursor = event.cursor
    except KeyboardInterrupt:
        end()
        if cursor is not None:
            output.note(f"go on from here: sluicegate evidence follow --after {cursor}", "warn")
        raise
    end()
    return Exit.DONE


@app.command(
    epilog=examples(
        "sluicegate evidence verify",
        "sluicegate evidence verify --release 01a2289b-8894 --recompute",
        "sluicegate evidence verify --blobs",
        "sluicegate evidence verify --archive evidence.jsonl --key trusted.pem",
    )
)
def verify(
    stream: Stream = None,
    release: OfRelease = None,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Also compute each gate's verdict again from its raw records.")
    ] = False,
    blobs: Annotated[
        bool,
        typer.Option(
            "--blobs", help="Also have every blob read again that entries name: files of bundles, raw records."
        ),
    ] = False,
    archived: Annotated[
        Path | None, typer.Option("--archive", help="Verify this file instead, here and without any service.")
    ] = None,
    key: Annotated[
        Path | None,
        typer.Option("--key", help="Public keys (PEM) that you trust; with --archive. Else it vouches for its own."),
    ] = None,
    kept: Annotated[
        str | None, typer.Option("--checkpoint", help="Digest of a checkpoint that you kept: it must be there.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Recompute chains, signatures, checkpoints and phases: the service's own, or of an archive.

    The newest checkpoint that these commands have seen of the project must still be there; they remember it.

    With --blobs the service reads them one after the other, and no more at a time than leaves time for others; what is
    damaged is quarantined, as `blob check` does it.

    Exit status: 0 everything is as it was signed; 1 it is not, or there was nothing to verify; 3 with --recompute, a
    verdict cannot be computed again, since its records are gone or another version of the gate made them.
    """
    output = Output(as_json=as_json)
    kept = None if kept is None else _digest(kept)
    if archived is not None:
        if stream is not None or release is not None or recompute or blobs:
            which = "leave out --stream, --release, --recompute, --blobs"
            raise Usage(f"an archive is verified whole, and has no records: {which}")
        return _tell_archive(output, archived, key, kept)
    if key is not None:
        raise Usage("--key is for --archive")
    results: list[Recomputation] = []
    with connect() as client:
        asked = _stream(client, stream, release)
        seen, whose = Seen(folder("config"), output), client.me().project
        known = seen.digest(client.url, whose)
        if kept is None and known is not None:
            kept = known
            output.note(f"held against checkpoint {kept[7:19]}, which was seen from here before ({seen.path})")
        found = client.evidence.verify(stream=asked, checkpoint=kept)
        if found.verified and (last := _last(client, found.checkpoints)) is not None:
            seen.keep(client.url, whose, digest=last.digest, number=last.number)
        if blobs:
            found = _read_again(client, output, asked, found)
        if recompute:
            for entry in client.evidence.list(stream=asked):
                if entry.kind is Kind.GATE_RECORDED:
                    output.note(f"recomputing {entry.body['gate']} of {entry.stream}")
                    results.append(client.evidence.recompute(entry.entry_digest))
    told = found.model_dump(mode="json") | ({"recomputations": results} if recompute else {})
    output.result(told, lambda out: _show(out, found, results))
    if not found.verified or any(one.outcome is Agreement.DIFFERENT for one in results):
        return Exit.FAILED
    return Exit.DONE if all(one.outcome is Agreement.SAME for one in results) else Exit.UNDECIDED


def _read_again(client: Client, output: Output, stream: str | None, found: Verification) -> Verification:
    """Have what entries name read again, and add what is wrong with it to what was found."""
    told, reading = time.monotonic(), None
    for reading in client.read_again(stream=stream):
        if time.monotonic() - told >= TOLD_SECONDS:
            told = time.monotonic()
            output.note(f"read {reading.read} of {many(reading.blobs, 'blob')}")
    faults = [] if reading is None else reading.faults
    output.note(f"read {many(0 if reading is None else reading.read, 'blob')}: {len(faults) or 'nothing'} wrong")
    return found.model_copy(update={"verified": found.verified and not faults, "faults": [*found.faults, *faults]})


def _last(client: Client, number: int) -> Checkpoint | None:
    """Return the last of so many checkpoints."""
    return next(iter(client.evidence.checkpoints(after=number - 1)), None) if number else None


def _tell_archive(output: Output, path: Path, key: Path | None, kept: str | None) -> int:
    found = _verify_archive(path, key, kept)
    output.result(found, lambda out: _show(out, found, []))
    if key is None and found.verified:
        output.note("by keys that the archive brings itself; trust yours with --key", "warn")
    return Exit.DONE if found.verified else Exit.FAILED


def _digest(named: str) -> str:
    whole = named if named.startswith("sha256:") else f"sha256:{named}"
    if not re.fullmatch(DIGEST_PATTERN, whole):
        raise Usage(f"{named} is no whole digest; `evidence list --json` shows an entry's as entry_digest")
    return whole


def _verify_archive(path: Path, key: Path | None, kept: str | None) -> Verification:
    pinned = None
    try:
        if key is not None:
            with open_regular(key) as file:
                pinned = archive.public_keys(file.read(MAX_DOCUMENT_BYTES).decode()).keys()
        with open_regular(path) as file:
            if not file.read(len(archive.BEGINNING)) == archive.BEGINNING:
                raise Usage(f"{path} is no archive of evidence: `sluicegate evidence export FILE` writes one")
            file.seek(0)
            return archive.verify(file, pinned=pinned, must_have=kept)
    except OSError as error:
        raise Usage(f"{error.filename} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise Usage(f"{key} cannot be used: {error}") from None


def _short(stream: str) -> str:
    """Return a stream's name with its digests cut."""
    return "/".join(_LONG.sub(lambda found: f"{found[0][:12]}…", part) for part in stream.split("/"))


def _show(out: Output, found: Verification, results: list[Recomputation]) -> None:
    read = f"{many(found.entries, 'entry')} in {many(found.streams, 'stream')}"
    if found.checkpoints:
        read += f", {found.sealed} of them under {many(found.checkpoints, 'checkpoint')}"
    if found.erased:
        read += f"; {many(found.erased, 'record')} erased on purpose"
    if found.verified:
        out.say(f"verified: {read}", "good")
    else:
        out.say(f"not verified: {read}, {many(len(found.faults), 'fault')}", "bad")
        # What is wrong with the file itself is why streams lack entries.
        faults = sorted(found.faults, key=lambda fault: fault.stream != ARCHIVE)
        rows = ([_short(fault.stream), fault.position, fault.problem] for fault in faults[:MOST_FAULTS])
        out.table(["STREAM", "POSITION", "WHAT IS WRONG"], rows)
        if len(faults) > MOST_FAULTS:
            out.say(f"and {many(len(faults) - MOST_FAULTS, 'fault')} more; --json has them all, with whole names")
    for one in results:
        tone = {Agreement.SAME: "good", Agreement.IMPOSSIBLE: "warn", Agreement.ERASED: "warn"}.get(one.outcome, "bad")
        why = "".join(f"; {fault}" for fault in one.faults)
        verdict = one.recomputed or one.recorded or "no verdict"
        out.say(f"{one.gate or 'a gate'} of {one.stream} {one.position}: {one.outcome}, {verdict}{why}", tone)


@app.command(epilog=examples("sluicegate evidence checkpoint", "sluicegate evidence checkpoint --json"))
def checkpoint(as_json: Json = False) -> int:
    """Seal everything recorded until now with a signed checkpoint, and say its digest.

    Keep the digest where the service cannot write: whatever it covers can then not be cut off unseen.
    """
    output = Output(as_json=as_json)
    with connect() as client:
        made = client.evidence.checkpoint()
        Seen(folder("config"), output).keep(client.url, client.me().project, digest=made.digest, number=made.number)
    held = f"{many(made.entries, 'entry')} in {many(made.streams, 'stream')}"
    text = f"checkpoint {made.number}: {held}, {made.digest}"
    output.result(made, lambda out: out.say(text, "good"))
    return Exit.DONE


@app.command(epilog=examples("sluicegate evidence export evidence.jsonl"))
def export(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where the archive goes; it must not exist.")],
    as_json: Json = False,
) -> int:
    """Seal the log and write it to a file: entries, checkpoints, public keys and the documents that entries name.

    `evidence verify --archive FILE` checks it anywhere, without the service.
    """
    output = Output(as_json=as_json)
    part = file.with_name(f".{file.name}.part")
    if file.exists():
        raise Usage(f"{file} is there already: name another file, or move that one away")
    try:
        with connect() as client, part.open("wb") as written:
            made = client.evidence.export(written)
            whose, url = client.me().project, client.url
        part.replace(file)
    except OSError as error:
        raise Usage(f"{file} cannot be written: {error.strerror}") from None
    except KeyboardInterrupt:
        output.note(f"{file} was not written", "warn")
        raise
    finally:
        part.unlink(missing_ok=True)
    Seen(folder("config"), output).keep(url, whose, digest=made.checkpoint, number=made.checkpoints)
    counts = ((made.entries, "entry"), (made.documents, "document"), (made.checkpoints, "checkpoint"))
    read = ", ".join([*(many(*one) for one in counts), size(made.size)])
    output.result(made, lambda out: out.say(f"{file}: {read}; last checkpoint {made.checkpoint}", "good"))
    return Exit.DONE


@app.command(
    epilog=examples(
        "sluicegate evidence keys",
        "sluicegate evidence keys --pem trusted.pem",
        "sluicegate evidence keys --json",
    )
)
def keys(
    pem: Annotated[
        Path | None,
        typer.Option("--pem", help="Write them all to this file, which must not exist, for `verify --key`."),
    ] = None,
    as_json: Json = False,
) -> int:
    """List the public keys that sign evidence or did, the oldest first.

    Keep the file where the service cannot write: an archive that is signed anew with other keys is then found out.
    """
    output = Output(as_json=as_json)
    with connect() as client:
        found = client.evidence.public_keys()
    if pem is not None:
        try:
            with pem.open("x", encoding="ascii") as file:
                file.writelines(f"{one.public_key_pem.strip()}\n" for one in found)
        except OSError as error:
            raise Usage(f"{pem} cannot be written: {(error.strerror or str(error)).lower()}") from None

    def human(out: Output) -> None:
        rows = ([one.key_id[:16], one.algorithm, f"{one.valid_from:%Y-%m-%d %H:%M:%S}Z", _until(one)] for one in found)
        out.table(["KEY", "ALGORITHM", "FROM", "UNTIL"], rows)
        if pem is not None:
            out.say(f"{pem}: {many(len(found), 'public key')}", "good")

    output.result({"items": found}, human)
    return Exit.DONE


def _until(key: PublicKey) -> str:
    return "signs now" if key.valid_until is None else f"{key.valid_until:%Y-%m-%d %H:%M:%S}Z"


@app.command(
    epilog=examples(
        'sluicegate evidence erase --release 01a2289b-8894 --gate load --reason "a customer asked for it"',
        'sluicegate evidence erase sha256:41d0… --reason "a customer asked for it"',
    )
)
def erase(
    entry: ResultEntry = None,
    release: ResultRelease = None,
    gate: ResultGate = None,
    *,
    reason: Reason,
    as_json: Json = False,
) -> int:
    """Erase the raw records of a gate's result: prompts and answers go, the result stands and says so."""
    output = Output(as_json=as_json)
    with connect() as client:
        made = client.evidence.erase(_named(client, entry, release, gate), reason)
    return _say_act(output, made, reason)


@app.command(
    epilog=examples(
        'sluicegate evidence revoke --release 01a2289b-8894 --gate load --reason "the runner was throttled"',
        'sluicegate evidence revoke sha256:41d0… --reason "the runner was throttled"',
    )
)
def revoke(
    entry: ResultEntry = None,
    release: ResultRelease = None,
    gate: ResultGate = None,
    *,
    reason: Reason,
    as_json: Json = False,
) -> int:
    """Let a gate result count no more: a release that stands on it and has no traffic yet holds."""
    output = Output(as_json=as_json)
    with connect() as client:
        made = client.evidence.revoke(_named(client, entry, release, gate), reason)
    return _say_act(output, made, reason)


def _say_act(output: Output, made: Entry, reason: str) -> int:
    """Say what was done to a result, and whether that had been done before, for another reason."""
    output.result(made, lambda out: out.say(line(made)[0], "warn"))
    if made.body["reason"] != reason:
        output.note("nothing has changed: it was so already, for the reason that was told first", "warn")
    return Exit.DONE


def _named(client: Client, entry: str | None, release: str | None, gate: str | None) -> str:
    """Return the digest of the entry that the command line names. Raises Usage."""
    if (entry is None) == (release is None) or (release is None) != (gate is None):
        raise Usage("name either the entry, or --release and --gate")
    return _latest(client, release, gate) if release and gate else _digest(str(entry))


def _latest(client: Client, release: str, gate: str) -> str:
    """Return the digest of a release's latest result of a gate. Raises Usage when there is none."""
    found = client.releases.get(resolve_release(release, client))
    entries = {one.gate: one.entry for one in found.gates}
    entry = entries.get(gate)
    if entry is None:
        what = f"release {found.id} has no result of a gate {gate}"
        raise Usage(f"{what}; its gates are {', '.join(entries)}" if gate not in entries else what)
    return entry
