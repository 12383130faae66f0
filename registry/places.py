"""Where a document is wrong: pydantic's path through its models as a JSON Pointer into the JSON that was sent."""

from collections.abc import Mapping, Sequence
from typing import Any


def pointer(path: Sequence[str | int]) -> str:
    """Return a path as a JSON Pointer (RFC 6901)."""
    return "".join(f"/{str(part).replace('~', '~0').replace('/', '~1')}" for part in path)


def sentence(error: Mapping[str, Any]) -> str:
    """Return a validation error's sentence, in plain words."""
    match error["type"]:
        case "union_tag_invalid":
            return f"{error['ctx']['tag']} is none of {error['ctx']['expected_tags']}"
        case "union_tag_not_found":
            return "Field required"
        case _:
            return str(error["msg"]).removeprefix("Value error, ")


def place_of(error: Mapping[str, Any], document: Any) -> dict[str, str]:
    """Return {"pointer", "detail"} of one error of pydantic's.

    Its path also names the chosen members of unions, which the JSON does not have: only parts that exist there are
    kept, and the last one of a missing field. A union whose tag is unknown is wrong at its tag, and a rule over a
    whole object at the field with which its sentence begins.

    Args:
        error: with `type`, `loc`, `msg` and perhaps `ctx`.
        document: the JSON that was validated.
    """
    path: list[str | int] = []
    at = document
    *parents, last = error["loc"] or ("",)
    for part in (*parents, last):
        if (isinstance(at, dict) and part in at) or (isinstance(at, list) and isinstance(part, int) and part < len(at)):
            path.append(part)
            at = at[part]
    if error["type"] == "missing":
        path.append(last)
    elif error["type"] in {"union_tag_invalid", "union_tag_not_found"}:
        # The last name quoted is the one in the JSON: a field's alias follows the field.
        path.append(error["ctx"]["discriminator"].split("'")[-2])
    elif error["type"] == "value_error" and isinstance(at, dict):
        field = sentence(error).split(" ", 1)[0].rstrip(":").split(".")[0]
        path += [field] if field in at else []
    return {"pointer": pointer(path), "detail": sentence(error)}
