"""Who had the machine's processors while something was measured, read from records and judged. Pure.

A candidate whose requests waited because other processes had the processors is not slow. So what fails by being slow
alone, on a machine that others kept busy, says nothing about it; what passes in spite of them has passed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from gates.errors import InstrumentError

MAX_FOREIGN_RATIO: Final = 0.2
"""Of the machine's processor time that may go to processes which are neither the engine nor ours. A run that passes in
spite of more has passed; one that fails says nothing about the candidate."""
CODE: Final = "machine-busy"
ADVICE: Final = "Give the runner a machine without other work, then run the gate again."


@dataclass(frozen=True, slots=True)
class Machine:
    """What the processors did while something was measured, in microseconds; see `gates.machine`."""

    cores: int
    wall_us: int
    busy_us: int
    engine_us: int
    own_us: int

    @property
    def foreign_ratio(self) -> float:
        """Share of the machine's processor time that went neither to the engine nor to who measured, 0 to 1."""
        foreign_us = max(0, self.busy_us - self.engine_us - self.own_us)
        return min(1.0, foreign_us / (self.cores * self.wall_us))


def read_machine(record: Mapping[str, Any] | None) -> Machine | None:
    """Read what `gates.machine` recorded; None where nobody looked, or an engine's time could not be seen.

    Raises:
        InstrumentError: it was watched for no time, or has no processor.
        LookupError, TypeError, ValueError: it is no such record.
    """
    if record is None or record["engine_us"] is None:
        return None
    cores, wall_us, *rest = (_count(record[key]) for key in ("cores", "wall_us", "busy_us", "engine_us", "own_us"))
    if not cores or not wall_us:
        raise InstrumentError("The machine was watched for no time, or has no processor; run the gate again.")
    return Machine(cores, wall_us, *rest)


def crowded(machine: Machine | None) -> str | None:
    """Return why slowness is nobody's fault: other processes had the processors. None when they had not.

    Without a record of the machine nobody else can be blamed.
    """
    if machine is None or machine.foreign_ratio <= MAX_FOREIGN_RATIO:
        return None
    return (
        f"Other processes used {machine.foreign_ratio:.0%} of the machine's {machine.cores} processors meanwhile;"
        f" {MAX_FOREIGN_RATIO:.0%} is allowed for a failure to be the candidate's."
    )


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value
