"""What a code of the static gate's catalogue is: one reason, its severities, and what to do about it."""

from dataclasses import dataclass

from schemas.result import Severity

BLOCK, WARN, INFO = Severity.BLOCK, Severity.WARN, Severity.INFO


@dataclass(frozen=True, slots=True)
class Code:
    """One reason: the severities that it can have, the usual one first; what it says; and what to do."""

    noun: str
    severities: tuple[Severity, ...]
    says: str
    advice: str


def codes(noun: str, **told: tuple[tuple[Severity, ...], str, str]) -> dict[str, Code]:
    """Return the codes of a noun by their names, whose underscores stand for dashes."""
    return {name.replace("_", "-"): Code(noun, *one) for name, one in told.items()}
