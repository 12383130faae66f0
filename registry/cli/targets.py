"""`sluicegate target`: make one, look at one, list them."""

import itertools
from typing import Annotated

import typer

from registry.cli.failures import Exit, Usage, made
from registry.cli.options import Json, Limit, examples, group
from registry.cli.output import Output, percent
from registry.cli.profile import connect
from registry.client import Client
from schemas.api import TargetCreate
from schemas.release import Target

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
    as_json: Json = False,
) -> int:
    """Make a target."""
    output = Output(as_json=as_json)
    with connect() as client:
        named = runner_class or only_class(client)
        found = client.targets.create(
            made(TargetCreate, "the target", name=target, runner_class=named, gateway=gateway)
        )
    output.result(found, lambda out: _show(out, found))
    return Exit.DONE


def only_class(client: Client) -> str:
    """Return the class of the runners, when they are all of one. Raises Usage."""
    classes = sorted({runner.runner_class for runner in client.runners.list()})
    if len(classes) != 1:
        said = f"there are the classes {', '.join(classes)}" if classes else "no runner has registered"
        raise Usage(f"name a runner class with --runner-class: {said}")
    return classes[0]


@app.command(epilog=examples("sluicegate target show chat@prod", "sluicegate target show chat@prod --json"))
def show(target: TargetArgument, as_json: Json = False) -> int:
    """Show what a target serves now, by whom, and what is under way."""
    output = Output(as_json=as_json)
    if "@" not in target:
        raise Usage(f"target {target!r} has no environment: write NAME@ENVIRONMENT, such as {target}@prod")
    with connect() as client:
        found = client.targets.get(target)
    output.result(found, lambda out: _show(out, found))
    return Exit.DONE


def _show(out: Output, target: Target) -> None:
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
    if target.replicas:
        out.say("")
        out.table(
            ["REPLICA", "STATE", "BUNDLE", "ADDRESS", "CAUSE"],
            ([one.purpose, one.state, one.bundle[7:19], one.address, one.cause] for one in target.replicas),
        )
    if target.references:
        out.say("")
        out.table(["GOLDEN SUITE", "REFERENCE"], target.references.items())


@app.command("list", epilog=examples("sluicegate target list", "sluicegate target list --json"))
def list_(limit: Limit = 50, as_json: Json = False) -> int:
    """List targets, newest first."""
    output = Output(as_json=as_json)
    with connect() as client:
        found = list(itertools.islice(client.targets.list(), limit))

    def human(out: Output) -> None:
        out.table(
            ["TARGET", "RUNNER CLASS", "LIVE BUNDLE", "CANDIDATE", "URL"],
            (
                [one.name, one.runner_class, (one.stable_bundle or "")[7:19], one.candidate_release, one.url]
                for one in found
            ),
        )

    output.result({"items": found}, human)
    return Exit.DONE
