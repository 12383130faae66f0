"""`sluicegate target`: make one, look at one, list them."""

from typing import Annotated

import typer

from registry.cli.failures import Exit, Usage, made
from registry.cli.options import Json, Key, Limit, examples, group
from registry.cli.output import Output, percent
from registry.cli.profile import connect
from registry.client import Client
from schemas.api import TargetCreate
from schemas.release import Target
from schemas.runner import RUNNING

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
        "sluicegate target show chat@prod --json",
    )
)
def show(
    target: TargetArgument,
    everything: Annotated[
        bool, typer.Option("--all", help="Also the replicas that ended; --json has them always.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Show what a target serves now, by whom, and what is under way."""
    output = Output(as_json=as_json)
    if "@" not in target:
        raise Usage(f"target {target!r} has no environment: write NAME@ENVIRONMENT, such as {target}@prod")
    with connect() as client:
        found = client.targets.get(target)
    output.result(found, lambda out: _show(out, found, everything=everything))
    return Exit.DONE


def _show(out: Output, target: Target, *, everything: bool = False) -> None:
    out.fields(
        [
            ("target", target.name),
            ("url", target.url),
            ("runner class", target.runner_class),
            ("gateway", target.gateway),
            ("live release", target.stable_release),
            ("live bundle", target.stable_bundle),
            ("candidate", target.candidate_release),
        ]
    )
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
                [one.name, one.runner_class, (one.stable_bundle or "")[7:19], one.candidate_release, one.url]
                for one in found
            ),
            spare=("RUNNER CLASS", "URL"),
        )

    output.result({"items": found}, human)
    return Exit.DONE
