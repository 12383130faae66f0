"""Sources on the command line: a directory, a repository, a bucket, files over https; and parts from others."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gates.directory import Contents, DirectoryRefused, Memory, read_directory
from gates.files.contents import Reader
from gates.files.refusal import FileRefused, shown
from gates.sources.hosts import BadHost
from gates.sources.named import HUB_ENDPOINT, Access, is_directory, open_source
from gates.sources.parts import BASE, PART
from gates.sources.source import Resolved, SourceRefused, SourceUnavailable, bare, resolved_now
from gates.sources.store import FetchStore
from registry.cli.output import Clock, Output, size
from registry.cli.profile import folder
from schemas.bundle import Role
from schemas.lock import MAX_ASKED, Lock
from schemas.problems import InvalidDocument, Unavailable, Usage

if TYPE_CHECKING:
    from gates.sources.assembly import Assembled, Assembly

ENDPOINT_VARIABLE = "HF_ENDPOINT"
TOKEN_VARIABLE = "HF_TOKEN"  # noqa: S105 - the name of one
HOSTS_VARIABLE = "SLUICEGATE_ALLOW_HOSTS"
PROXY_VARIABLES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
_NOT_REACHED = frozenset({"unreachable", "name-unknown", "server-silent"})
S3_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")

SourceName = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="Directory, hf:owner/name@revision, s3://bucket/prefix, or https://host/file#sha256=….",
    ),
]
From = Annotated[
    list[str] | None,
    typer.Option(
        "--from",
        metavar="PART=SOURCE",
        help="Take a part from elsewhere: tokenizer, template, code, draft or adapter:NAME; repeatable.",
    ),
]
WeightsPattern = Annotated[
    str | None,
    typer.Option(
        "--weights",
        metavar="PATTERN",
        help="Which weights, where there are several: q4_k_m, a pattern, or the path of one file.",
    ),
]
AllowHost = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-host",
        metavar="HOST[:PORT]",
        help="Host that may be fetched from besides the hub's, also inside a network; repeatable.",
    ),
]
CacheFolder = Annotated[
    Path | None, typer.Option("--cache", metavar="DIR", help="Where fetched files are kept; otherwise your cache.")
]


@dataclass(frozen=True, slots=True)
class Given:
    """What was asked for: part → source, and how sources are reached."""

    sources: Mapping[str, str]
    access: Access
    cache: Path

    @property
    def base(self) -> str:
        """The source of the base, as it was written."""
        return self.sources[BASE]

    @property
    def directory(self) -> Path | None:
        """The base's directory, if it is one."""
        return Path(self.base) if is_directory(self.base) else None


@dataclass(frozen=True, slots=True)
class Gathered:
    """The files of all sources, and part → its source with what pins it, the base first."""

    contents: Contents
    sources: Mapping[str, Resolved]

    def document(self) -> list[dict[str, Any]]:
        """Return the sources as a bundle holds them, each once."""
        found = [
            {"kind": one.kind, "revision": one.revision} | ({"location": one.location} if one.location else {})
            for one in self.sources.values()
        ]
        return [one for place, one in enumerate(found) if one not in found[:place]]

    def locks(self) -> list[Lock]:
        """Return the sources as a bundle's record holds them."""
        return [
            Lock(
                part=part,
                kind=one.kind,
                asked=shown(one.asked, MAX_ASKED),
                location=one.location,
                revision=str(one.revision),
                resolved_at=one.resolved_at,
            )
            for part, one in self.sources.items()
        ]


def given(
    source: str,
    parts: Sequence[str] | None,
    in_file: object,
    allow_host: Sequence[str] | None,
    cache: Path | None,
    *,
    hard_links: bool = False,
    environment: Mapping[str, str] = os.environ,
) -> Given:
    """Return what the command line, the file of -f and the environment ask for.

    Args:
        source: of the base.
        parts: PART=SOURCE, each.
        in_file: part → source, as the file of -f says under "from".
        allow_host: hosts that a person allows.
        cache: where fetched files are kept.
        hard_links: whether files of directories may have further names.
        environment: HF_ENDPOINT, HF_TOKEN, SLUICEGATE_ALLOW_HOSTS and AWS_ENDPOINT_URL_S3.

    Raises:
        Usage: also where the base is a directory that is not there.
        InvalidDocument: for what the file says.
    """
    if is_directory(source) and not os.path.lexists(source):
        raise absent(source)
    sources = {BASE: source, **_in_file(in_file)}
    for word in parts or ():
        part, equals, asked = word.partition("=")
        if not equals or not PART.fullmatch(part) or part == BASE or not asked:
            raise Usage(
                f"{bare(word)} is no part: write tokenizer=SOURCE, template=…, code=…, draft=… or adapter:NAME=…"
            )
        if sources.setdefault(part, asked) != asked:
            raise Usage(f"{part} comes from one source, not two")
    hosts = [*(allow_host or ()), *(one.strip() for one in environment.get(HOSTS_VARIABLE, "").split(","))]
    access = Access(
        environment.get(ENDPOINT_VARIABLE) or HUB_ENDPOINT,
        environment.get(TOKEN_VARIABLE) or None,
        tuple(one for one in hosts if one),
        hard_links=hard_links,
        s3_endpoint=next((environment[name] for name in S3_VARIABLES if environment.get(name)), None),
    )
    return Given(sources, access, (cache or folder("cache", environment) / "fetched").absolute())


def absent(source: str) -> Usage:
    """Return the refusal of a directory, or file of weights, that is not there."""
    said = f"there is no directory or file of weights {shown(source, 256)}"
    return Usage(f"{said}; name one, or hf:…, s3://… or https://…")


