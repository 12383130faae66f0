"""What went wrong, in one line and an exit status."""

from collections.abc import Mapping
from enum import IntEnum
from typing import TYPE_CHECKING, Any, TypeVar

from schemas.problems import Defect, InvalidDocument, Problem

if TYPE_CHECKING:  # what says the version or help needs none of it, and it takes long to load
    from pydantic import BaseModel, ValidationError

    from schemas.faults import Shape

ModelT = TypeVar("ModelT", bound="BaseModel")


class Exit(IntEnum):
    """Exit status of every command."""

    DONE = 0
    FAILED = 1
    """The candidate failed, was rejected or rolled back; for `evidence verify`, evidence is not what was signed."""
    INVALID = 2
    UNDECIDED = 3
    REFUSED = 4
    """Not reachable, or not allowed: by role, or by what is the case now."""
    DEFECT = 70
    """The command itself is wrong: nothing is said of what was asked."""
    INTERRUPTED = 130


def exit_of(problem: Problem) -> Exit:
    """Return the exit status that a problem means."""
    if isinstance(problem, Defect):
        return Exit.DEFECT
    if problem.status in (401, 403, 408, 409, 412, 429, 503):
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
    users = problem.members.get("users")
    found += [
        (str(one.get("holder", "")), str(one.get("why", "")))
        for one in (users if isinstance(users, list) else [])
        if isinstance(one, Mapping)
    ]
    candidates = problem.members.get("candidates")
    found += [
        (str(one.get("name", "")), str(one.get("is", "")))
        for one in (candidates if isinstance(candidates, list) else [])
        if isinstance(one, Mapping)
    ]
    missing = problem.members.get("missing")
    found += [(str(digest), "has not been uploaded") for digest in (missing if isinstance(missing, list) else [])]
    # What the refusal says in its own words is not said again.
    return [
        (place, said)
        for place, said in found
        if not said or said not in problem.detail or (place and place not in problem.detail)
    ]


def invalid(what: str, error: "ValidationError", document: Any, shape: "Shape") -> InvalidDocument:
    """Return what a model's refusal means for the person who wrote the document.

    Args:
        what: name of the document.
        error: of the model.
        document: as it was written.
        shape: the model.
    """
    from schemas.faults import faults_of  # only where it is asked for: it takes a moment
    from schemas.short import many  # as above

    count = error.error_count()
    said = f"{many(count, 'place')} {'is' if count == 1 else 'are'} wrong"
    return InvalidDocument(f"{what}: {said}", errors=faults_of(error, document, shape))


def invalid_act(error: "ValidationError") -> InvalidDocument:
    """Return what the refusal of an act means, whose reason or codes a person wrote."""
    from schemas.api import Approve  # as above

    written = {str(one["loc"][0]): one["input"] for one in error.errors(include_url=False) if one["loc"]}
    return invalid("the act", error, written, Approve)


def made(model: type[ModelT], what: str, **written: Any) -> ModelT:
    """Return a message of what a person wrote on the command line. Raises InvalidDocument, naming each argument."""
    from pydantic import ValidationError  # as above

    try:
        return model.model_validate(written)
    except ValidationError as error:
        raise invalid(what, error, written, model) from None
