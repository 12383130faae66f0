"""`sluicegate release`: start one, follow it, and what people do to it."""

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any
from uuid import UUID

import typer
from pydantic import ValidationError

from gates.difference import shown
from registry.cli.documents import read_bundle, read_policy, resolve, resolve_release
from registry.cli.failures import Exit, invalid_act, made
from registry.cli.follow import add_names, follow_release, told, what_to_do
from registry.cli.options import IfMatch, Json, Key, Limit, Reason, ReleaseId, Timeout, Until, Wait, examples, group
from registry.cli.output import Output, lasted, none, percent, plain
from registry.cli.profile import connect
from registry.cli.replicas import failed_replica
from registry.client import Client
from schemas.api import ReleaseCreate
from schemas.evidence import Kind
from schemas.holds import way_out
from schemas.release import TERMINAL, Phase, Release, ReleaseDetail
from schemas.runner import ReplicaState
from schemas.stories import TONES, replaces, served_in

app = group("Releases: one attempt to take a bundle live on a target under a policy.")


@app.command(
    epilog=examples(
        "sluicegate release create --target chat@prod --bundle 3c3aff2a --policy 9c1d77aa",
        "sluicegate release create -t chat@prod -b 3c3aff2a -p policy.json --wait --until gated --timeout 900",
    )
)
def create(
    target: Annotated[str, typer.Option("--target", "-t", help="Where it shall serve, as NAME@ENVIRONMENT.")],
    bundle: Annotated[
        str, typer.Option("--bundle", "-b", help="What shall serve: digest, 8 or more of its digits, or @ALIAS.")
    ],
    policy: Annotated[
        str, typer.Option("--policy", "-p", help="Under which rules: digest, 8 or more of its digits, or a file.")
    ],
    reason: Annotated[str | None, typer.Option("--reason", "-r", help="Why; kept in evidence.")] = None,
    key: Key = None,
    wait: Wait = False,
    until: Annotated[Until | None, typer.Option("--until", help="How far to follow it; implies --wait.")] = None,
    timeout: Timeout = 3600.0,
    as_json: Json = False,
) -> int:
    """Start a release, and with --wait follow it until it is promoted.

    Exit status with --wait: 0 it came as far as --until says; 1 it was rejected or rolled back; 3 it holds for a
    person, or time is up.
    """
    output = Output(as_json=as_json)
    with connect() as client:
        body = made(
            ReleaseCreate,
            "the release",
            target=target,
            bundle=resolve(bundle, client.bundles, read_bundle, "bundle"),
            policy=resolve(policy, client.policies, read_policy, "policy"),
            reason=reason,
        )
        release = client.releases.create(body, key=key)
        if not wait and until is None:
            if (key is not None) and not as_json:
                # Under a key that was used before, the answer is that of then.
                release = client.releases.get(release.id)
            output.result(release, lambda out: _head(out, client.url, release))
            return Exit.DONE
        output.note(f"release {release.id}, on {_page(client.url, release)}")
        return follow_release(client, output, release.id, until=until or Until.PROMOTED, timeout_seconds=timeout)


@app.command(
    epilog=examples(
        "sluicegate release watch 01a2289b-8894-74d9-8d4f-da769c0550b2",
        "sluicegate release watch 01a2289b-8894 --until ended --timeout 86400 --json",
    )
)
def watch(
    release: ReleaseId,
    until: Annotated[
        Until,
        typer.Option(
            "--until",
            help="How far to follow it; `ended` goes on until another release replaces it. Taken back, it is status 1, "
            "but with `rolled_back` 0.",
        ),
    ] = Until.PROMOTED,
    timeout: Timeout = 3600.0,
    as_json: Json = False,
) -> int:
    """Follow a release: its log so far, and each new entry as it happens."""
    output = Output(as_json=as_json)
    with connect() as client:
        identity = resolve_release(release, client)
        return follow_release(client, output, identity, until=until, timeout_seconds=timeout)


