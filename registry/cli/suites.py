"""`sluicegate suite`: push one, look at one, record what an accepted bundle answers to it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from registry.cli.documents import read_bundle, read_document, read_file, require_kind, resolve
from registry.cli.failures import Exit, invalid, made
from registry.cli.follow import follow_run, run_result
from registry.cli.options import Json, Key, Limit, Reason, Timeout, Wait, examples, group
from registry.cli.output import Output
from registry.cli.policies import say_pushed, show_list
from registry.cli.profile import connect
from registry.client import Client
from schemas.api import RecordCreate, Registered
from schemas.problems import InvalidDocument
from schemas.reference import Reference
from schemas.short import many
from schemas.suite import SUITE, AnySuite, GoldenSuite, LoadSpec, LoadSuite, StructuredSuite
from schemas.words import suite_facts

app = group("Suites: prompts and arrival plans that gates run.")

SPEC_KEYS = ("rate_per_second", "requests", "warmup_requests", "distribution")
"""Keys that only a load spec has: a document with one of them and no schema is read as one."""

MOST_ASKED = 60
"""Characters of a prompt that a table shows."""

SuiteName = Annotated[str, typer.Argument(metavar="SUITE", help="Digest, 8 or more of its digits, or a file.")]


@app.command(epilog=examples("sluicegate suite push golden.json", "sluicegate suite push load-spec.json --json"))
def push(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A suite, or a load spec, in JSON, TOML or YAML.")],
    as_json: Json = False,
) -> int:
    """Register a golden, a load or a structured suite.

    A document without "schema" is a load spec: name, prompts, rate_per_second, requests, warmup_requests,
    distribution, shape, seed and request_seconds. It is drawn into a plan of arrivals here. The same spec gives
    the same plan.
    """
    output = Output(as_json=as_json)
    suite = read_suite(file)
    with connect() as client:
        registered, is_new = client.suites.register(suite)
    say_pushed(output, registered, is_new=is_new)
    return Exit.DONE


def read_suite(file: Path) -> AnySuite:
    """Return a file's suite, drawn when it is a load spec. Raises Usage, InvalidDocument."""
    value = read_file(file)
    require_kind(file, value, "suite")
    if isinstance(value, dict) and "schema" not in value:
        if not any(key in value for key in SPEC_KEYS):
            raise InvalidDocument(
                f'{file}: neither a suite, which has "schema", nor a load spec, which has {", ".join(SPEC_KEYS)}'
            )
        return _drawn(file, value)
    try:
        return SUITE.validate_python(value)
    except ValidationError as error:
        raise invalid(str(file), error, value, SUITE) from None


def _drawn(file: Path, value: Any) -> LoadSuite:
    # Statistics take a second to load, and only a spec needs them.
    from gates.arrivals import make_suite

    try:
        return make_suite(LoadSpec.model_validate(value))
    except ValidationError as error:
        raise invalid(str(file), error, value, LoadSpec) from None
    except ValueError as error:
        raise InvalidDocument(f"{file}: {error}") from None


@app.command(epilog=examples("sluicegate suite show 51ab00c2", "sluicegate suite show golden.json --json"))
def show(
    suite: Annotated[
        str | None,
        typer.Argument(metavar="SUITE", help="Digest, 8 or more of its digits, or a file. All suites when absent."),
    ] = None,
    limit: Limit = 200,
    as_json: Json = False,
) -> int:
    """Show a suite, or list all of them."""
    output = Output(as_json=as_json)
    with connect() as client:
        if suite is None:
            everything = output.most(client.suites.list(), limit)
            output.result({"items": everything}, lambda out: show_list(out, everything, "suite"))
            return Exit.DONE
        found = client.suites.get(resolve(suite, client.suites, read_suite, "suite"))
    output.result(found, lambda out: _show(out, found))
    return Exit.DONE


@app.command(
    epilog=examples("sluicegate suite reference 7be1c0d2", "sluicegate suite reference 7be1c0d2 --json"),
)
def reference(
    reference: Annotated[
        str,
        typer.Argument(metavar="REFERENCE", help="Digest, or 8 or more of its digits; `target show` lists them."),
    ],
    as_json: Json = False,
) -> int:
    """Show a golden reference: what the accepted bundle answered to each prompt of the suite."""
    output = Output(as_json=as_json)
    with connect() as client:
        found = client.references.get(resolve(reference, client.references, _read_reference, "reference"))
        asked = None if as_json else _asked(client, Reference.model_validate(found.document).suite)
    output.result(found, lambda out: _show_reference(out, found, asked or {}))
    return Exit.DONE


