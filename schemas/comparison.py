"""Two bundles compared: what differs, what that can affect, and which gates must run again for it."""

from typing import Literal

from pydantic import Field

from schemas.common import Instant, Wire


class Side(Wire):
    """One of two bundles."""

    digest: str = Field(description="Its name.")
    name: str = Field(description="Family name.")
    serving_digest: str = Field(description="Digest over what the engine reads and how it is run.")


class ValueChange(Wire):
    """One value that differs."""

    pointer: str = Field(description="JSON Pointer into the second document; into the first for what only that has.")
    was: object | None = Field(description="Value in the first; null where it says nothing there.")
    now: object | None = Field(description="Value in the second; null where it says nothing there.")


class FileState(Wire):
    """A file as one of the bundles has it."""

    size: int = Field(description="Size in bytes.")
    sha256: str = Field(description="SHA-256 of the bytes.")
    role: str = Field(description="What the file is for.")


class FileChange(Wire):
    """One file that differs."""

    path: str = Field(description="Relative path in the bundle.")
    change: Literal["added", "removed", "changed"] = Field(description="What happened to it.")
    was: FileState | None = Field(description="As the first bundle has it; null where it has none.")
    now: FileState | None = Field(description="As the second bundle has it; null where it has none.")


class PartChange(Wire):
    """A part of a bundle that differs."""

    part: str = Field(description="Component, or one of the parts that serve nothing.")
    is_served: bool = Field(description="Whether an engine may read it.")
    was: str = Field(description="Digest of the part in the first bundle.")
    now: str = Field(description="Digest of the part in the second.")
    affects: str = Field(description="What such a change can affect.")
    values: list[ValueChange] = Field(description="Values that differ, in the order of the document.")
    files: list[FileChange] = Field(description="Files that differ, by path.")


class PartWithin(Wire):
    """A part that is declared the same and lies in files of another part, which differ: nobody looks into them here."""

    part: str = Field(description="Component.")
    within: str = Field(description="The part whose files hold it.")
    why: str = Field(description="One sentence.")


class BundleDiff(Wire):
    """What differs between two bundles."""

    first: Side = Field(description="What is compared with, such as the accepted bundle.")
    second: Side = Field(description="What is looked at, such as the candidate.")
    is_same: bool = Field(description="Whether they are one and the same bundle.")
    is_served_same: bool = Field(description="Whether what the engine reads and how it is run is the same.")
    changed: list[PartChange] = Field(description="Parts that differ.")
    within: list[PartWithin] = Field(
        description="Parts that lie in files of another part, which differ: neither known to be the same nor to differ."
    )
    unchanged: list[str] = Field(description="Parts that are the same.")


class Reason(Wire):
    """Why a changed part asks for a gate again, or leaves its result as it is."""

    part: str = Field(description="The part; `evidence` where the first bundle has no result that could count.")
    is_against: bool = Field(description="Whether it asks for the gate again.")
    why: str = Field(description="One sentence.")


class Held(Wire):
    """The newest result that the first bundle has of a gate."""

    entry: str = Field(description="Digest of the entry of evidence.")
    verdict: str = Field(description="Verdict.")
    definition: str = Field(description="Digest of the gate's code version and the rule that it was judged by.")
    recorded_at: Instant = Field(description="When it was recorded.")
    runner: str | None = Field(description="Machine that measured it, where that is known.")
    refused: str | None = Field(description="Why it cannot count; null when it could.")


class GateImpact(Wire):
    """What a change means for one gate."""

    gate: str = Field(description="Gate name.")
    outcome: Literal["again", "would_carry", "carries"] = Field(
        description="again: it must run on the second bundle. carries: the first bundle's result says the same of the "
        "second. would_carry: it would, if the first bundle has a result; nobody looked."
    )
    reasons: list[Reason] = Field(description="One for each part that differs.")
    bound_to: str = Field(description="What a result of this gate holds for besides the bundle.")
    held: Held | None = Field(
        description="The newest result that the first bundle has; null where there is none, or nobody looked."
    )

    def deciding(self) -> list[tuple[list[str], str]]:
        """Return the reasons that decide, those with one sentence together: parts, sentence.

        That there is no evidence decides only where nothing else does.
        """
        against = [reason for reason in self.reasons if reason.is_against]
        parts = [reason for reason in against if reason.part != "evidence"] or against or self.reasons
        grouped: dict[str, list[str]] = {}
        for reason in parts:
            grouped.setdefault(reason.why, []).append(reason.part)
        return [(named, why) for why, named in grouped.items()]


class JointCheck(Wire):
    """Features that the second bundle has in use together, and that must be checked together after this change."""

    name: str = Field(description="Names of the features.")
    features: list[str] = Field(description="The features.")
    unstated: list[str] = Field(description="Those of them that a bundle does not tell, and that count as in use.")
    because: list[str] = Field(description="Parts whose change asks for the check.")
    what: str = Field(description="What has to hold for both together.")
    gates: list[str] = Field(description="Gates that see some of it; empty when none does.")
    unseen: str | None = Field(description="What no gate sees.")


class OutsideChange(Wire):
    """A change that is not in a bundle and still asks for gates again."""

    change: str = Field(description="What changes.")
    where: str = Field(description="Where it is recorded.")
    gates: list[str] = Field(description="Gates that must run again when it changes.")


class BundleImpact(Wire):
    """Which gates must run again for the second bundle, given evidence of the first. Advice: it lets nothing pass."""

    first: Side = Field(description="Bundle with evidence.")
    second: Side = Field(description="Bundle that shall be released.")
    is_same: bool = Field(description="Whether they are one and the same bundle.")
    policy: str | None = Field(description="Policy whose gates these are; null for every gate that there is.")
    gates: list[GateImpact] = Field(description="In the order of the policy, or of the catalogue.")
    joint: list[JointCheck] = Field(description="What must be checked together.")
    outside: list[OutsideChange] = Field(description="What no comparison of bundles can see.")
    advice: str = Field(description="What a release does with this.")
