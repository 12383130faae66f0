"""`sluicegate gate`: run gates on a bundle without a release."""

from typing import Annotated

import typer

from registry.cli.documents import read_bundle, read_policy, resolve
from registry.cli.failures import made
from registry.cli.follow import follow_run, run_result
from registry.cli.options import Json, Key, Timeout, Wait, examples, group
from registry.cli.output import Output
from registry.cli.profile import connect
from registry.cli.targets import only_class
from schemas.api import RunCreate

app = group("Gates: measurements with a rule.")


@app.callback()
def _gates() -> None:
    """Gates: measurements with a rule."""


@app.command(
    epilog=examples(
        "sluicegate gate run 3c3aff2a --policy 9c1d77aa --wait",
        "sluicegate gate run 3c3aff2a --policy policy.json --gate golden --gate load --target chat@prod --wait --json",
        "sluicegate gate run 3c3aff2a --policy policy.json --gate rollback --target chat@prod --wait",
    )
)
def run(
    bundle: Annotated[str, typer.Argument(metavar="BUNDLE", help="Digest, or 8 or more of its hexadecimal digits.")],
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
