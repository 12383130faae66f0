"""The memory of one device: what is there, what is taken, what is left for sequences, and which number decides."""

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

from schemas.short import agreeing, many

GB = 10**9


@dataclass(frozen=True, slots=True)
class Reserve:
    """What is stated about each device, in bytes.

    `utilization` is the share of the memory that the engine may use, above 0 and at most 1. Activations, captured
    graphs with their workspaces, and headroom depend on kernels and shapes: they are stated, best from a measured
    high-water mark, and never derived here.
    """

    device_bytes: int
    utilization: Decimal = Decimal("0.90")
    activation_bytes: int = 0
    graph_bytes: int = 0
    headroom_bytes: int = 0

    def __post_init__(self) -> None:
        if self.device_bytes < 1 or not 0 < self.utilization <= 1:
            raise ValueError("a device has memory, and utilization is above 0 and at most 1")
        if min(self.activation_bytes, self.graph_bytes, self.headroom_bytes) < 0:
            raise ValueError("what is reserved is at least 0")

    @property
    def usable_bytes(self) -> int:
        """Bytes that the engine may use."""
        return int(self.device_bytes * Fraction(self.utilization))


@dataclass(frozen=True, slots=True)
class Ledger:
    """One device of one pipeline stage, the fullest of it; everything in bytes."""

    stage: int
    reserve: Reserve
    weights: int
    sequence_bytes: int
    adapters: int = 0
    draft: int = 0
    shares: tuple[tuple[str, int], ...] = ()

    @property
    def room(self) -> int:
        """What is left for sequences; below 0 by how much is missing."""
        reserve = self.reserve
        taken = self.weights + self.adapters + self.draft
        taken += reserve.activation_bytes + reserve.graph_bytes + reserve.headroom_bytes
        return reserve.usable_bytes - taken

    @property
    def sequences(self) -> int:
        """Whole sequences that the room holds at the stated context."""
        return 0 if self.room <= 0 or self.sequence_bytes < 1 else self.room // self.sequence_bytes

    @property
    def largest(self) -> tuple[str, int]:
        """What takes the most before any sequence, and its bytes."""
        reserve = self.reserve
        taken = {
            "weights": self.weights,
            "adapters": self.adapters,
            "the draft": self.draft,
            "activations": reserve.activation_bytes,
            "graphs": reserve.graph_bytes,
            "headroom": reserve.headroom_bytes,
        }
        return max(taken.items(), key=lambda one: one[1])

    def lines(self) -> dict[str, int]:
        """Return every line of the ledger, as a document has it."""
        reserve = self.reserve
        return {
            "device_bytes": reserve.device_bytes,
            "usable_bytes": reserve.usable_bytes,
            "weight_bytes": self.weights,
            "adapter_bytes": self.adapters,
            "draft_bytes": self.draft,
            "activation_bytes": reserve.activation_bytes,
            "graph_bytes": reserve.graph_bytes,
            "headroom_bytes": reserve.headroom_bytes,
            "cache_room_bytes": self.room,
            "sequence_bytes": self.sequence_bytes,
            "sequences": self.sequences,
        }


@dataclass(frozen=True, slots=True)
class Judgement:
    """Whether a layout fits, and the number that decides.

    `what` is memory (the weights and reserves alone are too much), sequences (the cache holds too few, or, when it
    fits, how many it holds) or layout (something cannot be divided). `found` and `expected` are in `unit`.
    """

    fits: bool
    what: str
    message: str
    stage: int | None = None
    found: int | None = None
    expected: int | None = None
    unit: str = ""
    sequences: int = 0
    cached_tokens: int = 0


def judge(ledgers: Sequence[Ledger], context_tokens: int, wanted: int, *, groups: int = 1) -> Judgement:
    """Judge a layout by its fullest device.

    Args:
        ledgers: one of each stage, 1 or more.
        context_tokens: of every sequence, 1 or more.
        wanted: sequences at once, 1 or more.
        groups: of devices that each hold sequences of their own.
    """
    tight = min(ledgers, key=lambda one: one.room)
    if tight.room <= 0:
        needed = tight.reserve.usable_bytes - tight.room
        usable = many(tight.reserve.usable_bytes, "usable byte")
        said = f"a device of stage {tight.stage} has {usable}, and {needed} {agreeing(needed, 'is', 'are')} taken"
        what, most = tight.largest
        return Judgement(
            fits=False,
            what="memory",
            message=f"{said} before any sequence, {most} of them by {what}",
            stage=tight.stage,
            found=tight.reserve.usable_bytes,
            expected=needed,
            unit="bytes",
        )
    least = min(ledgers, key=lambda one: Fraction(one.room, max(1, one.sequence_bytes)))
    sequences = least.sequences * groups
    tokens = int(Fraction(least.room * context_tokens, max(1, least.sequence_bytes))) * groups
    fits = sequences >= wanted
    said = f"the cache of stage {least.stage} holds {many(sequences, 'sequence')} of {many(context_tokens, 'token')}"
    return Judgement(
        fits,
        "sequences",
        f"{said}; wanted: {wanted}",
        least.stage,
        sequences,
        wanted,
        "sequences",
        sequences,
        tokens,
    )


def cached_tokens(room_bytes: int, token_bytes: int) -> int:
    """Return the whole tokens that a room for cache holds, 0 when there is no room.

    Source: section 4.5, where 52 GB hold about 397,000 tokens of 131,072 bytes.
    """
    return max(0, room_bytes) // token_bytes
