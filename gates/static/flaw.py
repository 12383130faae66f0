"""One thing that a static check found, with values that a program can compare."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from gates.static.catalogue import CODES
from schemas.result import Severity

MAX_ITEMS = 20
"""Names of one kind that a flaw lists; the number of all is in its message."""


@dataclass(frozen=True, slots=True)
class Flaw:
    """A finding before it becomes text: `found` and `expected` are JSON values."""

    code: str
    severity: Severity
    message: str
    file: str | None
    pointer: str | None
    found: Any
    expected: Any
    advice: str

    def as_json(self) -> dict[str, Any]:
        """Return what a program reads."""
        return {
            "code": self.code,
            "severity": self.severity.value,
            "message": self.message,
            "file": self.file,
            "pointer": self.pointer,
            "found": self.found,
            "expected": self.expected,
            "advice": self.advice,
        }


class Where(TypedDict):
    """Where a flaw is, for `flaw(…, **where)`."""

    file: str
    pointer: str | None


def flaw(
    code: str,
    message: str,
    *,
    severity: Severity | None = None,
    file: str | None = None,
    pointer: str | None = None,
    found: Any,
    expected: Any,
    advice: str | None = None,
) -> Flaw:
    """Make a flaw of the catalogue.

    Args:
        code: key of CODES.
        message: one sentence with the values.
        severity: one of the code's severities; by default its first.
        file: path in the bundle.
        pointer: JSON Pointer, tensor or launch argument.
        found: what there is; None where nothing is.
        expected: what there should be; None only where nobody can say it.
        advice: what to do, when it is another thing than the catalogue's.

    Raises:
        ValueError: the code does not have that severity.
    """
    entry = CODES[code]
    chosen = severity or entry.severities[0]
    if chosen not in entry.severities:
        raise ValueError(f"{code} is never {chosen}")
    return Flaw(code, chosen, message, file, pointer, found, expected, advice or entry.advice)


def read_flaw(value: Mapping[str, Any]) -> Flaw:
    """Return a flaw from its JSON. Raises LookupError or ValueError for what no version of this code wrote."""
    entry = CODES[value["code"]]
    severity = Severity(value["severity"])
    if severity not in entry.severities:
        raise ValueError(f"{value['code']} is never {severity}")
    return Flaw(
        value["code"],
        severity,
        str(value["message"]),
        value["file"],
        value["pointer"],
        value["found"],
        value["expected"],
        str(value["advice"]),
    )


def listed(names: Sequence[str]) -> str:
    """Return up to three names for a sentence."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
