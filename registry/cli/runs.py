"""`sluicegate gate`: run gates on a bundle without a release, come back to a run, list them."""

from typing import Annotated

import typer

from registry.cli.documents import read_bundle, read_policy, resolve, resolve_id, resolve_release
from registry.cli.failures import Exit, made
from registry.cli.follow import follow_run, run_result
from registry.cli.options import BundleName, Json, Key, Limit, Reason, Timeout, Wait, examples, group
from registry.cli.output import Output, none
from registry.cli.profile import connect
from registry.cli.targets import only_class
from schemas.api import Run, RunCreate

app = group("Gates: measurements with a rule.")


@app.command(
    epilog=examples(
        "sluicegate gate run 3c3aff2a --policy 9c1d77aa --wait",
        "sluicegate gate run 3c3aff2a --policy policy.json --gate golden --gate load --target chat@prod --wait --json",
        "sluicegate gate run 3c3aff2a --policy policy.json --gate rollback --target chat@prod --wait",
    )
)
def run(
    bundle: BundleName,
    policy: Annotated[
        str, typer.Option("--policy", "-p", help="Whose rules apply: digest, 8 or more of its digits, or a file.")
    ],
    gate: Annotated[list[str] | None, typer.Option("--gate", "-g", help="Only this gate; repeatable.")] = None,
    target: Annotated[
        str | None,
        typer.Option("--target", "-t", help="Target whose references, accepted bundle and runners are used."),
    ] = None,
    runner_class: Annotated[str | None, typer.Option("--runner-class", help="Runners that shall run it.")] = None,
    key: Key = None,
    wait: Wait = False,
    timeout: Timeout = 3600.0,
    as_json: Json = False,
) -> int:
    """Run a policy's gates on a bundle. Nothing is released.

    The gates golden and rollback need a target: one compares with its reference, one goes back to what it has accepted.

    Exit status with --wait: 0 all passed; 1 one failed; 3 one is inconclusive or errored, or time is up.
    """
    output = Output(as_json=as_json)
    with connect() as client:
        if runner_class is None:
            runner_class = client.targets.get(target).runner_class if target is not None else only_class(client)
        body = made(
            RunCreate,
            "the run",
            bundle=resolve(bundle, client.bundles, read_bundle, "bundle"),
            policy=resolve(policy, client.policies, read_policy, "policy"),
            runner_class=runner_class,
            gates=gate or None,
            target=target,
        )
        started = client.runs.create(body, key=key)
        if not wait:
            return run_result(output, started)
        output.note(f"run {started.id}")
        return follow_run(client, output, started, timeout_seconds=timeout)


@app.command(
    epilog=examples(
        "sluicegate gate watch 01a2289b-8894-74d9-8d4f-da769c0550b2",
        "sluicegate gate watch 01a2289b-8894 --timeout 600 --json",
    )
)
def watch(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="Id of the run, or its beginning, as far as no other has it.")
    ],
    timeout: Timeout = 3600.0,
    as_json: Json = False,
) -> int:
    """Follow a run that was started before, also a recording, until it is over.

    Exit status: 0 all gates passed, or the reference is recorded; 1 a gate failed; 3 undecided, or time is up.
    """
    output = Output(as_json=as_json)
    with connect() as client:
        found = client.runs.get(resolve_id(run, "run", ((one.id, _told(one)) for one in client.runs.list())))
        return follow_run(client, output, found, timeout_seconds=timeout)


@app.command(epilog=examples('sluicegate gate cancel 01a2289b-8894 --reason "no runner is of that class"'))
def cancel(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="Id of the run, or its beginning, as far as no other has it.")
    ],
    reason: Reason,
    as_json: Json = False,
) -> int:
    """Cancel a run that belongs to no release, also a recording. A runner that holds it stops."""
    output = Output(as_json=as_json)
    with connect() as client:
        identity = resolve_id(run, "run", ((one.id, _told(one)) for one in client.runs.list()))
        found = client.runs.cancel(identity, reason)
    said = "cancelled" if found.state == "cancelled" else "its runner is told to stop; no later gate counts"
    output.result(found, lambda out: out.say(f"run {found.id}: {said}", "warn"))
    return Exit.DONE


def _told(one: Run) -> str:
    """Return what tells a run from another whose id begins alike."""
    return f"{one.kind} of {one.bundle[7:19]}, {one.outcome or one.state}, created {one.created_at:%Y-%m-%d %H:%M:%S}Z"


@app.command("list", epilog=examples("sluicegate gate list", "sluicegate gate list --release 01a2289b-8894 --json"))
def list_(
    release: Annotated[str | None, typer.Option("--release", help="Only of this release.")] = None,
    limit: Limit = 50,
    as_json: Json = False,
) -> int:
    """List runs, newest first: of gates, of recordings, and of replicas that serve."""
    output = Output(as_json=as_json)
    with connect() as client:
        of = None if release is None else resolve_release(release, client)
        found = output.most(client.runs.list(release=of), limit)

    def human(out: Output) -> None:
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
                for one in found
            ),
            empty=none("run", "gate run", is_asked=release is not None),
            spare=("CREATED",),
        )

    output.result({"items": found}, human)
    return Exit.DONE