def _in_file(value: object) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidDocument("from is not an object", errors=[{"pointer": "/from", "detail": "maps parts to sources"}])
    wrong = [
        {"pointer": f"/from/{part}", "detail": "has to be a part (tokenizer, template, …) with one source"}
        for part, asked in value.items()
        if not PART.fullmatch(part) or part == BASE or not isinstance(asked, str) or not asked
    ]
    if wrong:
        raise InvalidDocument("from names what is no part", errors=wrong)
    return dict(value)


def gather(
    asked: Given, reader: Reader, output: Output, *, exclude: Sequence[str], roles: Mapping[str, Role], memory: Memory
) -> Gathered:
    """Resolve, list, choose, fetch and read the files of all sources.

    Raises:
        DirectoryRefused, InvalidDocument, Usage.
        Unavailable: a source cannot be reached.
    """
    directory = asked.directory
    if directory is not None and len(asked.sources) == 1:
        with output.moving("hashing") as moved:
            contents = read_directory(
                directory,
                reader,
                exclude=exclude,
                roles=roles,
                hard_links=asked.access.hard_links,
                memory=memory,
                progress=moved,
            )
        resolved = resolved_now("directory", directory.resolve().name, location=None, revision=contents.revision)
        return Gathered(contents, {BASE: resolved})
    whole = assembled(asked, reader, output, exclude=exclude, roles=roles)
    with whole as assembly, output.moving("hashing") as moved:
        found = assembly.read(memory=memory, progress=moved)
    _tell_pins(found, output)
    return Gathered(found.contents, found.sources)


@contextmanager
def assembled(
    asked: Given,
    reader: Reader,
    output: Output,
    *,
    exclude: Sequence[str] = (),
    roles: Mapping[str, Role] | None = None,
    sketch: Path | None = None,
    is_one_enough: bool = False,
) -> "Iterator[Assembly]":
    """Fetch what the reader reads, and yield what was put together. Raises as `gather`.

    `sketch` is an empty folder for weights of which only the headers are wanted. With `is_one_enough`, of several
    models the first is taken where nobody chose one, as of a directory that is looked at.
    """
    # Only where something is fetched: it brings in TLS.
    from gates.sources.assembly import Assembly, Wants

    try:
        with asked.access.web(asked.sources.values()) as web:
            sources = {part: open_source(text, web, asked.access) for part, text in asked.sources.items()}
            assembly = Assembly(
                sources, Wants(reader, tuple(exclude), roles or {}, is_one_enough), FetchStore(asked.cache)
            )
            assembly.choose()
            if assembly.several:
                output.note(f"several models: {assembly.several[0]} is looked at; --weights chooses another", "warn")
            if sketch is not None:
                assembly.sketch(sketch)
            else:
                clock = Clock()
                with output.moving("fetching", assembly.left or None) as moved:
                    received = assembly.fetch(lambda count, _: moved(count, None))
                _tell(received, clock, output)
        yield assembly
    except FileRefused as refused:
        raise refusal(refused) from None
    except BadHost as error:
        raise Usage(str(error)) from None


def not_a_bundle(source: str, refused: DirectoryRefused) -> InvalidDocument:
    """Return what was refused, file by file, for the person who named the source."""
    errors = []
    for one in refused.refusals:
        detail = str(one) + (f"; {one.advice}" if one.advice else "")
        error: dict[str, Any] = {"pointer": shown(one.file or ".", 256), "detail": detail, "code": one.code}
        more = (("place", one.pointer), ("offset", one.offset), ("found", one.found), ("expected", one.expected))
        errors.append(error | {key: value for key, value in more if value is not None})
    return InvalidDocument(f"{shown(bare(source), 256)} cannot become a bundle", errors=errors)


def refusal(refused: FileRefused) -> InvalidDocument | Unavailable | DirectoryRefused:
    """Return what the refusal of a source, or of one of its files, means for the person who named it."""
    detail = f"{shown(refused.file, 256)}: {refused}" if refused.file else str(refused)
    detail += f"; {refused.advice}" if refused.advice else ""
    if isinstance(refused, SourceUnavailable):
        if refused.code in _NOT_REACHED and (
            named := next((one for one in PROXY_VARIABLES if os.environ.get(one)), None)
        ):
            detail += (
                f"; {named} is set, and sources are fetched through no proxy: it would look names up itself, so that "
                "nobody could check the address. Fetch from a mirror that can be reached (HF_ENDPOINT, --allow-host), "
                "or with another tool into a directory"
            )
        return Unavailable(detail, code=refused.code)
    return DirectoryRefused([refused]) if isinstance(refused, SourceRefused) else InvalidDocument(detail)


def _tell(received: int, clock: Clock, output: Output) -> None:
    if not received:
        return  # all of it was here
    rate = received / clock.seconds if clock.seconds > 0 else 0
    output.note(f"fetched {size(received)} in {clock.seconds:.1f} s ({size(int(rate))}/s)")


def _tell_pins(found: "Assembled", output: Output) -> None:
    for part, one in found.sources.items():
        if one.kind != "directory":
            output.note(f"{part}: {one.asked} is {one.revision}")
        if one.kind == "s3" and one.is_by_bytes:
            output.note(f"{part}: the bucket keeps no versions, so it is pinned by what was received", "warn")
        if one.kind == "https" and one.is_by_bytes:
            output.note(f"{part}: no digest was given, so it is pinned by what was received", "warn")
