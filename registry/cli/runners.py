"""`sluicegate runner`: the machines that run models."""

from typing import Annotated

import typer

from registry.cli.failures import Exit
from registry.cli.options import Json, Limit, examples, group
from registry.cli.output import Output, size
from registry.cli.profile import connect
from registry.cli.replicas import failed_replica
from schemas.runner import ReplicaState, Runner

MOST_FAILURES = 5
"""Newest runs of a runner of which a failed engine is told in full."""

app = group("Runners: workers that boot replicas.")


@app.callback()
def _runners() -> None:
    """Runners: workers that boot replicas."""


@app.command("list", epilog=examples("sluicegate runner list", "sluicegate runner list --alive --json"))
def list_(
    alive: Annotated[bool, typer.Option("--alive", help="Only those that have been heard of lately.")] = False,
    limit: Limit = 50,
    as_json: Json = False,
) -> int:
    """List runners with their hardware, newest first."""
    output = Output(as_json=as_json)
    with connect() as client:
        everyone = (runner for runner in client.runners.list() if runner.is_alive or not alive)
        found = output.most(everyone, limit)

    def human(out: Output) -> None:
        out.table(
            ["RUNNER", "CLASS", "ALIVE", "LAST SEEN", "ENGINES", "HARDWARE", "JOBS"],
            (
                [
                    one.name,
                    one.runner_class,
                    "yes" if one.is_alive else "no",
                    f"{one.last_seen_at:%Y-%m-%d %H:%M:%S}Z",
                    ", ".join(one.engines),
                    _hardware(one),
                    f"{len(one.jobs)} of {one.slots}" if one.slots else len(one.jobs),
                ]
                for one in found
            ),
            spare=("LAST SEEN", "ENGINES"),
        )

    output.result({"items": found}, human)
    return Exit.DONE


@app.command(epilog=examples("sluicegate runner show gpu-1", "sluicegate runner show gpu-1 --json"))
def show(
    runner: Annotated[str, typer.Argument(metavar="RUNNER", help="Name of the runner, or its id.")],
    as_json: Json = False,
) -> int:
    """Show a runner: its machine, its slots, and the newest runs that it holds or held."""
    output = Output(as_json=as_json)
    with connect() as client:
        found = client.runners.get(runner)

    def human(out: Output) -> None:
        out.fields(
            [
                ("runner", found.name),
                ("id", found.id),
                ("class", found.runner_class),
                ("alive", "yes" if found.is_alive else "no"),
                ("last seen", f"{found.last_seen_at:%Y-%m-%d %H:%M:%S}Z"),
                ("registered", f"{found.registered_at:%Y-%m-%d %H:%M:%S}Z"),
                ("engines", ", ".join(found.engines)),
                ("hardware", _hardware(found)),
                ("jobs", f"{len(found.jobs)} of {found.slots}" if found.slots else len(found.jobs)),
            ]
        )
        if found.runs:
            out.table(
                ["RUN", "KIND", "BUNDLE", "STATE", "OUTCOME", "CREATED", "DOING"],
                (
                    [
                        one.id,
                        one.kind,
                        one.bundle,
                        one.state,
                        one.outcome,
                        f"{one.created_at:%Y-%m-%d %H:%M:%S}Z",
                        one.problem or one.progress,
                    ]
                    for one in found.runs
                ),
                spare=("CREATED", "OUTCOME"),
            )
        for one in found.runs[:MOST_FAILURES]:
            if (last := one.replica) is not None and last.state == ReplicaState.FAILED:
                out.say("")
                out.say(f"run {one.id}")
                failed_replica(out, last.state, last.failure, last.cause, last.log_tail)

    output.result(found, human)
    return Exit.DONE


def _hardware(runner: Runner) -> str:
    machine = runner.fingerprint
    cards = [f"{card.sku} {size(card.memory_bytes)}" for card in machine.accelerators]
    return ", ".join([*cards, f"{machine.cores} × {machine.cpu}", size(machine.memory_bytes)])
