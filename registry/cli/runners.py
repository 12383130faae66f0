"""`sluicegate runner`: the machines that run models."""

from typing import Annotated

import typer

from registry.cli.failures import Exit
from registry.cli.options import Json, Limit, examples, group
from registry.cli.output import Output, size
from registry.cli.profile import connect
from schemas.runner import Runner

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


def _hardware(runner: Runner) -> str:
    machine = runner.fingerprint
    cards = [f"{card.sku} {size(card.memory_bytes)}" for card in machine.accelerators]
    return ", ".join([*cards, f"{machine.cores} × {machine.cpu}", size(machine.memory_bytes)])
