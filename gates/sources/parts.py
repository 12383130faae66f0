"""What each source brings into a bundle, and where its files are placed there.

The base brings what a directory would. Other parts bring what they are for and nothing else, and what they bring takes
the place of the base's: a tokenizer of its own replaces every file of the base's tokenizer, never only some.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Final

from gates.files.contents import Reader, Selection, role_of, select
from gates.files.listing import LeftOut
from gates.files.refusal import FileRefused
from gates.sources.source import SourceRefused
from schemas.bundle import Role

BASE = "base"
ADAPTER = "adapter:"
PART: Final = re.compile(r"base|tokenizer|template|code|draft|adapter:[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?")
"""Names of parts."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A file of a part's source, its role, and its path in the bundle."""

    part: str
    path: str
    placed: str
    role: Role


@dataclass(slots=True)
class Choice:
    """What one part takes of its source, what it leaves, and what must not be there. Paths left are as placed."""

    taken: list[Placed] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    refused: list[FileRefused] = field(default_factory=list)
    several: list[list[str]] = field(default_factory=list)
    """The files of each model, where the source has several and nobody chose one."""


def choose(part: str, paths: Iterable[str], reader: Reader, roles: Mapping[str, Role] | None = None) -> Choice:
    """Choose among the files of one part's source.

    Args:
        part: what the source brings.
        paths: of all its files.
        reader: the engine that will read the bundle.
        roles: path in the bundle → role, for files that their name does not tell.

    Raises:
        SourceRefused: `part-empty`, when the source has nothing of the kind; `adapter-format`, when its adapter is in
            a form that the engine does not load; `adapter-ambiguous`, when it has several.
    """
    listed = sorted(paths)
    if part == BASE:
        return _base(listed, reader, roles or {})
    choice = Choice()
    for path, role in _kinds(part)(part, listed, reader):
        if role is None:
            choice.left_out.append(LeftOut(_place(part, path), "other-part", f"no part of what {part} brings"))
        else:
            choice.taken.append(Placed(part, path, _place(part, path), role))
    if not choice.taken:
        said, expected = f"holds nothing that {part} could bring", _EXPECTED[part.partition(":")[0]]
        raise SourceRefused("part-empty", said, file="", found=", ".join(listed[:8]), expected=expected)
    if part == "template":
        _name_template(choice)
    return choice


def together(choices: Mapping[str, Choice]) -> Choice:
    """Return what all parts take together, at one path each.

    Raises:
        SourceRefused: `placed-twice`, when two parts other than the base bring one path.
    """
    whole = Choice()
    brought: dict[str, str] = {}
    replaced: set[Role] = set()
    for part, choice in choices.items():
        if part == BASE:
            continue
        for one in choice.taken:
            other = brought.setdefault(one.placed, part)
            if other != part:
                said = f"is brought by {other} and by {part}"
                raise SourceRefused("placed-twice", said, file=one.placed, advice="leave it out of one of them")
        replaced |= {"tokenizer": {Role.TOKENIZER}, "template": {Role.TEMPLATE}}.get(part, set())
    for part, choice in choices.items():
        whole.left_out += choice.left_out
        whole.refused += choice.refused
        for one in choice.taken:
            if part == BASE and (one.role in replaced or one.placed in brought):
                by = brought.get(one.placed) or ("tokenizer" if one.role is Role.TOKENIZER else "template")
                whole.left_out.append(LeftOut(one.placed, "replaced", f"brought by {by}"))
            else:
                whole.taken.append(one)
    return whole


def _base(paths: list[str], reader: Reader, roles: Mapping[str, Role]) -> Choice:
    found = select(paths, reader, roles)
    taken = [Placed(BASE, path, path, role) for path, role in sorted(found.kept.items())]
    return Choice(taken, list(found.left_out), list(found.refused), found.several)


