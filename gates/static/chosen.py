"""Which weights of a directory are checked: those that a bundle would take, by the very choice that registering makes.

Published directories hold several: a format for each engine, or a file for each quantization. What a bundle leaves out
is not opened. Where nobody chose among several in GGUF, the first is checked, and a finding says so.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

from gates.files.contents import Reader, select
from schemas.bundle import Role

_FORMATS: Final = (".gguf", ".safetensors")
_UNREAD: Final = frozenset({"other-format", "other-quantization"})
_ASIDE: Final = frozenset(
    {"code", "elsewhere", "media", "of-training", "other-format", "pickled", "unknown", "unread", "unusual-name"}
)
"""Why a file is left out whatever it holds. Weights beside those that are taken are not: some engines take them."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """`folder` has the weights, `unread` are others that a bundle leaves out, `several` are models to choose from.

    `aside` are all files that the engine is not given, so that nobody needs what they hold.
    """

    folder: str = ""
    unread: frozenset[str] = frozenset()
    several: tuple[str, ...] = ()
    aside: frozenset[str] = frozenset()


def choose(paths: Iterable[str], reader: Reader, *, apart: Collection[str] = ()) -> Chosen:
    """Choose among the weights of a directory.

    Args:
        paths: of all files.
        reader: the engine, and which weights a person asked for.
        apart: folders of adapters and of a draft, which are no weights to choose from.

    Raises:
        FileRefused: what a person asked for chooses none, or several.
    """
    selection = select([path for path in paths if not path.startswith(tuple(f"{one}/" for one in apart))], reader)
    if reader.weights is not None:
        for one in selection.refused:
            if one.code in ("weights-unmatched", "weights-ambiguous"):
                raise one
    unread = {one.path for one in selection.left_out if one.code in _UNREAD and one.path.endswith(_FORMATS)}
    taken = sorted(path for path, role in selection.kept.items() if role is Role.WEIGHTS)
    if taken:
        aside = frozenset(one.path for one in selection.left_out if one.code in _ASIDE)
        return Chosen(_folder(taken[0]), frozenset(unread), aside=aside)
    groups = selection.several
    if not groups:
        return Chosen()
    if groups[0][0].endswith(".gguf"):
        names = tuple(group[0] for group in groups)
        return Chosen(_folder(groups[0][0]), frozenset(unread.difference(groups[0])), names)
    # An engine reads every safetensors file of a folder, so that all of them are looked at.
    return Chosen("", frozenset(unread.difference(*groups)))


def _folder(path: str) -> str:
    return path.rpartition("/")[0]
