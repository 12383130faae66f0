"""`sluicegate target`: make one, look at one, list them."""

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated
from uuid import UUID

import typer

from gates.router import WHOLE_BP
from registry.cli.failures import Exit, made
from registry.cli.follow import add_names
from registry.cli.options import Json, Key, Limit, examples, group
from registry.cli.output import Output, none, percent
from registry.cli.profile import connect
from registry.client import Client
from schemas.api import TargetCreate
from schemas.evidence import SplitEntry
from schemas.problems import Usage
from schemas.release import Phase, ServedAt, Target
from schemas.runner import RUNNING
from schemas.stories import told_split

app = group("Targets: one served name in one environment, such as chat@prod.")

TargetArgument = Annotated[str, typer.Argument(metavar="TARGET", help="NAME@ENVIRONMENT.")]


@app.command(
    epilog=examples(
        "sluicegate target create chat@prod",
        "sluicegate target create chat-large@prod --runner-class h100x8 --gateway edge",
    )
)
def create(
    target: TargetArgument,
    runner_class: Annotated[
        str | None,
        typer.Option("--runner-class", help="Runners that serve it; may be left out when there is one class."),
    ] = None,
    gateway: Annotated[str, typer.Option("--gateway", help="Gateway in front of it.")] = "local",
    key: Key = None,
    as_json: Json = False,
) -> int:
    """Make a target."""
    output = Output(as_json=as_json)
    with connect() as client:
        named = runner_class or only_class(client)
        body = made(TargetCreate, "the target", name=target, runner_class=named, gateway=gateway)
        found = client.targets.create(body, key=key)
    output.result(found, lambda out: _show(out, found))
    return Exit.DONE


def only_class(client: Client) -> str:
    """Return the class of the runners, when they are all of one. Raises Usage."""
    classes = sorted({runner.runner_class for runner in client.runners.list()})
    if len(classes) != 1:
        said = f"there are the classes {', '.join(classes)}" if classes else "no runner has registered"
        raise Usage(f"name a runner class with --runner-class: {said}")
    return classes[0]


