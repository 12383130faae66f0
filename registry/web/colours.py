"""Which colour a bundle has on a page: one and the same, wherever it stands. Pure."""

from collections.abc import Iterable, Sequence

from schemas.evidence import SplitEntry

COLOURS = 8
"""Colours that the style sheet has for bundles; a split has at most as many arms."""


def colours(splits: Iterable[Sequence[SplitEntry]]) -> dict[str, int]:
    """Return bundle → number of its colour, from 0: one for all splits of a page, and none twice while enough are left.

    A bundle that is new where all colours are taken gets that of the bundle that served the longest time ago.

    Args:
        splits: in the order in which they were in force, the oldest first, so that a page keeps its colours
            when the next one comes.
    """
    found: dict[str, int] = {}
    held: dict[int, str] = {}
    for split in splits:
        arms = [arm.bundle for arm in split]
        for bundle in arms:
            if bundle not in found:
                free = [number for number in range(COLOURS) if number not in held]
                idle = [number for number, holder in held.items() if holder not in arms]
                found[bundle] = (free or idle)[0]
            # What served last stands last.
            held.pop(found[bundle], None)
            held[found[bundle]] = bundle
    return found
