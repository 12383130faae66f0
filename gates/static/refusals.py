"""Findings of files that were refused before any could be looked at: what sources list may be in no bundle."""

from collections.abc import Sequence
from typing import Final

from gates.files.refusal import FileRefused
from gates.static.catalogue import CODES
from gates.static.examine import Examined
from gates.static.flaw import Flaw, flaw
from gates.static.listing import OTHER_REFUSALS, REFUSALS, sentence

_CODES: Final = {
    **REFUSALS,
    "weights-missing": "weights-absent",
    "weights-unreadable": "format-unsupported",
    "name-is-folder": "case-collision",
}
"""Codes of what the choice of files refuses → codes of the catalogue, where they have another name there."""


def examined(refused: Sequence[FileRefused]) -> Examined | None:
    """Return what a refused choice of files is as a report; None where it is a question of what was asked for.

    Args:
        refused: every reason; of the whole, the file is empty.
    """
    codes = [_code(one) for one in refused]
    if None in codes or not codes:
        return None
    return Examined(tuple(_flaw(one, code) for one, code in zip(refused, codes, strict=True) if code is not None), {})


def _code(one: FileRefused) -> str | None:
    if one.code.startswith("name-") and one.code not in _CODES:
        return OTHER_REFUSALS
    code = _CODES.get(one.code, one.code)
    return code if code in CODES else None


def _flaw(one: FileRefused, code: str) -> Flaw:
    name = one.file or None
    return flaw(
        code,
        f"{name or 'The source'} {one.message}.",
        file=name,
        pointer=one.pointer,
        found=one.found or name,
        expected=one.expected or CODES[code].advice,
        advice=sentence(one.advice),
    )
