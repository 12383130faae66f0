"""Tensors of other shapes than they must have: all that differ in the same sizes are one finding."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from gates.static import names
from gates.static.flaw import MAX_ITEMS, Flaw, flaw
from schemas.short import many

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

    @property
    def way(self) -> frozenset[tuple[int, int]] | None:
        """Sizes that differ, as found and as made; None where there are more or fewer of them."""
        if len(self.found) != len(self.expected):
            return None
        pairs = zip(self.found, self.expected, strict=True)
        return frozenset((found, made) for found, made in pairs if made is not None and found != made)


def flaws(
    wrong: Iterable[Misshapen], maker: str, *, sizes: Mapping[str, int] | None = None, advice: str | None = None
) -> Iterator[Flaw]:
    """Yield a flaw for each way in which shapes differ: a size that is wrong everywhere is told once.

    Args:
        wrong: all of them.
        maker: what makes the shapes, in a sentence's middle.
        sizes: key of it → the size that it says.
        advice: what to do, when it is another thing than the catalogue's.
    """
    ways: dict[object, list[Misshapen]] = {}
    for one in wrong:
        ways.setdefault((one.lacks_rows, one.way), []).append(one)
    for alike in ways.values():
        yield _flaw(alike, maker, sizes or {}, advice)


def _flaw(alike: list[Misshapen], maker: str, sizes: Mapping[str, int], advice: str | None) -> Flaw:
    first, count = alike[0], len(alike)
    shape, wanted = list(first.found), list(first.expected)
    told = f"{first.name} has the shape {shape}, and {maker} makes it {_shown(first.expected)}"
    causes = sorted({key for key, size in sizes.items() for found, made in first.way or () if size == made != found})
    told += f" ({', '.join(f'{key} {sizes[key]}' for key in causes)})" if causes else ""
    told += "" if count == 1 else f"; {many(count - 1, 'other tensor', 'differs', 'differ')} in the same way"
    if first.lacks_rows:
        return flaw(
            "embedding-rows",
            f"{told}.",
            file=first.file,
            pointer=first.name,
            found=shape,
            expected=wanted,
            advice=advice,
        )
    return flaw(
        "shape-mismatch",
        f"{told}.",
        file=first.file,
        pointer=first.name,
        found={"shape": shape, "count": count, "tensors": [one.name for one in alike[:MAX_ITEMS]]},
        expected={"shape": wanted},
        advice=advice,
    )


def _shown(shape: tuple[int | None, ...]) -> str:
    return f"[{', '.join('any' if size is None else str(size) for size in shape)}]"
