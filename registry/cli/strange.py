"""Keys in a file of `-f` that nothing reads: a misspelt one would declare nothing, and pass for what was meant."""

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from gates.static.declared import DeclaredError, read_declared
from gates.static.rules import names_told
from registry.cli.declarations import FOLDERS, ONLY_CHECKED, SHORT, TOP, TOPOLOGY_ARCHITECTURE
from schemas.bundle import Bundle, Feature
from schemas.faults import Schema, instead, pointer
from schemas.problems import InvalidDocument
from schemas.short import many

_BESIDE: Mapping[tuple[str, ...], Iterable[str]] = {
    (): (*TOP, *ONLY_CHECKED, "libraries", "draft_model", "from", "roles"),
    ("topology",): TOPOLOGY_ARCHITECTURE,
    ("adapters", "0"): FOLDERS,
    ("draft",): FOLDERS,
}
"""Place → keys that it may have beside its short names and those of a bundle document."""
_DRAIN = (
    *("termination_grace_seconds", "termination_grace"),
    *("pre_stop_seconds", "pre_stop", "shutdown_seconds", "shutdown_timeout"),
)


def refuse_strange(document: Mapping[str, Any], file: str) -> None:
    """Refuse a declaration with keys, or features, that neither a bundle document has nor anything else reads.

    Values of the wrong kind are told with them; where they are all that is wrong, the bundle's document tells them.

    Args:
        document: what the file says.
        file: its name.

    Raises:
        InvalidDocument: with each such key, and what it may have meant.
    """
    found = [*_strange(document, document, (), (), _schema()), *_features(document)]
    if found:
        raise _wrong([*found, *_values(document)], file)


def refuse_wrong(document: Mapping[str, Any], file: str) -> None:
    """Refuse a declaration as `refuse_strange` does, and also for its values alone. Raises InvalidDocument."""
    refuse_strange(document, file)
    if found := _values(document):
        raise _wrong(found, file)


def _wrong(found: list[dict[str, str]], file: str) -> InvalidDocument:
    return InvalidDocument(f"{file}: {many(len(found), 'place', 'is', 'are')} wrong", errors=found)


def _values(document: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return each place with a value that cannot be read as what it declares."""
    try:
        read_declared(document)
    except DeclaredError as error:
        return [{"pointer": place, "detail": detail} for place, detail in error.errors]
    return []


def _features(document: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """Yield the features that are none, wherever they may be declared, as a list or as a mapping to true and false."""
    known = [feature.value for feature in Feature]
    serving = document.get("serving")
    places: list[tuple[tuple[str, ...], Any]] = (
        [(("serving", "features"), serving.get("features"))] if isinstance(serving, Mapping) else []
    )
    places += [((name,), document.get(name)) for name in ("features", "capabilities")]
    for place, told in places:
        named = (
            enumerate(told)
            if isinstance(told, list)
            else ((one, one) for one in told or ())
            if isinstance(told, Mapping)
            else ()
        )
        for at, name in named:
            if isinstance(name, str) and name not in known:
                yield {"pointer": pointer((*place, at)), "detail": "is no feature" + instead(name, known, "they are")}


@cache
def _schema() -> Schema:
    whole = Bundle.model_json_schema()
    return Schema(whole, whole)


def _strange(
    document: Mapping[str, Any], at: Any, path: tuple[str | int, ...], known_as: tuple[str | int, ...], schema: Schema
) -> Iterator[dict[str, str]]:
    """Yield what is strange at a place and under it.

    Args:
        document: the whole.
        at: what stands at the place.
        path: of the place, as it is written.
        known_as: the same place in a bundle document.
        schema: of a bundle document.
    """
    if isinstance(at, list):
        for number, one in enumerate(at):
            yield from _strange(document, one, (*path, number), (*known_as, number), schema)
        return
    if not isinstance(at, Mapping):
        return
    fields = list(_DRAIN) if path == ("drain",) else schema.fields(known_as, document)
    if not fields:
        return  # a map, whose keys are names
    names = [*fields, *_beside(known_as)]
    libraries = names_told() if known_as == ("engine",) else frozenset()
    for key, value in at.items():
        if key in names:
            inner = "draft" if not path and key == "draft_model" else key
            yield from _strange(document, value, (*path, key), (*known_as, inner), schema)
        elif key not in libraries or not isinstance(value, bool | int | str):
            said = "is no field here" + instead(key, names, "the fields are")
            yield {"pointer": pointer((*path, key)), "detail": said}


def _beside(known_as: tuple[str | int, ...]) -> list[str]:
    place = tuple("0" if isinstance(part, int) else part for part in known_as)
    short = SHORT.get(place[0], {}) if len(place) == 1 else {}
    return [*short, *_BESIDE.get(place, ())]
