"""`sluicegate policy`: push one, look at one."""

from pathlib import Path
from typing import Annotated

import typer

from registry.cli.documents import read_policy, resolve
from registry.cli.failures import Exit
from registry.cli.options import Json, Limit, examples, group
from registry.cli.output import Output, none, percent
from registry.cli.profile import connect
from schemas.api import Registered
from schemas.policy import Policy
from schemas.short import span
from schemas.words import condition, limits

APPROVERS = {0: "none", 1: "1, by somebody other than the author"}

app = group("Policies: which gates with which limits, how traffic moves, who approves.")


@app.command(epilog=examples("sluicegate policy push policy.json", "sluicegate policy push policy.toml --json"))
def push(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The policy, in JSON, TOML or YAML.")],
    as_json: Json = False,
) -> int:
    """Register a policy. Its form is checked here, whether it can decide by the service; it is frozen from then on."""
    output = Output(as_json=as_json)
    policy = read_policy(file)
    with connect() as client:
        registered, is_new = client.policies.register(policy)
    say_pushed(output, registered, is_new=is_new)
    return Exit.DONE


def say_pushed(output: Output, registered: Registered, *, is_new: bool) -> None:
    """Say that a document is registered."""
    told = {"digest": registered.digest, "name": registered.name, "is_new": is_new}

    def human(out: Output) -> None:
        out.say(f"{'registered' if is_new else 'was there already'}: {registered.name}", "good")
        out.fields([("digest", registered.digest)])

    output.result(told, human)


@app.command(epilog=examples("sluicegate policy show 9c1d77aa", "sluicegate policy show 9c1d77aa --json"))
def show(
    policy: Annotated[
        str | None,
        typer.Argument(metavar="POLICY", help="Digest, 8 or more of its digits, or a file. All policies when absent."),
    ] = None,
    limit: Limit = 200,
    as_json: Json = False,
) -> int:
    """Show a policy, or list all of them."""
    output = Output(as_json=as_json)
    with connect() as client:
        if policy is None:
            everything = output.most(client.policies.list(), limit)
            output.result({"items": everything}, lambda out: show_list(out, everything, "policy"))
            return Exit.DONE
        found = client.policies.get(resolve(policy, client.policies, read_policy, "policy"))
    output.result(found, lambda out: _show(out, found))
    return Exit.DONE


@app.command("list", epilog=examples("sluicegate policy list", "sluicegate policy list --json"))
def list_(limit: Limit = 50, as_json: Json = False) -> int:
    """List policies, newest first."""
    output = Output(as_json=as_json)
    with connect() as client:
        found = output.most(client.policies.list(), limit)
    output.result({"items": found}, lambda out: show_list(out, found, "policy"))
    return Exit.DONE


def show_list(out: Output, found: list[Registered], what: str) -> None:
    """Print a list of policies or suites."""
    out.table(
        ["NAME", "KIND", "DIGEST", "CREATED", "BY"],
        (
            [
                one.name,
                one.schema_id.removeprefix("sluicegate.dev/").removesuffix("/v1"),
                one.digest,
                f"{one.created_at:%Y-%m-%d %H:%M:%S}Z",
                one.created_by,
            ]
            for one in found
        ),
        empty=none(what, f"{what} push"),
        spare=("BY", "CREATED"),
    )


def _show(out: Output, found: Registered) -> None:
    policy = Policy.model_validate(found.document)
    out.fields(
        [
            ("name", policy.name),
            ("digest", found.digest),
            ("description", policy.description),
            ("registered", f"{found.created_at:%Y-%m-%d %H:%M:%S}Z by {found.created_by}"),
            (
                "approvals",
                APPROVERS.get(
                    policy.approval.required, f"{policy.approval.required}, each by another manager, none by the author"
                ),
            ),
            ("soak", span(policy.canary.soak_seconds)),
            ("evidence", f"counts for {span(policy.evidence_seconds)}"),
        ]
    )
    out.say("")
    out.table(
        ["GATE", "LIMITS"], ([rule.gate, ", ".join(_told(*one) for one in limits(rule))] for rule in policy.gates)
    )
    out.say("")
    out.table(
        ["STEP", "TRAFFIC", "AT LEAST", "REQUESTS", "AT MOST"],
        (
            [place, percent(step.weight_bp), span(step.hold_seconds), step.min_requests, span(step.max_seconds)]
            for place, step in enumerate(policy.canary.steps, start=1)
        ),
    )
    out.say("")
    out.table(["TAKEN BACK WHEN"], ([condition(one)] for one in policy.canary.stop_conditions))


def _told(name: str, value: str) -> str:
    return f"{name} {value[:19] if name == 'suite' else value}"
