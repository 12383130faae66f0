"""What went wrong, in one line and an exit status."""

from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import Any, ClassVar

from pydantic import ValidationError

from schemas.problems import InvalidDocument, Problem


class Exit(IntEnum):
    """Exit status of every command."""

    DONE = 0
    FAILED = 1
    """The candidate failed, was rejected or rolled back; for `evidence verify`, evidence is not what was signed."""
    INVALID = 2
    UNDECIDED = 3
    REFUSED = 4
    """Not reachable, or not allowed: by role, or by what is the case now."""
    INTERRUPTED = 130


class Usage(Problem):
    """The command line does not say what to do, or names something that is not there."""

    kind: ClassVar[str] = "usage"
    title: ClassVar[str] = "Usage"
    status: ClassVar[int] = 400


def exit_of(problem: Problem) -> Exit:
    """Return the exit status that a problem means."""
    if problem.status in (401, 403, 409, 412, 429, 503):
        return Exit.REFUSED
    return Exit.UNDECIDED if problem.status >= 500 else Exit.INVALID


def places(problem: Problem) -> list[tuple[str, str]]:
    """Return (JSON Pointer or name, what is wrong there) for each place that a problem names."""
    errors = problem.members.get("errors")
    found = [
        (str(error.get("pointer", "")), str(error.get("detail", "")))
        for error in (errors if isinstance(errors, list) else [])
        if isinstance(error, Mapping)
    ]
    missing = problem.members.get("missing")
    found += [(str(digest), "has not been uploaded") for digest in (missing if isinstance(missing, list) else [])]
    return found


def invalid(what: str, error: ValidationError, document: Any = None) -> InvalidDocument:
    """Return what a model's refusal means for the person who wrote the document."""
    errors = [
        {"pointer": pointer(one["loc"], document), "detail": str(one["msg"]).removeprefix("Value error, ")}
        for one in error.errors(include_url=False, include_context=False, include_input=False)
    ]
    said = "1 place is wrong" if len(errors) == 1 else f"{len(errors)} places are wrong"
    return InvalidDocument(f"{what}: {said}", errors=errors)


def pointer(path: Iterable[str | int], document: Any = None) -> str:
    """Return a path as a JSON Pointer (RFC 6901), without the union tags that are no keys of the document."""
    parts = []
    for part in path:
        if isinstance(document, Mapping) and part not in document and part in document.values():
            continue  # a discriminator's value, which names the variant
        parts.append(str(part).replace("~", "~0").replace("/", "~1"))
        try:
            document = document[part] if document is not None else None
        except (LookupError, TypeError):
            document = None
    return "".join(f"/{part}" for part in parts)
