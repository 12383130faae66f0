"""Checks the names of launch arguments in versions of vLLM that are older than the list of all that it takes.

Only names are held there, with each form that the parser takes them in: the beginning of a name, underscores for
dashes, `--name.key`, `--no-name`. Values are not looked at.

Source: that of vllm_earlier.json.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Final

from gates.static.flaw import Flaw, flaw
from gates.static.rules import is_within, table
from gates.static.spellings import elsewhere, spellings
from gates.static.typed import short
from schemas.faults import near
from schemas.result import Severity

_DATA: Final = "vllm_earlier"
_NUMBER: Final = re.compile(r"-\d+|-\d*\.\d+")
_KNOWN_EVER: Final = ("-h", "--help")


def check_words(words: Sequence[str], version: str | None) -> Iterator[Flaw]:
    """Check the names on a command line of vLLM; a version that the data says nothing of has no flaws.

    Args:
        words: of the command line, without the program.
        version: of the engine.
    """
    known = table(_DATA)
    if version is None or not is_within(version, known["between"]):
        return
    severity = Severity.BLOCK if version in known["versions"] else Severity.WARN
    names = _names(version)
    for place, word in enumerate(words):
        if word == "--":
            return
        if not word.startswith("-") or _NUMBER.fullmatch(word) or word == "-" or word[:2] == "-O" or " " in word:
            continue
        name = _plain(re.split(r"[=.]", word, maxsplit=1)[0])
        if _is_taken(name, names):
            continue
        message, instead = _unknown(name, version, names)
        yield flaw(
            "argument-unknown",
            message,
            severity=severity,
            pointer=f"/engine/arguments/{place}",
            found=word,
            expected=instead,
            advice=f"Write {instead}." if instead else "Write an argument that this version of vLLM has.",
        )


def _plain(name: str) -> str:
    return name.replace("_", "-") if name.startswith("--") else name


@cache
def _ranges() -> Mapping[str, str]:
    """Return every name with the versions that have it."""
    rows: list[dict[str, Any]] = table(_DATA)["names"]
    return {name: row["in"] for row in rows for name in row["names"]}


@cache
def _names(version: str) -> frozenset[str]:
    return frozenset(name for name, told in _ranges().items() if not told or is_within(version, told)) | {*_KNOWN_EVER}


def _is_taken(name: str, names: frozenset[str]) -> bool:
    """Say whether a parser takes a name: as it is, with `no`, as the beginning of one, or with its value behind it."""
    if name.startswith("--no-") and _is_taken("--" + name.removeprefix("--no-"), names):
        return True
    if name in names or any(one.startswith(name) for one in names if name.startswith("--")):
        return True
    return not name.startswith("--") and (name[:2] in names or name[:3] in names)


def _unknown(name: str, version: str, names: frozenset[str]) -> tuple[str, str | None]:
    """Return what is wrong with a name, and what to write in its place where that can be told."""
    said = f"vllm {version} has no argument {short(name)}"
    later = spellings("vllm", None).names
    if told := _ranges().get(name):
        return f"{said}: the versions {told} have it.", None
    if name in later:
        return (
            f"{said}: the versions {table('vllm')['arguments'][later[name]].get('versions', '>=0.32')} have it.",
            None,
        )
    other, same = elsewhere("vllm", name)
    if same in names:
        return f"{said}, which is {other}'s; write {same}.", same
    if meant := near(name, sorted(names)):
        return f"{said}; {meant}", meant.removeprefix("did you mean ").removesuffix("?")
    return f"{said}.", None
