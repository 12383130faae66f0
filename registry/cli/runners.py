"""`sluicegate runner`: the machines that run models."""

import time
from collections import Counter
from typing import Annotated

import typer

from registry.cli.failures import Exit
from registry.cli.options import Json, Limit, Timeout, examples, group
from registry.cli.output import Output, size
from registry.cli.profile import connect
from registry.cli.replicas import failed_replica
from registry.client import Client
from schemas.api import RunnerDetail
from schemas.problems import Conflict, Usage
from schemas.runner import ReplicaState, Runner
from schemas.stories import job_state

MOST_FAILURES = 5
"""Newest runs of a runner of which a failed engine is told in full."""

INTERVAL_SECONDS = 1.0
"""Between two looks at a runner that drains."""

Seen = Annotated[
    str | None,
    typer.Option("--if-match", help="Generation that `runner show` gave: nothing is done when it has changed since."),
]

app = group("Runners: workers that boot replicas.")


@app.callback()
def _runners() -> None:
    """Runners: workers that boot replicas."""


@app.command("list", epilog=examples("sluicegate runner list", "sluicegate runner list --alive --class h100 --json"))
def list_(
    alive: Annotated[bool, typer.Option("--alive", help="Only those that have been heard of lately.")] = False,
    runner_class: Annotated[str | None, typer.Option("--class", "-c", help="Only those of this class.")] = None,
    limit: Limit = 50,
    as_json: Json = False,
) -> int:
    """List runners with their hardware and what of it is reserved, newest first."""
    output = Output(as_json=as_json)
    with connect() as client:
        everyone = (
            runner
            for runner in client.runners.list()
            if (runner.is_alive or not alive) and runner_class in {None, runner.runner_class}
        )
        found = output.most(everyone, limit)
        project = None if found else client.me().project
    if project is not None:
        which = f" of class {runner_class}" if runner_class else ""
        output.note(
            f"no runner{which} of project {project}{' has been heard of lately' if alive else ''}: "
            "runners belong to a project, that of the token they are started with; "
            f"`sluicegate token create NAME --role runner --project {project}` makes one (SLUICEGATE_RUNNER__TOKEN)",
            "warn",
        )

    def human(out: Output) -> None:
        out.table(
            ["RUNNER", "CLASS", "ALIVE", "LAST SEEN", "ENGINES", "HARDWARE", "RESERVED", "JOBS"],
            (
                [
                    one.name,
                    one.runner_class,
                    _alive(one),
                    f"{one.last_seen_at:%Y-%m-%d %H:%M:%S}Z",
                    ", ".join(one.engines),
                    _hardware(one),
                    _reserved(one),
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
                ("alive", _alive(found)),
                ("last seen", f"{found.last_seen_at:%Y-%m-%d %H:%M:%S}Z"),
                ("registered", f"{found.registered_at:%Y-%m-%d %H:%M:%S}Z"),
                ("engines", ", ".join(found.engines)),
                ("hardware", _hardware(found)),
                ("links", found.fingerprint.links),
                ("driver", _driver(found)),
                ("instructions", found.fingerprint.cpu_flags),
                ("kernel", found.fingerprint.kernel),
                ("reserved", _reserved(found)),
                ("disk left", None if found.disk_free_bytes is None else size(found.disk_free_bytes)),
                ("jobs", f"{len(found.jobs)} of {found.slots}" if found.slots else len(found.jobs)),
                ("generation", found.generation),
            ]
        )
        _say_drain(out, found)
        if found.runs:
            out.say("")
            out.table(
                ["RUN", "KIND", "BUNDLE", "STATE", "OUTCOME", "CREATED", "DOING"],
                (
                    [
                        one.id,
                        one.kind,
                        one.bundle,
                        job_state(one.kind, one.state),
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


@app.command(
    epilog=examples(
        'sluicegate runner drain gpu-1 --reason "a new driver tonight"',
        'sluicegate runner drain gpu-1 --reason "a new driver tonight" --wait --timeout 3600 --json',
        'sluicegate runner drain gpu-1 --reason "it has to be off at six" --deadline 1800',
        'sluicegate runner drain gpu-1 --reason "its cooling fails" --force --yes',
    )
)
def drain(
    runner: Annotated[str, typer.Argument(metavar="RUNNER", help="Name of the runner, or its id.")],
    reason: Annotated[str, typer.Option("--reason", "-r", help="Why; shown with the runner.")],
    wait: Annotated[bool, typer.Option("--wait", help="Wait until it holds nothing any more.")] = False,
    timeout: Timeout = 3600.0,
    deadline: Annotated[
        int | None,
        typer.Option("--deadline", min=0, max=30 * 86_400, help="Seconds after which what it still holds is ended."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="End what it holds now: --deadline 0.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do so although it loses what is said to be lost.")] = False,
    if_match: Seen = None,
    as_json: Json = False,
) -> int:
    """Have a runner take no job any more, and hand over what serves on it.

    Gates end by themselves. A replica that serves goes on until another runner has one that is ready and has its
    traffic, or for as long as there is none. With --deadline or --force what it still holds then is ended: what that
    would lose now is said, and wants --yes. What somebody else drains already wants --if-match.

    Exit status with --wait: 0 it holds nothing; 3 time is up, and what it still holds is said. 4: without --yes.
    """
    output = Output(as_json=as_json)
    if force and deadline:
        raise Usage("--force is --deadline 0: name one of them")
    deadline = 0 if force else deadline
    with connect() as client:
        if deadline is not None:
            _agree(output, client.runners.get(runner), yes=yes)
        drained = client.runners.drain(runner, reason, force_in_seconds=deadline, if_match=if_match)
        # Read as `runner show` reads it, so that a program is told the same fields with --wait and without.
        found = client.runners.get(drained.id)
        if wait:
            found = _emptied(client, output, found, timeout_seconds=timeout)
    output.result(found, lambda out: _say_drain(out, found))
    if not wait or found.drain is None or not found.drain.waits_for:
        return Exit.DONE
    output.note(_goes_on(found), "warn")
    return Exit.UNDECIDED


@app.command(
    epilog=examples(
        'sluicegate runner undrain gpu-1 --reason "the driver is in"',
        "sluicegate runner undrain gpu-1 --json",
    )
)
def undrain(
    runner: Annotated[str, typer.Argument(metavar="RUNNER", help="Name of the runner, or its id.")],
    reason: Annotated[str | None, typer.Option("--reason", "-r", help="Why; shown with the runner.")] = None,
    if_match: Seen = None,
    as_json: Json = False,
) -> int:
    """Let a runner take jobs again, and end what was booted in place of its replicas."""
    output = Output(as_json=as_json)
    with connect() as client:
        # As after `drain`: the same fields as those of `runner show`.
        found = client.runners.get(client.runners.undrain(runner, reason, if_match=if_match).id)
    output.result(found, lambda out: out.say(f"runner {found.name} takes jobs", "good"))
    return Exit.DONE


def _agree(output: Output, runner: RunnerDetail, *, yes: bool) -> None:
    """Say what would be lost. Raises Conflict where nobody said that this is meant."""
    for line in runner.loses:
        output.note(f"loses: {line}")
    if runner.loses and not yes:
        raise Conflict(
            "nothing was done; say --yes to lose this, or leave --deadline and --force out and --wait",
            runner=runner.name,
            loses=runner.loses,
        )


def _emptied(client: Client, output: Output, runner: RunnerDetail, *, timeout_seconds: float) -> RunnerDetail:
    """Wait until a runner that drains holds nothing, or time is up, and say for what. Returns it as it is then."""
    found, started, told = runner, time.monotonic(), set[str]()
    try:
        while found.drain is not None and found.drain.waits_for:
            left = timeout_seconds - (time.monotonic() - started)
            if left <= 0:
                break
            for line in found.drain.waits_for:
                if line not in told:
                    told.add(line)
                    output.note(f"waits for {line}")
            time.sleep(min(INTERVAL_SECONDS, left))
            found = client.runners.get(found.id)
    except KeyboardInterrupt:
        output.note(f"only the waiting ended; {_goes_on(found)}", "warn")
        raise
    return found


def _goes_on(runner: Runner) -> str:
    show, undrain = (f"`sluicegate runner {act} {runner.name}`" for act in ("show", "undrain"))
    return f"it drains on: {show} says what for, {undrain} ends it"


def _alive(runner: Runner) -> str:
    return ("yes" if runner.is_alive else "no") + (", drained" if runner.drain is not None else "")


def _say_drain(output: Output, runner: Runner) -> None:
    if runner.drain is None:
        if (again := runner.undrained) is not None:
            why = f": {again.reason}" if again.reason else ""
            output.say(f"takes jobs again since {again.since:%Y-%m-%d %H:%M:%S}Z, let by {again.by}{why}")
        return
    output.say(
        f"drained by {runner.drain.by} at {runner.drain.since:%Y-%m-%d %H:%M:%S}Z: {runner.drain.reason}", "warn"
    )
    if runner.drain.empty_at is not None:
        output.say(f"what it holds at {runner.drain.empty_at:%Y-%m-%d %H:%M:%S}Z is ended", "warn")
    for line in runner.drain.waits_for:
        output.say(f"waits for {line}", "warn")
    if not runner.drain.waits_for:
        output.say("it holds nothing", "good")


def _driver(runner: Runner) -> str | None:
    machine = runner.fingerprint
    return machine.driver and f"{machine.driver}{f', CUDA {machine.cuda}' if machine.cuda else ''}"


def _reserved(runner: Runner) -> str:
    machine, held = runner.fingerprint, runner.reserved
    if machine.accelerators:
        return f"{len(held.accelerators)} of {len(machine.accelerators)}"
    return size(held.memory_bytes) if held.memory_bytes else "nothing"


def _hardware(runner: Runner) -> str:
    machine = runner.fingerprint
    kinds = Counter(
        f"{card.sku}{f' as {card.mig}' if card.mig else ''} {size(card.memory_bytes)}" for card in machine.accelerators
    )
    cards = [f"{count} × {kind}" for kind, count in kinds.items()]
    return ", ".join([*cards, f"{machine.cores} × {machine.cpu}", size(machine.memory_bytes)])
