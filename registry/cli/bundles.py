"""`sluicegate bundle`: make one from its sources, check one, look at one, list them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from gates.directory import Contents, DirectoryRefused, Found
from gates.inference import EngineChoice, bundle_document, merge
from registry.cli import sources
from registry.cli.boots import show_boots
from registry.cli.comparison import DIFF_EXAMPLES, IMPACT_EXAMPLES, diff, impact
from registry.cli.declarations import as_patch
from registry.cli.documents import read_bundle, read_file, resolve
from registry.cli.failures import Exit, invalid, invalid_act
from registry.cli.files import digest_of
from registry.cli.inferred import infer, say, warn
from registry.cli.memory import HashMemory
from registry.cli.options import BundleName, Json, Limit, Reason, examples, group
from registry.cli.output import Clock, Output, none, plain, size
from registry.cli.placement import EXAMPLES as PLAN_EXAMPLES
from registry.cli.placement import plan
from registry.cli.profile import connect, folder
from registry.cli.quarantine import LIFT_EXAMPLES, QUARANTINE_EXAMPLES, lift, quarantine, show_quarantine
from registry.cli.sources import AllowHost, CacheFolder, From, Gathered, Given, SourceName, WeightsPattern
from registry.cli.strange import refuse_strange
from registry.cli.validation import EXAMPLES, validate
from registry.client import Client
from schemas.api import LockedSource, Registered
from schemas.bundle import COMPONENTS, Bundle, Role
from schemas.problems import BlobsMissing, DigestMismatch, InvalidDocument, Usage
from schemas.short import many

app = group("Bundles: everything that decides what is served, named by one digest.")
app.command("validate", epilog=EXAMPLES)(validate)
app.command("plan", epilog=PLAN_EXAMPLES)(plan)
app.command("diff", epilog=DIFF_EXAMPLES)(diff)
app.command("impact", epilog=IMPACT_EXAMPLES)(impact)
app.command("quarantine", epilog=QUARANTINE_EXAMPLES)(quarantine)
app.command("lift", epilog=LIFT_EXAMPLES)(lift)

GivenName = Annotated[str | None, typer.Option("--name", "-n", help="Name of the bundle; otherwise the weights' own.")]
OverlayFile = Annotated[
    Path | None, typer.Option("--file", "-f", help="YAML, JSON or TOML file with what the files cannot tell.")
]
EngineName = Annotated[str, typer.Option("--engine", help="Engine that shall serve.")]
Words = Annotated[
    list[str] | None,
    typer.Option("--arg", metavar="WORD", help="One launch argument, as it stands; repeat it for each word."),
]
EngineVersion = Annotated[str | None, typer.Option("--engine-version", help="Version of the engine.")]
EngineEnvironment = Annotated[
    str | None,
    typer.Option(
        "--engine-environment",
        metavar="DIGEST",
        help="Digest of the engine's environment; otherwise the one installed here.",
    ),
]
EngineImage = Annotated[
    str | None,
    typer.Option("--engine-image", metavar="IMAGE", help="Image that holds the engine, as NAME@sha256:…."),
]
GivenLabels = Annotated[
    list[str] | None,
    typer.Option("--label", metavar="NAME=VALUE", help="Label that it is found by; repeatable."),
]
GivenLicence = Annotated[str | None, typer.Option("--licence", "--license", help="SPDX identifier, or LicenseRef-….")]
Patterns = Annotated[
    list[str] | None,
    typer.Option("--exclude", metavar="PATTERN", help="Paths to leave out, such as 'original/*'; repeatable."),
]
HardLinks = Annotated[bool, typer.Option("--hard-links", help="Take files that have another name elsewhere.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show the document; send nothing.")]
# Engines whose environment the repository's Makefile builds.
_MADE = frozenset({"transformers", "vllm"})
# Distribution whose files are the engine, where it runs from a Python environment on this machine.
_DISTRIBUTIONS = {"llamacpp": "xllamacpp"}
_ELSEWHERE = "external"
"""An engine that nothing here starts, and so nothing here can name."""
_LISTED = 20
_AGAIN = "nothing was registered; the same command goes on from here: files that were hashed or sent are not again"


@dataclass(frozen=True, slots=True)
class _Asked:
    """What the command line and the file of `-f` say."""

    given: Given
    name: str | None
    engine: EngineChoice
    overlay: Mapping[str, Any]
    roles: Mapping[str, Role]
    exclude: tuple[str, ...]
    weights: str | None


@app.command(
    epilog=examples(
        "sluicegate bundle create ./gemma --name gemma-270m",
        "sluicegate bundle create ./gemma --name gemma-270m --arg --threads --arg 2 --licence LicenseRef-gemma",
        "sluicegate bundle create ./qwen-gguf --name qwen --weights q4_k_m",
        "sluicegate bundle create hf:unsloth/gemma-3-270m-it-GGUF@main --name gemma-270m --weights q8_0",
        "sluicegate bundle create hf:org/base@v1 --name base --from tokenizer=hf:org/tok --from adapter:de=./lora",
        "sluicegate bundle create ./qwen -f bundle.toml --label team=search --exclude 'assets/*' --json",
        "sluicegate bundle create ./gemma --name gemma-270m --dry-run --json > bundle.json",
    )
)
def create(
    source: SourceName,
    part: From = None,
    name: GivenName = None,
    file: OverlayFile = None,
    engine: EngineName = "llamacpp",
    arg: Words = None,
    engine_version: EngineVersion = None,
    engine_environment: EngineEnvironment = None,
    engine_image: EngineImage = None,
    licence: GivenLicence = None,
    label: GivenLabels = None,
    exclude: Patterns = None,
    weights: WeightsPattern = None,
    hard_links: HardLinks = False,
    allow_host: AllowHost = None,
    cache: CacheFolder = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> int:
    """Register the bundle that a directory, a repository of the hub, or files over https hold.

    Only what the engine reads is taken, in one format and one quantization; all else is left out and listed. Files
    are hashed here, and only those that the service lacks are sent. What the files do not tell comes from
    the options, or from -f: a document that is merged into what was found (JSON Merge Patch), with the short names that
    `bundle validate` knows, and one more key, "roles", that maps paths to roles. The same directory is the same bundle,
    on any machine.
    """
    output = Output(as_json=as_json)
    overlay, roles = _overlay(file, source)
    given = sources.given(source, part, overlay.pop("from", None), allow_host, cache, hard_links=hard_links)
    choice = EngineChoice(engine, engine_version, engine_environment, engine_image, tuple(arg or ()))
    # The file of -f may lie beside the weights; it is no part of them.
    beside = [] if file is None or given.directory is None else [_relative(file, given.directory)]
    left_out = (*(exclude or ()), *(path for path in beside if path))
    if licence is not None:
        overlay = merge(overlay, {"licence": {"identifier": licence}})
    if label:
        overlay = merge(overlay, {"labels": _labels(label)})
    asked = _Asked(given, name, _told(choice, overlay), overlay, roles, left_out, weights)
    with _interrupted(output, _AGAIN):
        gathered = _read(asked, output)
    contents = gathered.contents
    bundle = _describe(asked, gathered)
    inferred, findings = _inferred(asked, bundle, contents)
    warn(output, findings)
    if dry_run:
        document = bundle.model_dump(mode="json", by_alias=True, exclude_none=True)
        output.result(document, lambda out: _show_local(out, bundle, inferred))
        return Exit.DONE
    # A document whose sources a person wrote says itself where its files come from.
    locks = None if "sources" in overlay else gathered.locks()
    with connect() as client:
        with _interrupted(output, _AGAIN):
            sent = _send(client, contents, output)
        try:
            registered, is_new = client.bundles.register(bundle, locks)
        except BlobsMissing:
            # What was there when it was asked for has been cleared up since.
            sent += _send(client, contents, output)
            registered, is_new = client.bundles.register(bundle, locks)
    _note_licence(bundle, output)
    told = _created(registered, contents, is_new=is_new, sent=sent) | {"inferred": inferred, "findings": findings}
    output.result(told, lambda out: _say_created(out, registered, told))
    return Exit.DONE


@contextmanager
def _interrupted(output: Output, said: str) -> Iterator[None]:
    """Say what stands and what does not, when Ctrl-C comes."""
    try:
        yield
    except KeyboardInterrupt:
        output.note(said, "warn")
        raise


def _created(registered: Registered, contents: Contents, *, is_new: bool, sent: int) -> dict[str, Any]:
    return {
        "digest": registered.digest,
        "name": registered.name,
        "is_new": is_new,
        "serving_digest": registered.serving_digest,
        "components": registered.components,
        "files": len(contents.files),
        "bytes": sum(found.size for found in contents.files),
        "bytes_read": sum(found.size for found in contents.files if found.was_read),
        "bytes_sent": sent,
        "left_out": [asdict(one) for one in contents.left_out],
    }


def _inferred(asked: _Asked, bundle: Bundle, contents: Contents) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    try:
        with HashMemory(folder("cache") / "hashes.sqlite") as memory:
            return infer(bundle, contents, asked.overlay, memory, name=asked.name)
    except OSError as error:
        raise InvalidDocument(f"{error.filename} cannot be read any more: {error.strerror}") from None


def _labels(words: list[str]) -> dict[str, str]:
    """Return name → value of labels as they were written. Raises Usage."""
    found: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise Usage(f"{word} is no label: write NAME=VALUE")
        if found.setdefault(name, value) != value:
            raise Usage(f"the label {name} has one value, not two")
    return found


def _overlay(file: Path | None, source: str) -> tuple[dict[str, Any], dict[str, Role]]:
    if file is None:
        return {}, {}
    overlay = read_file(file)
    if not isinstance(overlay, dict):
        raise InvalidDocument(f"{file} is not an object")
    refuse_strange(overlay, str(file))
    overlay = as_patch(overlay, [Path(source), file.resolve().parent])
    roles = overlay.pop("roles", {})
    if "files" in overlay:
        detail = "files are what the directory holds; use --exclude, or give them roles under /roles"
        raise InvalidDocument(f"{file} names files", errors=[{"pointer": "/files", "detail": detail}])
    known = set(Role)
    wrong = (
        {path: role for path, role in roles.items() if role not in known} if isinstance(roles, dict) else {"": roles}
    )
    if wrong:
        detail = f"is none of {', '.join(sorted(known))}"
        errors = [{"pointer": f"/roles/{path}".rstrip("/"), "detail": detail} for path in wrong]
        raise InvalidDocument(f"{file} gives roles that there are not", errors=errors)
    return overlay, {path: Role(role) for path, role in roles.items()}


def _told(choice: EngineChoice, overlay: Mapping[str, Any]) -> EngineChoice:
    """Return the engine as the file of -f completes it, as far as it decides which files are read."""
    engine = overlay.get("engine")
    if not isinstance(engine, Mapping):
        return choice
    code = engine.get("remote_code")
    files = code.get("files") if isinstance(code, Mapping) else None
    name, arguments, variables = engine.get("name"), engine.get("arguments"), engine.get("variables")
    version = engine.get("version")
    # What has another type is refused with the document.
    return replace(
        choice,
        name=name if isinstance(name, str) else choice.name,
        version=version if isinstance(version, str) else choice.version,
        arguments=tuple(map(str, arguments)) if isinstance(arguments, list) else choice.arguments,
        variables={str(key): str(value) for key, value in variables.items()} if isinstance(variables, Mapping) else {},
        remote_code=tuple(map(str, files)) if isinstance(files, list) else (),
    )


def _relative(file: Path, directory: Path) -> str | None:
    try:
        return file.resolve().relative_to(directory.resolve()).as_posix()
    except ValueError:
        return None


def _read(asked: _Asked, output: Output) -> Gathered:
    clock = Clock()
    reader = asked.engine.reader(asked.weights)
    with HashMemory(folder("cache") / "hashes.sqlite") as memory:
        try:
            gathered = sources.gather(
                asked.given, reader, output, exclude=asked.exclude, roles=asked.roles, memory=memory
            )
        except DirectoryRefused as refused:
            raise sources.not_a_bundle(asked.given.base, refused) from None
    contents = gathered.contents
    if memory.trouble:
        output.note(memory.trouble, "warn")
    read = sum(found.size for found in contents.files if found.was_read)
    total = sum(found.size for found in contents.files)
    output.note(
        f"{many(len(contents.files), 'file')}, {size(total)}: {size(read)} read in {clock.seconds:.1f} s, "
        f"{size(total - read)} known and unchanged"
    )
    for one in contents.left_out[:_LISTED]:
        output.note(f"left out: {one.path} ({one.reason})")
    if len(contents.left_out) > _LISTED:
        output.note(f"left out: {len(contents.left_out) - _LISTED} more, which --json lists")
    return gathered


def _describe(asked: _Asked, gathered: Gathered) -> Bundle:
    engine = asked.engine
    told = asked.overlay.get("engine")
    identified = isinstance(told, dict) and (told.get("environment") or told.get("image"))
    if not engine.environment and not engine.image and not identified and engine.name != _ELSEWHERE:
        engine = _installed(engine)
    try:
        document = bundle_document(gathered.contents, name=asked.name, engine=engine)
    except DirectoryRefused as refused:
        raise sources.not_a_bundle(asked.given.base, refused) from None
    document = merge(document | {"sources": gathered.document()}, asked.overlay)
    # A name that only -f gives is also what requests will call the model.
    if "name" in document and "served_name" not in document["serving"]:
        document = merge(document, {"serving": {"served_name": document["name"]}})
    try:
        return Bundle.model_validate(document)
    except ValidationError as error:
        what = "the bundle is not complete or not valid; give what is missing with options or -f"
        raise invalid(what, error, document, Bundle) from None


def _installed(engine: EngineChoice) -> EngineChoice:
    # Only where it is asked for: it brings in what reads requirements, and takes a moment.
    from gates.environment import OWN_ENVIRONMENTS, EnvironmentAltered, NotInstalled, engine_environment, environment

    distribution = _DISTRIBUTIONS.get(engine.name)
    if distribution is None and engine.name not in OWN_ENVIRONMENTS:
        raise Usage(
            f"name the {engine.name} that shall serve: --engine-image, or --engine-environment and --engine-version"
        )
    try:
        found = engine_environment(engine.name) if distribution is None else environment(distribution)
    except (NotInstalled, EnvironmentAltered) as error:
        advice = "name what shall serve with --engine-image, or with --engine-environment and --engine-version"
        if isinstance(error, NotInstalled) and engine.name in _MADE:
            advice = f"install it with `make engine-{engine.name}`, or {advice}"
        raise Usage(f"the engine {engine.name} here cannot be named: {error}; {advice}") from None
    return replace(engine, version=engine.version or found.version, environment=found.digest)


def _send(client: Client, contents: Contents, output: Output) -> int:
    """Send the files that the service lacks; each once, also when it lies at several places. Returns bytes sent.

    A file of which a part is there already, because this command was cut before, goes on from there.
    """
    by_digest: dict[str, Found] = {found.sha256: found for found in contents.files}
    missing = [by_digest[digest] for digest in client.blobs.missing(by_digest)]
    count = 0
    with output.moving("sending", sum(found.size for found in missing)) as moved:
        for found in missing:
            clock = Clock()
            try:
                sent = client.blobs.upload(found.sha256, found.place, progress=lambda count: moved(count, None))
            except DigestMismatch as problem:
                raise DigestMismatch(f"{found.path} has changed since it was hashed: {problem.detail}") from None
            except OSError as error:
                raise InvalidDocument(f"{found.path} cannot be read any more: {error.strerror}") from None
            before = f", {size(sent.resumed_at)} were there" if sent.resumed_at else ""
            output.note(f"sent {found.path} ({size(sent.sent)} in {clock.seconds:.1f} s{before})")
            count += sent.sent
    return count


def _note_licence(bundle: Bundle, output: Output) -> None:
    if bundle.licence.identifier == "NOASSERTION":
        output.note("no file tells the weights' licence; state it with --licence", "warn")


def _say_created(out: Output, registered: Registered, told: Mapping[str, Any]) -> None:
    say(out, told["inferred"])
    out.say("")
    out.fields([("digest", registered.digest), ("serving", registered.serving_digest)])
    out.say(f"{'registered' if told['is_new'] else 'was there already'}: {registered.name}", "good")


def _show_local(out: Output, bundle: Bundle, inferred: Mapping[str, Any]) -> None:
    _show_body(out, bundle, [("name", bundle.name), ("digest", bundle.digest), ("serving", bundle.serving_digest)])
    out.say("")
    say(out, inferred)


def _shown(labels: Mapping[str, str] | None) -> str:
    return " ".join(f"{name}={value}" for name, value in sorted((labels or {}).items()))


def _show_body(out: Output, bundle: Bundle, named: Sequence[tuple[str, object]] = ()) -> None:
    engine, runtime, model = bundle.engine, bundle.runtime, bundle.model
    parameters = f", {model.parameters:,} parameters" if model.parameters else ""
    at_once = many(runtime.max_sequences, "request")
    out.fields(
        [
            *named,
            ("description", bundle.description),
            ("labels", _shown(bundle.labels)),
            ("model", f"{model.architecture} in {model.format}{parameters}"),
            ("quantization", bundle.quantization.method),
            ("tokenizer", f"in {bundle.tokenizer.origin}"),
            ("template", bundle.template.file or bundle.template.origin),
            ("engine", f"{engine.name} {engine.version}"),
            ("image", engine.image),
            ("environment", engine.environment),
            ("arguments", " ".join(engine.arguments)),
            ("hardware", f"{bundle.hardware.count or ''} {bundle.hardware.accelerator}".strip()),
            (
                "context",
                f"{many(runtime.context_tokens, 'token')} for each of {at_once} at once",
            ),
            ("served as", bundle.serving.served_name),
            ("features", ", ".join(bundle.serving.features)),
            ("licence", bundle.licence.identifier),
        ]
    )
    out.say("")
    out.table(
        ["FILE", "ROLE", "SIZE", "SHA-256"],
        ([file.path, file.role, size(file.size), file.sha256[7:]] for file in bundle.files),
    )


def _locked(lock: LockedSource) -> list[str]:
    return [lock.part, lock.asked, lock.revision, f"{lock.resolved_at:%Y-%m-%d %H:%M:%S}Z"]


@app.command(epilog=examples("sluicegate bundle show 3c3aff2a", "sluicegate bundle show 3c3aff2a --json"))
def show(bundle: BundleName, as_json: Json = False) -> int:
    """Show a bundle: its aliases, sections, files and component digests, and what its boots took."""
    output = Output(as_json=as_json)
    with connect() as client:
        found = client.bundles.get(resolve(bundle, client.bundles, read_bundle, "bundle"))
        boots = list(client.bundles.boots(found.digest))

    def human(out: Output) -> None:
        aliases = " ".join(f"@{name}" for name in found.aliases or [])
        named = [
            ("name", found.name),
            ("digest", found.digest),
            ("serving", found.serving_digest),
            ("aliases", aliases),
        ]
        show_quarantine(out, found.quarantine)
        _show_body(out, Bundle.model_validate(found.document), named)
        out.say("")
        digests = found.components or {}
        out.table(["COMPONENT", "DIGEST"], ((name, digests[name]) for name in COMPONENTS if name in digests))
        if found.locks:
            out.say("")
            out.say("sources, as whoever registered it said:")
            out.table(["PART", "ASKED FOR", "RESOLVED TO", "AT"], map(_locked, found.locks))
        show_boots(out, boots)
        out.say("")
        out.say(f"created {found.created_at:%Y-%m-%d %H:%M:%S}Z by {found.created_by}")

    output.result({**plain(found), "boots": boots}, human)
    return Exit.DONE


@app.command(
    "list",
    epilog=examples(
        "sluicegate bundle list",
        "sluicegate bundle list --name gemma-270m --label team=search --label stage=trial",
        "sluicegate bundle list --quarantined",
        "sluicegate bundle list --made-of ./adapter_model.safetensors",
    ),
)
def list_(
    name: Annotated[str | None, typer.Option("--name", "-n", help="Only of this name.")] = None,
    label: Annotated[
        list[str] | None,
        typer.Option("--label", metavar="NAME=VALUE", help="Only with this label; repeatable: with all of them."),
    ] = None,
    quarantined: Annotated[
        bool | None,
        typer.Option("--quarantined/--not-quarantined", help="Only those that are quarantined, or are not."),
    ] = None,
    made_of: Annotated[
        str | None,
        typer.Option(
            "--made-of",
            metavar="FILE|DIGEST",
            help="Only those made of these bytes, under whatever path: a file, or its whole digest.",
        ),
    ] = None,
    limit: Limit = 50,
    as_json: Json = False,
) -> int:
    """List bundles, newest first."""
    output = Output(as_json=as_json)
    asked = _labels(label or [])
    with connect() as client:
        file = None if made_of is None else digest_of(made_of)
        found = output.most(client.bundles.list(name, labels=asked, quarantined=quarantined, file=file), limit)
    output.result(
        {"items": found},
        lambda out: show_documents(
            out,
            found,
            none("bundle", "bundle create", is_asked=bool(name or asked or made_of) or quarantined is not None),
        ),
    )
    return Exit.DONE


@app.command(epilog=examples('sluicegate bundle delete 3c3aff2a --reason "never used"'))
def delete(bundle: BundleName, reason: Reason, as_json: Json = False) -> int:
    """Delete a bundle that nothing needs. What serves, may be rolled back to, is under way or named, is refused.

    The document stays in evidence. Files that no other bundle has go after a time of grace.
    """
    output = Output(as_json=as_json)
    with connect() as client:
        try:
            gone = client.bundles.delete(resolve(bundle, client.bundles, read_bundle, "bundle"), reason)
        except ValidationError as error:
            raise invalid_act(error) from None

    def human(out: Output) -> None:
        out.say(f"deleted: {gone.name} {gone.digest}", "warn")
        if gone.blobs:
            out.say(f"{many(gone.blobs, 'file')}, {size(gone.bytes)}, may go from {gone.free_at:%Y-%m-%d %H:%M:%S}Z on")

    output.result(gone, human)
    return Exit.DONE


def show_documents(out: Output, found: list[Registered], empty: str) -> None:
    """Print a list of documents."""
    out.table(
        ["NAME", "DIGEST", "CREATED", "BY", "LABELS"],
        (
            [
                one.name + (" (quarantined)" if one.quarantine else ""),
                one.digest,
                f"{one.created_at:%Y-%m-%d %H:%M:%S}Z",
                one.created_by,
                _shown(one.labels),
            ]
            for one in found
        ),
        empty=empty,
        spare=("BY", "CREATED"),
    )
