"""`sluicegate alias`: movable names of bundles. Where a command takes a bundle, it takes @NAME."""

from enum import StrEnum
from typing import Annotated

import typer
from pydantic import ValidationError

from registry.cli.documents import read_bundle, resolve
from registry.cli.failures import Exit, invalid_act
from registry.cli.options import BundleName, Json, Limit, Reason, examples, group
from registry.cli.output import Output, none
from registry.cli.profile import connect
from registry.cli.targets import instant
from registry.client import Client
from schemas.alias import Alias, AliasAt, Movers, PatternMovers
from schemas.problems import NotFound

app = group("Aliases: movable names of bundles. Where a command takes a bundle, it takes @NAME.")

AliasName = Annotated[str, typer.Argument(metavar="NAME", help="Name of the alias, with or without @.")]
Generation = Annotated[
    str | None,
    typer.Option("--if-match", help="Generation that `alias show` gave: nothing is done when it has changed since."),
]


class MoverRole(StrEnum):
    """Least role that moves the aliases that a pattern fits."""

    ENGINEER = "engineer"
    MANAGER = "manager"
    ADMIN = "admin"


@app.command(
    "set",
    epilog=examples(
        'sluicegate alias set champion 3c3aff2a --reason "the first one"',
        'sluicegate alias set champion 9d01ab77 --expect 3c3aff2a --reason "better on the evaluation"',
    ),
)
def set_(
    name: AliasName,
    bundle: BundleName,
    reason: Reason,
    expect: Annotated[
        str | None,
        typer.Option("--expect", metavar="BUNDLE", help="What it names now; without this, the alias is made."),
    ] = None,
    if_match: Generation = None,
    as_json: Json = False,
) -> int:
    """Make an alias, or move it from where you saw it to be: of two who move it at once, one does."""
    output = Output(as_json=as_json)
    with connect() as client:
        digest = resolve(bundle, client.bundles, read_bundle, "bundle")
        expected = None if expect is None else resolve(expect, client.bundles, read_bundle, "bundle")
        before = _now(client, _plain(name))
        try:
            found = client.aliases.set(_plain(name), digest, reason, expected=expected, if_match=if_match)
        except ValidationError as error:
            raise invalid_act(error) from None
    output.result(found, lambda out: _show(out, found))
    if before is not None and before.generation == found.generation:
        seen = "" if expected in (None, digest) else f", and not {expected[7:19]} as expected"
        output.note(f"nothing has changed: @{found.name} names it already{seen}", "warn")
    return Exit.DONE


@app.command("list", epilog=examples("sluicegate alias list", "sluicegate alias list --bundle 3c3aff2a --json"))
def list_(
    bundle: Annotated[
        str | None, typer.Option("--bundle", metavar="BUNDLE", help="Only those that name this bundle.")
    ] = None,
    limit: Limit = 50,
    as_json: Json = False,
) -> int:
    """List aliases, newest first."""
    output = Output(as_json=as_json)
    with connect() as client:
        of = None if bundle is None else resolve(bundle, client.bundles, read_bundle, "bundle")
        found = output.most(client.aliases.list(bundle=of), limit)

    def human(out: Output) -> None:
        out.table(
            ["ALIAS", "BUNDLE", "DIGEST", "MOVED BY", "CHANGED", "BY"],
            (
                [
                    f"@{one.name}",
                    (one.bundle_name or "") + (" (quarantined)" if one.is_quarantined else ""),
                    one.bundle,
                    _movers(one),
                    f"{one.changed_at:%Y-%m-%d %H:%M:%S}Z",
                    one.changed_by,
                ]
                for one in found
            ),
            empty=none("alias", "alias set", is_asked=bundle is not None),
            spare=("MOVED BY", "BY", "CHANGED"),
        )

    output.result({"items": found}, human)
    return Exit.DONE


@app.command(
    epilog=examples("sluicegate alias show champion", "sluicegate alias show champion --at 2026-11-03T14:03:00Z")
)
def show(
    name: AliasName,
    at: Annotated[
        str | None,
        typer.Option("--at", metavar="INSTANT", help="What it named then, as evidence has it: RFC 3339."),
    ] = None,
    as_json: Json = False,
) -> int:
    """Show what an alias names now, or named at an instant."""
    output = Output(as_json=as_json)
    with connect() as client:
        if at is not None:
            then = client.aliases.at(_plain(name), instant(at))
            output.result(then, lambda out: _show_at(out, then))
            return Exit.DONE
        found = client.aliases.get(_plain(name))
    output.result(found, lambda out: _show(out, found))
    return Exit.DONE


@app.command(epilog=examples("sluicegate alias history champion", "sluicegate alias history champion --json"))
def history(name: AliasName, limit: Limit = 50, as_json: Json = False) -> int:
    """List the acts on an alias, newest first, also on one that is deleted."""
    output = Output(as_json=as_json)
    with connect() as client:
        found = output.most(client.aliases.history(_plain(name)), limit)

    def human(out: Output) -> None:
        out.table(
            ["AT", "WHAT", "BUNDLE", "GENERATION", "BY", "WHY", "ENTRY"],
            (
                [
                    f"{one.at:%Y-%m-%d %H:%M:%S}Z",
                    one.kind,
                    (one.bundle or "nothing")[7:19] if one.bundle else "nothing",
                    one.generation,
                    one.by,
                    one.reason,
                    one.entry[7:19],
                ]
                for one in found
            ),
        )

    output.result({"items": found}, human)
    return Exit.DONE