def _read_reference(file: Path) -> Reference:
    return read_document(file, Reference)


def _asked(client: Client, suite: str) -> dict[str, str]:
    """Return the beginning of each golden prompt's last message, by the prompt's id."""
    document = SUITE.validate_python(client.suites.get(suite).document)
    prompts = document.prompts if isinstance(document, GoldenSuite) else []
    texts = {one.id: " ".join(one.messages[-1].content.split()) for one in prompts}
    return {name: text if len(text) <= MOST_ASKED else f"{text[:MOST_ASKED]}…" for name, text in texts.items()}


def _show_reference(out: Output, found: Registered, asked: Mapping[str, str]) -> None:
    said = Reference.model_validate(found.document)
    noise, prompts = said.noise, many(len(said.recordings), "prompt")
    out.fields(
        [
            ("reference", found.digest),
            ("suite", said.suite),
            ("bundle", said.bundle),
            ("engine", said.engine),
            ("hardware", said.hardware),
            ("noise", f"{noise.diverging_prompts} of {prompts} diverging over {many(noise.repeats, 'repeat')}"),
        ]
    )
    out.say("")
    out.table(
        ["PROMPT", "ASKED", "TOKENS", "ENDS", "ANSWER"],
        (
            [
                one.prompt,
                asked.get(one.prompt),
                len(one.output),
                one.finish_reason,
                "".join(token.text for token in one.output),
            ]
            for one in said.recordings
        ),
    )


@app.command("list", epilog=examples("sluicegate suite list", "sluicegate suite list --json"))
def list_(limit: Limit = 50, as_json: Json = False) -> int:
    """List suites, newest first."""
    output = Output(as_json=as_json)
    with connect() as client:
        found = output.most(client.suites.list(), limit)
    output.result({"items": found}, lambda out: show_list(out, found, "suite"))
    return Exit.DONE


def _show(out: Output, found: Registered) -> None:
    suite = SUITE.validate_python(found.document)
    asked = suite.items if isinstance(suite, StructuredSuite) else suite.prompts
    by = f"{found.created_at:%Y-%m-%d %H:%M:%S}Z by {found.created_by}"
    told = [("name", suite.name), ("digest", found.digest), ("description", suite.description), ("registered", by)]
    out.fields([*told, *suite_facts(suite)])
    out.say("")
    out.table(
        ["PROMPT", "TOKENS", "LAST MESSAGE"],
        ([one.id, one.max_tokens, one.messages[-1].content[:80]] for one in asked),
    )


@app.command(
    epilog=examples(
        'sluicegate suite record 51ab00c2 --bundle 3c3aff2a --target chat@prod --reason "accepted in June" --wait',
        'sluicegate suite record 51ab00c2 --bundle 9d01ab77 --target chat@prod --expect 7be1c0d2 --reason "better"',
    )
)
def record(
    suite: SuiteName,
    bundle: Annotated[
        str, typer.Option("--bundle", "-b", help="What shall answer: digest, 8 or more of its digits, or @ALIAS.")
    ],
    target: Annotated[str, typer.Option("--target", "-t", help="Target that gets the reference, as NAME@ENVIRONMENT.")],
    reason: Reason,
    expect: Annotated[
        str | None,
        typer.Option(
            "--expect",
            metavar="REFERENCE",
            help="Reference that is in force now, as `target show` gave it; without this, the first is recorded.",
        ),
    ] = None,
    if_match: Annotated[
        str | None,
        typer.Option(
            "--if-match",
            help="Generation that `target show` gave: nothing is done when the target has changed since.",
        ),
    ] = None,
    key: Key = None,
    wait: Wait = False,
    timeout: Timeout = 1800.0,
    as_json: Json = False,
) -> int:
    """Record what a bundle answers to a golden suite, as the reference of a target.

    It takes the place of the one that you saw to be in force, and of no other: of two who set it at once, one does.
    """
    output = Output(as_json=as_json)
    with connect() as client:
        body = made(
            RecordCreate,
            "the recording",
            suite=resolve(suite, client.suites, read_suite, "suite"),
            bundle=resolve(bundle, client.bundles, read_bundle, "bundle"),
            target=target,
            expected=None if expect is None else resolve(expect, client.references, _read_reference, "reference"),
            reason=reason,
        )
        run = client.runs.record(body, key=key, if_match=if_match)
        if not wait:
            return run_result(output, run)
        output.note(f"run {run.id}")
        return follow_run(client, output, run, timeout_seconds=timeout)
