"""What differs between two bundles, part by part. Pure.

A part is a component of the bundle (`schemas.bundle.COMPONENTS`), or one of those that serve nothing. Together
they hold every section and every file of the document, so that nothing can differ unseen.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from gates.files.contents import role_of
from schemas.bundle import COMPONENTS, READ_BY_ENGINE, Bundle, File, Role
from schemas.common import canonical_json, sha256_digest
from schemas.comparison import BundleDiff, FileChange, FileState, PartChange, PartWithin, Side, ValueChange

DOUBTFUL: Final = "doubtful"

UNSERVED: Final[dict[str, tuple[str, ...]]] = {
    "licence": ("licence",),
    "documentation": (),
    "description": ("name", "description", "labels"),
    "sources": ("sources",),
}
"""Part that serves nothing → its sections of the document."""

PARTS: Final = (*COMPONENTS, DOUBTFUL, *UNSERVED)

AFFECTS: Final[Mapping[str, str]] = {
    "weights": "Everything that the model answers, what fits into memory, and how fast it is.",
    "tokenizer": "Which tokens a prompt becomes and an answer is made of: lengths, limits, stops and bills.",
    "template": "What the model is really asked: roles, tools, turns and stops, and how calls and reasoning are read.",
    "quantization": "Numbers and kernels: answers drift, memory and speed change, and a kernel may be missing.",
    "adapters": "Answers under an adapter's name, kernels and memory of all requests, and who may see whose adapter.",
    "draft": "Speed and memory; if verification is at fault, also the answers.",
    "engine": "Kernels, scheduling, defaults, the wire format and every limit of the server.",
    "topology": "Collectives, the order of sums, memory on each device, and how much fails at once.",
    "hardware": "Which machines may run it, and with them kernels, capacity and speed.",
    "runtime": "Context, batches, caches and sampling: capacity, latency, and answers where callers set nothing.",
    "serving": "What callers may rely on: the name, declared features, usage and cancellation.",
    DOUBTFUL: "Anything: it is declared as a text for people, under a name that an engine may read.",
    "licence": "Whether it may be served at all. No engine reads it.",
    "documentation": "What people read. No engine reads it.",
    "description": "How it is found and told. Nothing that is served depends on it.",
    "sources": "Where the same bytes came from, and who vouches for them.",
}
"""Part → what a change in it can affect."""

IN_WEIGHTS: Final = "It lies in the weights, which differ: whether it is the same is not seen here."
IN_TOKENIZER: Final = "It lies in the tokenizer's files, which differ: whether it is the same is not seen here."

_COMPONENT_OF: Final = {role: component for component, (roles, _) in COMPONENTS.items() for role in roles}
_PART_OF_TEXTS: Final = {Role.LICENCE: "licence", Role.DOCUMENTATION: "documentation"}
_SECTIONS: Final = {component: sections for component, (_, sections) in COMPONENTS.items()} | UNSERVED
# Lists whose entries have names of their own: an entry is compared with its namesake, wherever it stands.
_NAMED: Final[Mapping[str, tuple[str, ...]]] = {"/adapters": ("name",), "/sources": ("kind", "location")}


def part_of(file: File) -> str:
    """Return the part that a file belongs to.

    A text for people under a name that does not say so may be one that the engine reads: it lies in the same folder.
    """
    if file.role in READ_BY_ENGINE:
        return _COMPONENT_OF[file.role]
    return _PART_OF_TEXTS[file.role] if role_of(file.path) is file.role else DOUBTFUL


@dataclass(frozen=True, slots=True)
class _Part:
    sections: dict[str, Any]
    files: dict[str, FileState]

    @property
    def digest(self) -> str:
        files = [{"path": path, **state.model_dump()} for path, state in sorted(self.files.items())]
        return sha256_digest(canonical_json({"files": files, **self.sections}))


def diff(first: Bundle, second: Bundle) -> BundleDiff:
    """Compare two bundles part by part.

    Args:
        first: what is compared with, such as the accepted bundle.
        second: what is looked at, such as the candidate.
    """
    was, now = _parts(first), _parts(second)
    # By digest: to Python, true equals 1.
    changed = [_changed(part, was[part], now[part]) for part in PARTS if was[part].digest != now[part].digest]
    within = [one for one in _within(first, second) if one.part not in {change.part for change in changed}]
    told = {*(one.part for one in changed), *(one.part for one in within)}
    return BundleDiff(
        first=side(first),
        second=side(second),
        is_same=first.digest == second.digest,
        is_served_same=not any(change.is_served for change in changed),
        changed=changed,
        within=within,
        unchanged=[part for part in PARTS if part not in told],
    )


def side(bundle: Bundle) -> Side:
    """Return how a bundle is named in a comparison."""
    return Side(digest=bundle.digest, name=bundle.name, serving_digest=bundle.serving_digest)


def shown(value: object, limit: int = 2000) -> str:
    """Return a value for a person, cut to `limit` characters: texts and words as they are, all else as JSON.

    A dash stands where there is none.
    """
    if value is None:
        return "—"
    if isinstance(value, str):
        text = value
    elif isinstance(value, list) and value and all(isinstance(one, str) for one in value):
        text = " ".join(value)
    else:
        text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _parts(bundle: Bundle) -> dict[str, _Part]:
    body = bundle.model_dump(mode="json", by_alias=True, exclude_none=True)
    parts = {part: _Part({name: body.get(name) for name in _SECTIONS.get(part, ())}, {}) for part in PARTS}
    for file in bundle.files:
        parts[part_of(file)].files[file.path] = FileState(size=file.size, sha256=file.sha256, role=file.role)
    return parts


def _within(first: Bundle, second: Bundle) -> Iterator[PartWithin]:
    """Yield the components that either bundle has inside files of another one, where those files differ."""
    are_weights_other = _bytes(first, Role.WEIGHTS) != _bytes(second, Role.WEIGHTS)
    if are_weights_other and "weights" in (first.tokenizer.origin, second.tokenizer.origin):
        yield PartWithin(part="tokenizer", within="weights", why=IN_WEIGHTS)
    templates = {first.template.origin, second.template.origin}
    if are_weights_other and "weights" in templates:
        yield PartWithin(part="template", within="weights", why=IN_WEIGHTS)
    elif "tokenizer_config" in templates and _bytes(first, Role.TOKENIZER) != _bytes(second, Role.TOKENIZER):
        yield PartWithin(part="template", within="tokenizer", why=IN_TOKENIZER)


def _bytes(bundle: Bundle, role: Role) -> set[tuple[str, str]]:
    # The weights have one tokenizer wherever their file lies; of tokenizer files, the name says which one is read.
    return {("" if role is Role.WEIGHTS else file.path, file.sha256) for file in bundle.files if file.role is role}


def _changed(part: str, was: _Part, now: _Part) -> PartChange:
    return PartChange(
        part=part,
        is_served=part not in UNSERVED,
        was=was.digest,
        now=now.digest,
        affects=AFFECTS[part],
        values=[
            change
            for name in _SECTIONS.get(part, ())
            for change in _values(f"/{name}", was.sections[name], now.sections[name])
        ],
        files=list(_files(was.files, now.files)),
    )


def _files(was: Mapping[str, FileState], now: Mapping[str, FileState]) -> Iterator[FileChange]:
    for path in sorted({*was, *now}):
        before, after = was.get(path), now.get(path)
        if before != after:
            kind: Literal["added", "removed", "changed"] = "changed"
            if before is None or after is None:
                kind = "added" if before is None else "removed"
            yield FileChange(path=path, change=kind, was=before, now=after)


def _values(pointer: str, was: Any, now: Any) -> Iterator[ValueChange]:
    """Yield what differs below a place of the document; at least one change where anything does."""
    if canonical_json(was) == canonical_json(now):
        return
    pairs = _fields(pointer, was, now) or _entries(pointer, was, now)
    found = [change for place, before, after in pairs for change in _values(place, before, after)]
    # What has no names, or only another order, is told whole.
    yield from found or [ValueChange(pointer=pointer, was=was, now=now)]


def _fields(pointer: str, was: Any, now: Any) -> list[tuple[str, Any, Any]]:
    """Return the fields of two objects: pointer, value in the first, value in the second."""
    if not isinstance(was, dict) or not isinstance(now, dict):
        return []
    return [(f"{pointer}/{_escaped(key)}", was.get(key), now.get(key)) for key in dict.fromkeys([*was, *now])]


def _entries(pointer: str, was: Any, now: Any) -> list[tuple[str, Any, Any]]:
    """Return the entries of two lists whose entries have names, as `_fields` does for objects."""
    before, after = (_named(pointer, value) for value in (was, now))
    if before is None or after is None:
        return []
    places = {name: place for name, (place, _) in (before | after).items()}
    absent = (0, None)
    return [
        (f"{pointer}/{place}", before.get(name, absent)[1], after.get(name, absent)[1])
        for name, place in sorted(places.items(), key=lambda pair: (pair[0] not in after, pair[1]))
    ]


def _named(pointer: str, value: Any) -> dict[tuple[Any, ...], tuple[int, Any]] | None:
    """Return the entries of a list by their own names, each with its place; None when they have none."""
    keys: Sequence[str] | None = _NAMED.get(pointer)
    if keys is None or not isinstance(value, list):
        return None
    found = {tuple(entry.get(key) for key in keys): (place, entry) for place, entry in enumerate(value)}
    return found if len(found) == len(value) else None


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")