@app.command(epilog=examples('sluicegate alias delete champion --reason "not used any more"'))
def delete(name: AliasName, reason: Reason, if_match: Generation = None, as_json: Json = False) -> int:
    """Take an alias away. Its history stays, and it may be made again."""
    output = Output(as_json=as_json)
    with connect() as client:
        try:
            found = client.aliases.delete(_plain(name), reason, if_match=if_match)
        except ValidationError as error:
            raise invalid_act(error) from None
    output.result(found, lambda out: out.say(f"deleted: @{found.name}", "warn"))
    return Exit.DONE


@app.command(
    epilog=examples(
        'sluicegate alias protect champion --reason "production reads it"',
        'sluicegate alias protect champion --off --reason "a playground again"',
        "sluicegate alias protect 'prod-*' --movers manager --reason \"what production reads\"",
        "sluicegate alias protect 'prod-*' --movers admin --expect manager --reason \"an audit\"",
    )
)
def protect(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of the alias, or a pattern: * stands for any letters.")
    ],
    reason: Reason,
    off: Annotated[bool, typer.Option("--off", help="Protect it, or what the pattern fits, no more.")] = False,
    movers: Annotated[
        MoverRole, typer.Option("--movers", help="Least role that moves what a pattern fits.")
    ] = MoverRole.MANAGER,
    expect: Annotated[
        MoverRole | None,
        typer.Option("--expect", help="Of a pattern: the role that it names now; without this, the pattern is made."),
    ] = None,
    if_match: Annotated[
        str | None,
        typer.Option(
            "--if-match",
            help="Generation that `alias show` or `alias patterns` gave: nothing is done when it has changed since.",
        ),
    ] = None,
    as_json: Json = False,
) -> int:
    """Let only managers move an alias from now on, or a role the aliases that a pattern fits, made or not.

    What is protected takes no quarantined bundle.
    """
    output = Output(as_json=as_json)
    plain = _plain(name)
    if "*" not in plain and movers is not MoverRole.MANAGER:
        raise typer.BadParameter(
            "is for patterns; an alias that is protected by itself is moved by managers", param_hint="--movers"
        )
    if expect is not None and (off or "*" not in plain):
        raise typer.BadParameter(
            "is for patterns that get another role; otherwise --if-match says what was seen", param_hint="--expect"
        )
    with connect() as client:
        try:
            if "*" in plain and off:
                was = client.aliases.remove_pattern(plain, reason, if_match=if_match)
                output.result(was, lambda out: out.say(f"@{was.pattern} protects nothing any more", "warn"))
                return Exit.DONE
            if "*" in plain:
                expected: PatternMovers | None = None if expect is None else expect.value
                now = client.aliases.protect_pattern(plain, movers.value, reason, expected=expected, if_match=if_match)
                output.result(now, lambda out: out.say(f"@{now.pattern} is moved by {_roles(now.movers)}"))
                return Exit.DONE
            found = client.aliases.protect(plain, reason, is_protected=not off, if_match=if_match)
        except ValidationError as error:
            raise invalid_act(error) from None
    output.result(found, lambda out: _show(out, found))
    return Exit.DONE


@app.command(epilog=examples("sluicegate alias patterns", "sluicegate alias patterns --json"))
def patterns(as_json: Json = False) -> int:
    """List the patterns that protect aliases by their names."""
    output = Output(as_json=as_json)
    with connect() as client:
        found = client.aliases.patterns()

    def human(out: Output) -> None:
        out.table(
            ["PATTERN", "MOVED BY", "GENERATION", "CHANGED", "BY"],
            (
                [
                    f"@{one.pattern}",
                    _roles(one.movers),
                    one.generation,
                    f"{one.set_at:%Y-%m-%d %H:%M:%S}Z",
                    one.set_by,
                ]
                for one in found
            ),
            empty=none("pattern", "alias protect"),
        )

    output.result({"items": found}, human)
    return Exit.DONE


def _now(client: Client, name: str) -> Alias | None:
    try:
        return client.aliases.get(name)
    except NotFound:
        return None


def _movers(found: Alias) -> str:
    return _roles(found.movers)


def _roles(movers: Movers) -> str:
    return {"ci": "all who propose", "engineer": "engineers", "manager": "managers", "admin": "administrators"}[movers]


def _plain(name: str) -> str:
    return name.removeprefix("@")


def _show(out: Output, found: Alias) -> None:
    out.fields(
        [
            ("alias", f"@{found.name}"),
            ("bundle", found.bundle and f"{found.bundle_name or ''} {found.bundle}".strip()),
            ("moved by", _movers(found) + (f", by the pattern {', '.join(found.patterns)}" if found.patterns else "")),
            ("generation", str(found.generation)),
            ("changed", f"{found.changed_at:%Y-%m-%d %H:%M:%S}Z by {found.changed_by}"),
        ]
    )
    if found.is_quarantined:
        out.say("the bundle is QUARANTINED: `sluicegate bundle show` says why", "bad")


def _show_at(out: Output, found: AliasAt) -> None:
    change = found.change
    out.fields(
        [
            ("alias", f"@{found.name}"),
            ("at", f"{found.at:%Y-%m-%d %H:%M:%S.%f}Z"),
            ("bundle", found.bundle or "none"),
            ("since", change and f"{change.at:%Y-%m-%d %H:%M:%S}Z"),
            ("by", change and change.by),
            ("reason", change and change.reason),
            ("entry", change and change.entry),
        ]
    )
