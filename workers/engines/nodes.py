"""How engines are told that they span several machines: the rows of `data/nodes.toml`."""

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from schemas.bundle import Bundle

_FILE = Path(__file__).with_name("data") / "nodes.toml"


@dataclass(frozen=True)
class Spanning:
    """What the pods of one engine are told beside its command line on one machine, where variables are put in."""

    every: tuple[str, ...]
    others: tuple[str, ...] = ()
    instead_of: tuple[str, ...] = ()
    start: tuple[str, ...] = ()

    def first(self, argv: Sequence[str], nodes: int) -> list[str]:
        """Return the command line of the first, which answers."""
        return [*argv, *(word.format(nodes=nodes) for word in self.every)]

    def other(self, argv: Sequence[str], nodes: int) -> list[str]:
        """Return the command line of each other one. Raises ValueError when it is not started as it should be."""
        words, size = list(argv), len(self.instead_of)
        if size:
            places = [at for at in range(len(words)) if tuple(words[at : at + size]) == self.instead_of]
            if not places:
                raise ValueError(f"the command line has no {' '.join(self.instead_of)}")
            words[places[0] : places[0] + size] = self.start
        return [*self.first(words, nodes), *self.others]


def nodes_problems(bundle: Bundle) -> Iterator[str]:
    """Yield why a bundle's replica cannot span as many machines as its layout says."""
    layout = bundle.topology
    if layout.nodes == 1:
        return
    if bundle.engine.image is None:
        yield f"a process on one machine has nodes 1, not {layout.nodes}"
    if (ranks := layout.tensor_parallel * layout.pipeline_parallel) % layout.nodes:
        yield f"nodes {layout.nodes} do not each have the same number of {ranks} ranks"


@cache
def spanning(engine: str) -> Spanning | None:
    """Return how an engine spans several machines; None when it spans none."""
    row = tomllib.loads(_FILE.read_text(encoding="utf-8")).get(engine)
    return None if row is None else Spanning(**{key: tuple(words) for key, words in row.items()})