def look_at_first(paths: Iterable[str], reader: Reader, roles: Mapping[str, Role], several: list[list[str]]) -> Choice:
    """Choose among a base's files again where it has several models: as of a directory, one is looked at.

    Of models in GGUF that is the first. An engine reads every safetensors file of a folder, so all of those are taken.
    """
    first, *others = several
    if not first[0].endswith(".gguf"):
        all_of_them = {path: role for group in several for path in group if (role := role_of(path)) is not None}
        return choose(BASE, paths, reader, {**all_of_them, **roles})
    beside = {path for group in others for path in group}
    choice = choose(BASE, [path for path in paths if path not in beside], reader, roles)
    choice.left_out += [LeftOut(path, "other-quantization", "another model") for path in sorted(beside)]
    return replace(choice, several=several)


Kinds = Callable[[str, list[str], Reader], Iterator[tuple[str, Role | None]]]


def _tokenizer(_part: str, paths: list[str], _reader: Reader) -> Iterator[tuple[str, Role | None]]:
    for path in paths:
        yield path, Role.TOKENIZER if "/" not in path and role_of(path) is Role.TOKENIZER else None


def _template(_part: str, paths: list[str], _reader: Reader) -> Iterator[tuple[str, Role | None]]:
    for path in paths:
        yield path, Role.TEMPLATE if "/" not in path and role_of(path) is Role.TEMPLATE else None


def _code(_part: str, paths: list[str], reader: Reader) -> Iterator[tuple[str, Role | None]]:
    for path in paths:
        yield path, Role.CODE if path in reader.code else None


def _adapter(_part: str, paths: list[str], reader: Reader) -> Iterator[tuple[str, Role | None]]:
    whole = {"adapter_config.json", "adapter_model.safetensors"} <= set(paths)
    packed = [path for path in paths if "/" not in path and path.endswith(".gguf")]
    # Whoever names no engine may mean the one that reads the files that there are.
    if packed and (reader.engine == "llamacpp" or (reader.engine == "external" and not whole)):
        if len(packed) > 1:
            said, advice = "is one of several adapters in GGUF", "leave the others out with --exclude"
            raise SourceRefused(
                "adapter-ambiguous", said, file=packed[0], found=", ".join(packed[:8]), expected="one", advice=advice
            )
        for path in paths:
            yield path, Role.ADAPTER if path == packed[0] else None
        return
    if packed and not any(path.endswith(".safetensors") for path in paths):
        said = f"is GGUF, and {reader.engine} does not load such an adapter"
        advice = "take it in the form that PEFT saves, or merge it into the base"
        raise SourceRefused("adapter-format", said, file=packed[0], expected=_PEFT, advice=advice)
    for path in paths:
        yield path, Role.ADAPTER if whole and "/" not in path and role_of(path) is Role.ADAPTER else None


def _draft(_part: str, paths: list[str], reader: Reader) -> Iterator[tuple[str, Role | None]]:
    found: Selection = select(paths, Reader(reader.engine, (), None, frozenset()))
    for refused in found.refused:
        raise SourceRefused(refused.code, refused.message, file=refused.file, found=refused.found)
    for path in paths:
        role = found.kept.get(path)
        yield path, Role.DRAFT if role not in {None, Role.LICENCE, Role.DOCUMENTATION} else None


def _kinds(part: str) -> Kinds:
    return _KINDS[part.partition(":")[0]]


_KINDS: Final[Mapping[str, Kinds]] = {
    "tokenizer": _tokenizer,
    "template": _template,
    "code": _code,
    "draft": _draft,
    "adapter": _adapter,
}
_PEFT: Final = "adapter_config.json and adapter_model.safetensors"
_EXPECTED: Final[Mapping[str, str]] = {
    "tokenizer": "tokenizer.json, or another file of a tokenizer",
    "template": "a file that ends in .jinja, or chat_template.json",
    "code": "a file that engine.remote_code of -f names",
    "draft": "weights that the engine reads",
    "adapter": f"{_PEFT}, or for llama.cpp one GGUF file",
}


def _place(part: str, path: str) -> str:
    if part.startswith(ADAPTER):
        return f"adapters/{part.removeprefix(ADAPTER)}/{path}"
    return f"draft/{path}" if part == "draft" else path


def _name_template(choice: Choice) -> None:
    """Let a template of any name be found where engines look for it."""
    jinja = [one for one in choice.taken if PurePosixPath(one.path).suffix == ".jinja"]
    if len(jinja) == 1:
        choice.taken = [replace(one, placed="chat_template.jinja") if one is jinja[0] else one for one in choice.taken]