@app.command(epilog=examples("sluicegate release show 01a2289b-8894", "sluicegate release show 01a2289b-8894 --json"))
def show(release: ReleaseId, as_json: Json = False) -> int:
    """Show a release: its gates, split, log and reasons."""
    output = Output(as_json=as_json)
    with connect() as client:
        found = client.releases.get(resolve_release(release, client))
        names = {found.bundle: found.bundle_name}
        add_names(client, names, () if as_json else served_in(found.log))
        next_ = what_to_do(client, found)
    output.result({**plain(found), "what_to_do": next_}, lambda out: _show(out, client.url, found, names, next_))
    return Exit.DONE


def _page(url: str, release: Release) -> str:
    return f"{url}/releases/{release.id}"


def _head(out: Output, url: str, release: Release, doing: str | None = None, next_: str | None = None) -> None:
    holds = "; ".join(release.held)
    out.fields(
        [
            ("release", release.id),
            ("target", release.target),
            ("bundle", f"{release.bundle_name} {release.bundle}"),
            ("policy", release.policy),
            ("phase", f"{release.phase} since {release.phase_since:%Y-%m-%d %H:%M:%S}Z"),
            ("paused", "yes" if release.is_paused else None),
            ("holds", holds),
            ("what to do", next_ or way_out(release)),
            ("quarantined", "; ".join(release.quarantined)),
            ("waits", release.waits),
            ("doing", doing),
            ("reason", None if release.reason == holds else release.reason),
            ("created", f"{release.created_at:%Y-%m-%d %H:%M:%S}Z by {release.created_by}"),
            (replaces(release) or "", release.predecessor if replaces(release) else None),
            ("version", release.version),
            ("page", _page(url, release)),
        ]
    )


def _show(out: Output, url: str, release: ReleaseDetail, names: Mapping[str, str], next_: str | None) -> None:
    _head(out, url, release, release.doing, next_)
    out.say("")
    out.table(
        ["GATE", "VERDICT", "TOOK", "WHY"],
        (
            [
                gate.gate,
                gate.verdict or ("revoked" if gate.entry else "not run"),
                "" if gate.duration_ms is None else f"{gate.duration_ms / 1000:.1f} s",
                gate.summary,
            ]
            for gate in release.gates
        ),
    )
    out.say("")
    if release.weight_bp is None:
        out.say("split: no traffic has moved")
    else:
        step = "" if release.step is None else f", step {release.step + 1}"
        out.say(f"split: {percent(release.weight_bp)} on this release{step}")
    _findings(out, release)
    if (last := _last_failure(release)) is not None:
        failed_replica(out, last["state"], last.get("failure"), last["cause"], last.get("log_tail"))
    out.say("")
    out.table(
        ["AT", "AFTER", "WHAT"],
        (
            [
                f"{entry.recorded_at:%Y-%m-%d %H:%M:%S}Z",
                lasted((entry.recorded_at - before.recorded_at).total_seconds()) if before else "",
                told(entry, names),
            ]
            for before, entry in zip([None, *release.log], release.log, strict=False)
        ),
    )


def _last_failure(release: ReleaseDetail) -> dict[str, Any] | None:
    """Return the last report of a replica that failed, unless another one was ready since."""
    for entry in reversed(release.log):
        if entry.kind is Kind.REPLICA_CHANGED:
            report: dict[str, Any] = entry.body["replica"]
            if report["state"] == ReplicaState.FAILED:
                return report
            if report["state"] == ReplicaState.READY:
                return None
    return None


def _findings(out: Output, release: ReleaseDetail) -> None:
    """Print what gates found on the way to anything but a pass; what several attempts found alike, once."""
    alike = dict[tuple[str, str], list[tuple[str, Any]]]()
    for entry in release.log:
        for finding in entry.body.get("findings") or []:
            if finding.get("severity") == "info":
                continue
            said = {name: finding.get(name) for name in ("message", "file", "pointer", "expected", "advice")}
            key = (str(entry.body.get("gate", entry.kind)), json.dumps(said))
            alike.setdefault(key, []).append((str(entry.body.get("verdict")), finding.get("found")))
    for (gate, told_alike), seen in alike.items():
        message, file, pointer, expected, advice = json.loads(told_alike).values()
        times = f" ({len(seen)} times)" if len(seen) > 1 else ""
        out.say("")
        out.say(f"{gate}: {message}{times}", TONES.get(seen[-1][0], "warn"))
        out.fields(
            [
                ("  at", " ".join(place for place in (file, pointer) if place)),
                ("  found", "; ".join(dict.fromkeys(shown(found) for _, found in seen if found is not None))),
                ("  expected", None if expected is None else shown(expected)),
                ("  advice", advice),
            ]
        )


