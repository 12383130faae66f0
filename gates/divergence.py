"""Where two greedy answers part, and whether arithmetic noise can explain it.

Tokens are compared, never text. After the first difference the two contexts differ, so nothing behind it says
anything, and comparing stops there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from schemas.reference import OutputToken, Recording, TokenChoice

LEAST_LOGPROB = Decimal(-9999)
"""What stands for the logarithm of 0, which JSON cannot hold."""
NO_MARGIN = Decimal(9999)
"""What stands for a margin that is unknown, since a token is not among the alternatives that were kept."""
_STEP = Decimal("0.000001")


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first place where two answers to one prompt differ.

    `margin_nat` is how much less probable than its best token the reference found the candidate's token, in
    nats: 0 is a tie. It is NO_MARGIN when the token is not among the reference's alternatives. `is_mutual` tells
    whether each side has the other's token among its alternatives. A side whose answer ended has no token.
    """

    position: int
    reference: OutputToken | None
    candidate: OutputToken | None
    margin_nat: Decimal
    is_mutual: bool

    def is_noise(self, margin_nat: Decimal) -> bool:
        """Tell whether the reference was undecided here to within `margin_nat`, and the candidate as well."""
        return self.is_mutual and self.margin_nat <= margin_nat


def logprob(value: float) -> Decimal:
    """Return a log-probability rounded to 1e-6, with LEAST_LOGPROB for anything below it.

    Raises:
        ValueError: not a number, or above 0 by more than rounding explains.
    """
    if value != value or value > 1e-4:  # noqa: PLR0124 - NaN is the one value that differs from itself
        raise ValueError(f"a log-probability of {value} cannot be")
    bounded = min(0.0, max(float(LEAST_LOGPROB), value))
    return Decimal(repr(bounded)).quantize(_STEP).normalize() + 0


def output_token(record: Mapping[str, Any]) -> OutputToken:
    """Read one token of a gate's records. Raises KeyError, TypeError or ValueError when it is none."""
    top = [TokenChoice(id=one["id"], text=one["text"], logprob=logprob(one["logprob"])) for one in record["top"]]
    return OutputToken(id=record["id"], text=record["text"], logprob=logprob(record["logprob"]), top=top)


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Return the first index at which two sequences differ, also by one having ended; None when they are equal."""
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


def diverge(reference: Recording, candidate: Sequence[OutputToken]) -> Divergence | None:
    """Return the first difference of two greedy answers, or None when their tokens are the same."""
    ours = reference.output
    position = first_difference([token.id for token in ours], [token.id for token in candidate])
    if position is None:
        return None
    if position >= min(len(ours), len(candidate)):
        # One answer went on where the other had ended without a token that says so: no alternative to look at.
        return Divergence(
            position,
            ours[position] if position < len(ours) else None,
            candidate[position] if position < len(candidate) else None,
            NO_MARGIN,
            is_mutual=False,
        )
    mine, theirs = ours[position], candidate[position]
    known = {choice.id: choice.logprob for choice in [*mine.top, mine]}
    best = max(known.values())
    # With penalties the chosen token need not be the best one; then the distance to both counts.
    margin = best - min(known[theirs.id], mine.logprob) if theirs.id in known else NO_MARGIN
    is_mutual = theirs.id in known and mine.id in {choice.id for choice in theirs.top}
    return Divergence(position, mine, theirs, margin, is_mutual=is_mutual)