@app.command(
    epilog=examples(
        "sluicegate target show chat@prod",
        "sluicegate target show chat@prod --all",
        "sluicegate target show chat@prod --at 2026-11-03T14:03:00Z",
        "sluicegate target show chat@prod --json",
    )
)
def show(
    target: TargetArgument,
    at: Annotated[
        str | None,
        typer.Option(
            "--at", metavar="INSTANT", help="What it served then, as evidence has it: RFC 3339 with an offset."
        ),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Also the replicas that ended; --json has them always.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Show what a target serves now, by whom, and what is under way; or what it served at an instant."""
    output = Output(as_json=as_json)
    _require_environment(target)
    with connect() as client:
        if at is not None:
            served = client.targets.served(target, instant(at))
            output.result(served, lambda out: _show_served(out, served))
            return Exit.DONE
        found = client.targets.get(target)
        live = found.stable_release
        is_alone = bool(found.quarantined) and live is not None and _is_alone(client, live)
    output.result(found, lambda out: _show(out, found, everything=everything, is_alone=is_alone))
    return Exit.DONE


@app.command(epilog=examples("sluicegate target history chat@prod", "sluicegate target history chat@prod --json"))
def history(target: TargetArgument, limit: Limit = 50, as_json: Json = False) -> int:
    """List what changed in what a target serves, newest first: when, to what, by whom and why."""
    output = Output(as_json=as_json)
    _require_environment(target)
    with connect() as client:
        found = output.most(client.targets.history(target), limit)
        names = dict[str, str]()
        if not as_json:
            add_names(client, names, (arm.bundle for one in found for arm in one.split or ()))

    def human(out: Output) -> None:
        out.table(
            ["AT", "WHAT", "SPLIT", "RELEASE", "BY", "DONE BY", "WHY", "ENTRY"],
            (
                [
                    f"{one.at:%Y-%m-%d %H:%M:%S}Z",
                    one.kind,
                    "" if one.split is None else told_split(one.split, names) or "nothing",
                    one.release,
                    one.by,
                    one.actor,
                    one.reason,
                    one.entry[7:19],
                ]
                for one in found
            ),
            empty="nothing has served it",
            spare=("ENTRY", "DONE BY", "RELEASE", "WHAT"),
            brief=("WHY",),
        )

    output.result({"items": found}, human)
    return Exit.DONE


def _is_alone(client: Client, release: UUID) -> bool:
    """Tell whether no release was live before this one, or each of those was taken back."""
    before = client.releases.get(release).predecessor
    while before is not None:
        found = client.releases.get(before)
        if found.phase is not Phase.ROLLED_BACK:
            return False
        before = found.predecessor
    return True


def _require_environment(target: str) -> None:
    if "@" not in target:
        raise Usage(f"target {target!r} has no environment: write NAME@ENVIRONMENT, such as {target}@prod")


def instant(text: str) -> datetime:
    """Return the instant that a person wrote. Raises Usage."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        found = None
    if found is None or found.tzinfo is None:
        raise Usage(f"--at {text!r} is no instant with an offset: write 2026-11-03T14:03:00Z")
    return found


def _split(split: Sequence[SplitEntry]) -> str:
    return ", ".join(f"{percent(arm.weight_bp)} {arm.bundle[7:19]}" for arm in split) or "nothing"


def _accepted(served: ServedAt) -> str:
    """Return which bundle was live, that is accepted, and how much of the traffic it had where that was not all."""
    if served.live_bundle is None:
        return "none"
    weight = sum(arm.weight_bp for arm in served.split if arm.bundle == served.live_bundle)
    return served.live_bundle + ("" if weight == WHOLE_BP else f" (accepted; {percent(weight)} of the traffic)")


def _live(target: Target) -> str:
    """Return the live bundle of a target in a column; while none is, what serves all the same."""
    if target.stable_bundle is not None:
        return target.stable_bundle[7:19] + (" (quarantined)" if target.quarantined else "")
    serving = [arm for arm in target.applied if arm.weight_bp]
    return f"none yet ({_split(serving)} in canary)" if serving and target.candidate_release else "none"


def _show_served(out: Output, served: ServedAt) -> None:
    out.fields(
        [
            ("target", served.target),
            ("at", f"{served.at:%Y-%m-%d %H:%M:%S.%f}Z"),
            ("served", _split(served.split)),
            ("split since", served.split_since and f"{served.split_since:%Y-%m-%d %H:%M:%S}Z"),
            ("split entry", served.split_entry),
            ("live bundle", _accepted(served)),
            ("live release", served.live_release),
            ("since", served.live_since and f"{served.live_since:%Y-%m-%d %H:%M:%S}Z"),
            ("by", served.live_by),
            ("reason", served.live_reason),
            ("entry", served.live_entry),
        ]
    )


def _show(out: Output, target: Target, *, everything: bool = False, is_alone: bool = False) -> None:
    out.fields(
        [
            ("target", target.name),
            ("url", target.url),
            ("runner class", target.runner_class),
            ("gateway", target.gateway),
            ("live release", target.stable_release),
            ("live bundle", target.stable_bundle),
            ("candidate", target.candidate_release),
            ("generation", target.generation),
        ]
    )
    for why in target.quarantined:
        out.say(f"the live bundle is QUARANTINED: {why}", "bad")
    if target.quarantined:
        back = f"release rollback {target.stable_release} --reason …"
        if is_alone:
            back = back.replace(" --reason", " --to-nothing --reason")
        out.say(f"it serves on: `sluicegate {back}` takes it back", "bad")
        if is_alone:
            out.say("there is no earlier version to go back to: the target then serves nothing", "bad")
    out.say("")
    out.table(
        ["SPLIT", "BUNDLE"],
        ([percent(arm.weight_bp), arm.bundle] for arm in target.applied),
        empty="no traffic is let through",
    )
    shown = [one for one in target.replicas if everything or one.state in RUNNING]
    if target.replicas:
        out.say("")
        out.table(
            ["REPLICA", "STATE", "SINCE", "BUNDLE", "ADDRESS", "CAUSE"],
            (
                [one.purpose, one.state, f"{one.since:%Y-%m-%d %H:%M:%S}Z", one.bundle[7:19], one.address, one.cause]
                for one in shown
            ),
            empty="no replica runs",
            spare=("REPLICA", "SINCE"),
        )
    if hidden := len(target.replicas) - len(shown):
        out.say(f"{hidden} more ended; --all shows {'it' if hidden == 1 else 'them'}")
    if target.references:
        out.say("")
        out.table(["GOLDEN SUITE", "REFERENCE"], target.references.items())
        out.note("what was answered: sluicegate suite reference REFERENCE")


@app.command("list", epilog=examples("sluicegate target list", "sluicegate target list --json"))
def list_(limit: Limit = 50, as_json: Json = False) -> int:
    """List targets, newest first."""
    output = Output(as_json=as_json)
    with connect() as client:
        found = output.most(client.targets.list(), limit)

    def human(out: Output) -> None:
        out.table(
            ["TARGET", "RUNNER CLASS", "LIVE BUNDLE", "CANDIDATE", "URL"],
            (
                [
                    one.name,
                    one.runner_class,
                    _live(one),
                    one.candidate_release,
                    one.url,
                ]
                for one in found
            ),
            empty=none("target", "target create"),
            spare=("RUNNER CLASS", "URL"),
        )

    output.result({"items": found}, human)
    return Exit.DONE