@app.command(
    "list",
    epilog=examples(
        "sluicegate release list --target chat@prod",
        "sluicegate release list --bundle 3c3aff2a --phase canary --phase promoted --json",
    ),
)
def list_(
    target: Annotated[str | None, typer.Option("--target", "-t", help="Only of this target.")] = None,
    bundle: Annotated[str | None, typer.Option("--bundle", "-b", help="Only of this bundle.")] = None,
    phase: Annotated[
        list[Phase] | None, typer.Option("--phase", help="Only in this phase, such as gated; repeatable.")
    ] = None,
    limit: Limit = 50,
    as_json: Json = False,
) -> int:
    """List releases, newest first."""
    output = Output(as_json=as_json)
    with connect() as client:
        of = None if bundle is None else resolve(bundle, client.bundles, read_bundle, "bundle")
        found = output.most(client.releases.list(target=target, phases=phase or (), bundle=of), limit)

    def human(out: Output) -> None:
        out.table(
            ["RELEASE", "TARGET", "BUNDLE", "PHASE", "TRAFFIC", "CREATED", "REASON"],
            (
                [
                    one.id,
                    one.target,
                    f"{one.bundle_name} {one.bundle[7:19]}",
                    f"{one.phase} (paused)" if one.is_paused else f"{one.phase} (held)" if one.held else one.phase,
                    percent(one.weight_bp),
                    f"{one.created_at:%Y-%m-%d %H:%M:%S}Z",
                    one.reason,
                ]
                for one in found
            ),
            empty=none("release", "release create", is_asked=bool(target or bundle or phase)),
            spare=("CREATED", "TRAFFIC"),
            brief=("REASON",),
        )

    output.result({"items": found}, human)
    return Exit.DONE


# ------------------------------------------------------------------------------------------ what people do to it


def _act(
    release: str,
    as_json: bool,
    act: Callable[[Client, UUID], Release],
    *,
    asked: str | None = None,
    until: Until = Until.PROMOTED,
    alone: str | None = None,
    is_alone: bool = False,
) -> int:
    """Do an act.

    `asked` says what the controller has still to do, for acts that only ask for it, and `until` when that is done;
    `alone` what that means where no release was live before, or `is_alone` says that none takes its place.
    """
    output = Output(as_json=as_json)
    with connect() as client:
        identity = resolve_release(release, client)
        before = client.releases.get(identity).version
        try:
            found = act(client, identity)
        except ValidationError as error:
            raise invalid_act(error) from None
    output.result(found, lambda out: _head(out, client.url, found))
    if found.version == before:
        output.note("nothing has changed: this was done already", "warn")
    if alone is not None and found.phase not in TERMINAL and (is_alone or found.predecessor is None):
        output.note(alone.format(target=found.target), "warn")
    if asked is not None and found.phase not in TERMINAL:
        output.note(f"{asked}; follow it: sluicegate release watch {found.id} --until {until}")
    return Exit.DONE


@app.command(
    epilog=examples(
        'sluicegate release approve 01a2289b-8894 --reason "answers read, latency as before"',
        'sluicegate release approve 01a2289b-8894 --accept keyword-not-probed --reason "no caller sends if/then"',
    )
)
def approve(
    release: ReleaseId,
    reason: Reason,
    accept: Annotated[
        list[str] | None,
        typer.Option("--accept", metavar="CODE", help="Answer for this warning of a gate; repeatable."),
    ] = None,
    if_match: IfMatch = None,
    as_json: Json = False,
) -> int:
    """Approve a release whose gates have passed. Each warning that they gave must be accepted by its code."""
    return _act(
        release,
        as_json,
        lambda client, identity: client.releases.approve(identity, reason, accept=accept or (), if_match=if_match),
    )


