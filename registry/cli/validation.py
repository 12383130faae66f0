"""`sluicegate bundle validate`: the static gate over a directory, here and without a service."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gates.sources.source import bare
from registry.cli.composed import composed
from registry.cli.documents import read_file
from registry.cli.failures import Exit, Usage
from registry.cli.inferred import say
from registry.cli.options import Json, examples
from registry.cli.output import Output
from registry.cli.sources import AllowHost, CacheFolder, From, SourceName, WeightsPattern, given
from schemas.problems import InvalidDocument

if TYPE_CHECKING:
    from gates.static.declared import Declared
    from gates.static.examine import Examined

EXAMPLES = examples(
    "sluicegate bundle validate ./gemma",
    "sluicegate bundle validate ./qwen -f bundle.yaml --json",
    "sluicegate bundle validate hf:owner/name@main -f bundle.yaml",
    "sluicegate bundle validate hf:org/base@v1 --from tokenizer=hf:org/tok --from adapter:de=./lora",
    "sluicegate bundle validate ./qwen -f bundle.yaml --junit report.xml --sarif report.sarif",
)
_TONES = {"block": "bad", "warn": "warn", "info": "plain"}

DeclaredFile = Annotated[
    Path | None,
    typer.Option(
        "--file", "-f", help="YAML, JSON or TOML file: engine, topology, hardware, adapters, draft, features, name."
    ),
]
JUnit = Annotated[Path | None, typer.Option("--junit", metavar="FILE", help="Also write a JUnit report there.")]
Sarif = Annotated[Path | None, typer.Option("--sarif", metavar="FILE", help="Also write a SARIF log there.")]
WithDigest = Annotated[
    bool, typer.Option("--digest", help="Also hash the tensors that an engine would load, whatever files they are in.")
]


def validate(
    source: SourceName,
    part: From = None,
    file: DeclaredFile = None,
    junit: JUnit = None,
    sarif: Sarif = None,
    digest: WithDigest = False,
    weights: WeightsPattern = None,
    allow_host: AllowHost = None,
    cache: CacheFolder = None,
    as_json: Json = False,
) -> int:
    """Check that a source's files fit each other, the engine and the layout, without a service.

    Exit status: 0 when nothing blocks, 1 when something does, 2 for usage, 3 when the files cannot be read.
    With -f comes what the files cannot tell, in the form of a bundle document or a part of one; adapters map names to
    directories. Parts that come from elsewhere, by --from or under "from" of that file, are checked with the base as
    `bundle create` would put them together.
    """
    # Only where it is asked for: it brings in what reads tensors, and takes a moment.
    from gates.static import examine, report

    output = Output(as_json=as_json)
    declared, parts = declared_in(file)
    asked = given(source, part, parts, allow_host, cache)
    if asked.directory is not None and not asked.directory.is_dir():
        raise Usage(f"{source} is not a directory")
    try:
        with composed(asked, declared, output, file=file, weights=weights) as what:
            found = examine.examine(what, with_digest=digest)
    except OSError as error:
        return _unread(output, f"{error.filename or bare(source)} cannot be read: {error.strerror or error}")
    if junit is not None:
        _write(junit, report.as_junit(found, bare(source) if asked.directory is None else Path(source).resolve().name))
    if sarif is not None:
        _write(sarif, json.dumps(report.as_sarif(found), indent=2, ensure_ascii=False).encode() + b"\n")
    output.result(report.as_json(found), lambda out: _say(out, source, found))
    return Exit.FAILED if found.verdict == "failed" else Exit.DONE


def declared_in(file: Path | None) -> "tuple[Declared, object]":
    """Return what a file of `-f` declares, nothing without one, and what it has under "from".

    Raises Usage, InvalidDocument.
    """
    from gates.static.declared import DeclaredError, read_declared  # as above

    if file is None:
        return read_declared({}), None
    document = read_file(file)
    if document is None:
        document = {}
    if not isinstance(document, dict):
        raise InvalidDocument(f"{file} is not an object")
    try:
        return read_declared(document), document.get("from")
    except DeclaredError as error:
        raise InvalidDocument(
            f"{file} cannot be read as a declaration", errors=[{"pointer": error.pointer, "detail": error.detail}]
        ) from None


def _unread(output: Output, reason: str) -> int:
    from gates.static import report  # as above

    output.result(report.errored(reason), lambda out: out.note(f"errored: {reason}", "bad"))
    return Exit.UNDECIDED


def _write(place: Path, raw: bytes) -> None:
    try:
        place.write_bytes(raw)
    except OSError as error:
        raise Usage(f"{place} cannot be written: {error.strerror}") from None


def _say(out: Output, source: str, found: "Examined") -> None:
    for one in found.flaws:
        out.say(f"{one.severity.value:5} {one.code}  {one.file or ''}", _TONES[one.severity.value])
        out.say(f"      {one.message}")
        out.say(f"      → {one.advice}")
    say(out, found.inferred)
    counts = {name: sum(1 for one in found.flaws if one.severity.value == name) for name in _TONES}
    words = f"{counts['block']} block, {counts['warn']} warn, {counts['info']} to know"
    if found.verdict == "failed":
        out.say(f"{bare(source)}: failed: {words}", "bad")
    else:
        out.say(f"{bare(source)}: passed: {words}", "good")
