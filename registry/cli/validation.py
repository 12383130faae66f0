"""`sluicegate bundle validate`: the static gate over a directory, here and without a service."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gates.directory import DirectoryRefused
from gates.sources.source import SourceRefused, SourceUnavailable, bare
from registry.cli.composed import composed
from registry.cli.documents import read_file
from registry.cli.failures import Exit
from registry.cli.inferred import say
from registry.cli.options import Json, examples
from registry.cli.output import Output
from registry.cli.sources import AllowHost, CacheFolder, From, SourceName, WeightsPattern, given, not_a_bundle
from registry.cli.strange import refuse_wrong
from schemas.problems import InvalidDocument, Usage
from schemas.short import agreeing, many

if TYPE_CHECKING:
    from gates.static.declared import Declared
    from gates.static.examine import Examined

EXAMPLES = examples(
    "sluicegate bundle validate ./gemma",
    "sluicegate bundle validate ./qwen -f bundle.yaml --json",
    "sluicegate bundle validate ./qwen --engine vllm --engine-version 0.32.0 --arg --max-model-len --arg 32768",
    "sluicegate bundle validate ./gguf/qwen-q4_k_m.gguf",
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
EngineName = Annotated[
    str | None, typer.Option("--engine", help="Engine that the files are held against, before what -f says.")
]
EngineVersion = Annotated[str | None, typer.Option("--engine-version", help="Version of the engine.")]
Words = Annotated[
    list[str] | None,
    typer.Option("--arg", metavar="WORD", help="One launch argument, as it stands; repeat it for each word."),
]
WithDigest = Annotated[
    bool, typer.Option("--digest", help="Also hash the tensors that an engine would load, whatever files they are in.")
]


def validate(
    source: SourceName,
    part: From = None,
    file: DeclaredFile = None,
    engine: EngineName = None,
    arg: Words = None,
    engine_version: EngineVersion = None,
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
    directories. What options say of the engine comes before it. The source may be one file of weights too. Parts that
    come from elsewhere, by --from or under "from" of that file, are checked with the base as `bundle create` would put
    them together.
    """
    # Only where it is asked for: it brings in what reads tensors, and takes a moment.
    from gates.static import examine, report

    output = Output(as_json=as_json)
    declared, parts = declared_in(file)
    declared = _with_engine(declared, engine, engine_version, arg)
    asked = given(source, part, parts, allow_host, cache)
    if asked.directory is not None and not asked.directory.is_dir() and not is_weights(asked.directory):
        raise Usage(f"{source} is neither a directory nor a file of weights (.gguf or .safetensors)")
    if asked.directory is not None:
        _refuse_cache(asked.directory)
    try:
        with composed(asked, declared, output, file=file, weights=weights) as what:
            found = examine.examine(what, with_digest=digest)
    except DirectoryRefused as refused:
        found = _of_choice(asked.base, refused)
    except OSError as error:
        return _unread(output, f"{error.filename or bare(source)} cannot be read: {error.strerror or error}")
    if junit is not None:
        _write(junit, report.as_junit(found, bare(source) if asked.directory is None else Path(source).resolve().name))
    if sarif is not None:
        _write(sarif, json.dumps(report.as_sarif(found), indent=2, ensure_ascii=False).encode() + b"\n")
    output.result(report.as_json(found), lambda out: _say(out, source, found))
    return Exit.FAILED if found.verdict == "failed" else Exit.DONE


def _of_choice(source: str, refused: DirectoryRefused) -> "Examined":
    """Return the findings of a choice of files that was refused. Raises InvalidDocument where it is not about them."""
    from gates.static import refusals  # as above

    about_source = any(isinstance(one, SourceRefused | SourceUnavailable) for one in refused.refusals)
    found = None if about_source else refusals.examined(refused.refusals)
    if found is None:
        raise not_a_bundle(source, refused) from None
    return found


def declared_in(file: Path | None) -> "tuple[Declared, object]":
    """Return what a file of `-f` declares, nothing without one, and what it has under "from".

    Raises Usage, InvalidDocument.
    """
    from gates.static.declared import read_declared  # as above

    if file is None:
        return read_declared({}), None
    document = read_file(file)
    if document is None:
        document = {}
    if not isinstance(document, dict):
        raise InvalidDocument(f"{file} is not an object")
    refuse_wrong(document, str(file))
    return read_declared(document), document.get("from")


def _with_engine(
    declared: "Declared", name: str | None, version: str | None, words: Sequence[str] | None
) -> "Declared":
    """Return a declaration with what options say of the engine; launch arguments are added to those of the file."""
    from gates.static.declared import ENGINE_NAMES, Arguments  # as above

    told = declared.engine if name is None else ENGINE_NAMES.get(name.lower(), name.lower())
    return replace(
        declared,
        engine=told,
        # A version belongs to the engine that it was said of.
        version=version or (declared.version if told == declared.engine else None),
        arguments=Arguments((*declared.arguments.words, *(words or ()))),
    )


def _refuse_cache(place: Path) -> None:
    """Say which folder of the Hub's cache holds a repository's files. Raises Usage."""
    snapshots = sorted((place / "snapshots").glob("*")) if (place / "blobs").is_dir() else []
    if snapshots:
        raise Usage(f"{place} is a repository in the Hub's cache; its files are in {snapshots[-1]}")


def is_weights(place: Path) -> bool:
    """Tell whether a place is a file that holds weights, by its name."""
    return place.is_file() and place.suffix in {".gguf", ".safetensors"}


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
        place = " ".join(part for part in (one.file, one.pointer) if part)
        out.say(f"{one.severity.value:5} {one.code}  {place}".rstrip(), _TONES[one.severity.value])
        out.say(f"      {one.message}")
        out.say(f"      → {one.advice}")
    if found.inferred:
        say(out, found.inferred)
    counts = {name: sum(1 for one in found.flaws if one.severity.value == name) for name in _TONES}
    verbs = {"block": agreeing(counts["block"], "blocks", "block"), "warn": agreeing(counts["warn"], "warns", "warn")}
    told = [(count, verbs.get(name, "to know")) for name, count in counts.items() if count]
    words = ", ".join(f"{many(n, 'finding') if not place else n} {verb}" for place, (n, verb) in enumerate(told))
    words = words or "nothing to tell"
    if found.verdict == "failed":
        out.say(f"{bare(source)}: failed: {words}", "bad")
    else:
        out.say(f"{bare(source)}: passed: {words}", "good")