@app.command(
    epilog=examples(
        'sluicegate release withdraw 01a2289b-8894 --reason "one answer is wrong after all"',
        'sluicegate release withdraw 01a2289b-8894 --of maria --reason "maria has left the team"',
    )
)
def withdraw(
    release: ReleaseId,
    reason: Reason,
    of: Annotated[str | None, typer.Option("--of", metavar="NAME", help="Whose approval, for administrators.")] = None,
    if_match: IfMatch = None,
    as_json: Json = False,
) -> int:
    """Take an approval back while the release has no traffic: it waits for approval again."""
    return _act(
        release,
        as_json,
        lambda client, identity: client.releases.withdraw(identity, reason, approver=of, if_match=if_match),
    )


@app.command(epilog=examples('sluicegate release reject 01a2289b-8894 --reason "wrong template for this customer"'))
def reject(release: ReleaseId, reason: Reason, if_match: IfMatch = None, as_json: Json = False) -> int:
    """Reject a release that has no traffic yet."""
    return _act(release, as_json, lambda client, identity: client.releases.reject(identity, reason, if_match=if_match))


@app.command(epilog=examples('sluicegate release pause 01a2289b-8894 --reason "looking into a complaint"'))
def pause(release: ReleaseId, reason: Reason, if_match: IfMatch = None, as_json: Json = False) -> int:
    """Stop a release from moving on. Its stop conditions stay armed."""
    return _act(release, as_json, lambda client, identity: client.releases.pause(identity, reason, if_match=if_match))


@app.command(epilog=examples('sluicegate release resume 01a2289b-8894 --reason "complaint was about another model"'))
def resume(release: ReleaseId, reason: Reason, if_match: IfMatch = None, as_json: Json = False) -> int:
    """Let a paused release go on, or one that holds try again."""
    return _act(release, as_json, lambda client, identity: client.releases.resume(identity, reason, if_match=if_match))


@app.command(epilog=examples('sluicegate release promote 01a2289b-8894 --reason "seen enough at 50 %"'))
def promote(release: ReleaseId, reason: Reason, if_match: IfMatch = None, as_json: Json = False) -> int:
    """Skip the rest of a canary."""
    return _act(
        release,
        as_json,
        lambda client, identity: client.releases.promote(identity, reason, if_match=if_match),
        asked="asked for: the controller moves the rest of the traffic next",
    )


@app.command(
    epilog=examples(
        'sluicegate release rollback 01a2289b-8894 --reason "answers in the wrong language"',
        'sluicegate release rollback 01a2289b-8894 --to-nothing --reason "it is the only one, and leaks names"',
    )
)
def rollback(
    release: ReleaseId,
    reason: Reason,
    to_nothing: Annotated[
        bool,
        typer.Option(
            "--to-nothing",
            help="Let the target serve nothing, at once: it answers 503, and no earlier version is put in its place, "
            "also where there is one.",
        ),
    ] = False,
    if_match: IfMatch = None,
    as_json: Json = False,
) -> int:
    """Take all traffic back from a release, to the last accepted bundle.

    That bundle may have to boot first. Where it does not become ready, the release serves on and holds, and says so:
    `--to-nothing` is an order that waits for nothing, and may be given then as well.

    Exit status: 0 asked for, or done already; 4 there is nothing to take back, no earlier version to go back to, or
    another release has to be taken back first. `release watch RELEASE --until rolled_back` then ends with 0 when the
    traffic is back.
    """
    return _act(
        release,
        as_json,
        lambda client, identity: client.releases.roll_back(identity, reason, to_nothing=to_nothing, if_match=if_match),
        asked="asked for: the controller takes the traffic back next",
        until=Until.ROLLED_BACK,
        alone=f"{'nothing takes its place' if to_nothing else 'there is no earlier release to go back to'}: "
        "{target} will answer 503 until another release serves it",
        is_alone=to_nothing,
    )
