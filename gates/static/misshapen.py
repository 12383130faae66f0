"""Tensors of other shapes than they must have: those of one kind that are alike in every layer are one finding."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gates.static import names
from gates.static.flaw import MAX_ITEMS, Flaw, flaw
from schemas.short import many

_NUMBER = re.compile(r"(?<=\.)[0-9]+(?=\.)")
_ROWS = (*names.EMBEDDINGS, *names.HEADS, "token_embd.weight", "output.weight")


@dataclass(frozen=True, slots=True)
class Misshapen:
    """A tensor, the file that holds it, its shape, and the one that it must have; None is any size."""

    name: str
    file: str
    found: tuple[int, ...]
    expected: tuple[int | None, ...]

    @property
    def lacks_rows(self) -> bool:
        """Whether it is a row for each token, and only the number of rows is another."""
        return self.name.endswith(_ROWS) and self.found[1:] == self.expected[1:]


def flaws(wrong: Iterable[Misshapen], maker: str, *, advice: str | None = None) -> Iterator[Flaw]:
    """Yield a flaw for each kind of tensor, shape and shape that it must have.

    Args:
        wrong: all of them.
        maker: what makes the shapes, in a sentence's middle.
        advice: what to do, when it is another thing than the catalogue's.
    """
    kinds: dict[tuple[str, tuple[int, ...], tuple[int | None, ...]], list[Misshapen]] = {}
    for one in wrong:
        kinds.setdefault((_NUMBER.sub("*", one.name), one.found, one.expected), []).append(one)
    for alike in kinds.values():
        yield _flaw(alike, maker, advice)


def _flaw(alike: list[Misshapen], maker: str, advice: str | None) -> Flaw:
    first, count = alike[0], len(alike)
    shape, wanted = list(first.found), list(first.expected)
    if first.lacks_rows:
        said = f"{first.name} has the shape {shape}, and {maker} makes it {wanted}."
        return flaw(
            "embedding-rows", said, file=first.file, pointer=first.name, found=shape, expected=wanted, advice=advice
        )
    several = f"{many(count, 'tensor')} such as {first.name} have the shape {shape}, and {maker} makes them {wanted}."
    alone = f"{first.name} has the shape {shape}, and {maker} makes it {wanted}."
    return flaw(
        "shape-mismatch",
        alone if count == 1 else several,
        file=first.file,
        pointer=first.name,
        found={"shape": shape, "count": count, "tensors": [one.name for one in alike[:MAX_ITEMS]]},
        expected={"shape": wanted},
        advice=advice,
    )
