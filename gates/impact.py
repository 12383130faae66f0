"""Which gates must run again for a bundle, given what another one has been through. Pure, and closed on failure.

A result carries over only where the table of couplings says so for every part that changed, and only when the first
bundle has a result that still counts. This is advice: what a release needs is what its policy demands.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from gates import catalog
from gates.couplings import COUPLINGS, NO_ROW, NOT_REACHED, UPGRADES
from gates.difference import diff
from gates.features import JOINTS, MATRIX_PARTS, TRAITS, Joint
from schemas.bundle import Bundle
from schemas.comparison import BundleDiff, BundleImpact, GateImpact, Held, JointCheck, OutsideChange, Reason
from schemas.policy import Policy
from schemas.result import GateResult, Severity, Verdict
from schemas.short import span

ADVICE = (
    "A release runs every gate that its policy demands, on the bundle that it releases; "
    "results of another bundle are not counted for it."
)
SAME = "It is the same bundle."


@dataclass(frozen=True, slots=True)
class Recorded:
    """A gate result in the log: the newest that a bundle has of the gate, since it withdraws what came before."""

    entry: str
    result: GateResult
    recorded_at: datetime
    runner: str | None
    revoked: str | None
    """Why it was revoked; None when it was not."""


def impact(
    first: Bundle,
    second: Bundle,
    *,
    policy: Policy | None = None,
    evidence: Mapping[str, Recorded] | None = None,
    now: datetime | None = None,
) -> BundleImpact:
    """Say what a change of bundles means for each gate.

    Args:
        first: the bundle with evidence.
        second: the bundle that shall be released.
        policy: only its gates, by its rules and its lifetime of evidence; otherwise every gate of the catalogue.
        evidence: gate → the newest result of `first`; None when nobody looked.
        now: by which evidence expires; needed with a policy and evidence.
    """
    return of_difference(diff(first, second), second, policy=policy, evidence=evidence, now=now)


def of_difference(
    found: BundleDiff,
    second: Bundle,
    *,
    policy: Policy | None = None,
    evidence: Mapping[str, Recorded] | None = None,
    now: datetime | None = None,
) -> BundleImpact:
    """Say what a difference means, as `impact` does, when it is known already."""
    gates = [rule.gate for rule in policy.gates] if policy is not None else [*catalog.CATALOG]
    return BundleImpact(
        first=found.first,
        second=found.second,
        is_same=found.is_same,
        policy=None if policy is None else policy.digest,
        gates=[_of_gate(gate, found, *_held(gate, policy, evidence, now)) for gate in gates],
        joint=_joints(second, _touched(found)),
        outside=[
            OutsideChange(change=one.name, where=one.outside, gates=[gate for gate in gates if gate in one.gates])
            for one in UPGRADES
            if one.outside is not None
        ],
        advice=ADVICE,
    )


def again(gate: str, parts: Sequence[str]) -> bool:
    """Tell whether a change in these parts asks for a gate again. What the table does not name does."""
    return any(reason.is_against for reason in _reasons(gate, parts))


def _touched(found: BundleDiff) -> list[str] | None:
    """Return the parts that differ or may; None when the bundles differ, and in no part."""
    parts = [change.part for change in found.changed] + [one.part for one in found.within]
    return parts if parts or found.is_same else None


def _of_gate(gate: str, found: BundleDiff, held: Held | None, refused: str | None) -> GateImpact:
    row = COUPLINGS.get(gate)
    reasons = _all_reasons(gate, _touched(found))
    if refused is not None:
        reasons.append(Reason(part="evidence", is_against=True, why=refused))
    is_again = any(reason.is_against for reason in reasons)
    return GateImpact(
        gate=gate,
        outcome="again" if is_again else "would_carry" if held is None else "carries",
        reasons=reasons,
        bound_to=row.bound_to if row is not None else "what this version does not know",
        held=held,
    )


def _all_reasons(gate: str, parts: Sequence[str] | None) -> list[Reason]:
    if parts is None:
        return [Reason(part="bundle", is_against=True, why=NOT_REACHED)]
    if parts:
        return _reasons(gate, parts)
    is_known = gate in COUPLINGS
    return [Reason(part="bundle", is_against=not is_known, why=SAME if is_known else NO_ROW)]


def _reasons(gate: str, parts: Sequence[str]) -> list[Reason]:
    row = COUPLINGS.get(gate)
    if row is None:
        return [Reason(part=part, is_against=True, why=NO_ROW) for part in parts]
    return [
        Reason(
            part=part,
            is_against=part in row.again or part not in row.carries,
            why=row.again.get(part) or row.carries.get(part) or NO_ROW,
        )
        for part in parts
    ]


# -------------------------------------------------------------------------------------------- what there is of it

NO_RESULT = "The first bundle has no result of this gate."


def _held(
    gate: str, policy: Policy | None, evidence: Mapping[str, Recorded] | None, now: datetime | None
) -> tuple[Held | None, str | None]:
    """Return the result that is there, and why nothing that is there can count."""
    recorded = None if evidence is None else evidence.get(gate)
    if recorded is None:
        return None, None if evidence is None else NO_RESULT
    refused = _refused(recorded, policy, now)
    held = Held(
        entry=recorded.entry,
        verdict=recorded.result.verdict,
        definition=recorded.result.definition,
        recorded_at=recorded.recorded_at,
        runner=recorded.runner,
        refused=refused,
    )
    return held, refused


def _refused(recorded: Recorded, policy: Policy | None, now: datetime | None) -> str | None:
    """Return why a result cannot count for any bundle, or None."""
    result = recorded.result
    if recorded.revoked is not None:
        return f"The first bundle's result was revoked: {recorded.revoked}"
    if result.verdict is not Verdict.PASSED:
        return f"The first bundle's newest result is {result.verdict}."
    if any(finding.severity is Severity.WARN for finding in result.findings):
        return "The first bundle's result passed with warnings, and a person answers for those on each release."
    if policy is None:
        return None
    rule = next(rule for rule in policy.gates if rule.gate == result.gate)
    if result.definition != catalog.definition(result.gate, rule):
        return "The first bundle's result was judged by another rule, or by another version of the gate."
    if now is None or recorded.recorded_at < now - timedelta(seconds=float(policy.evidence_seconds)):
        return f"The first bundle's result is too old: it counts for {span(policy.evidence_seconds)}."
    return None


# ------------------------------------------------------------------------------------------------ what goes together


def _joints(second: Bundle, parts: Sequence[str] | None) -> list[JointCheck]:
    """Return the combinations that the second bundle has in use and that a change in these parts touches."""
    touched = {*TRAITS_PARTS, *MATRIX_PARTS} if parts is None else {*parts}
    found = []
    for joint in JOINTS:
        states = {name: TRAITS[name].used(second) for name in joint.features}
        because = sorted(touched & triggers(joint))
        if because and False not in states.values():
            found.append(
                JointCheck(
                    name=joint.name,
                    features=[*joint.features],
                    unstated=[name for name, state in states.items() if state is None],
                    because=because,
                    what=joint.what,
                    gates=[*joint.gates],
                    unseen=joint.unseen,
                )
            )
    return found


def triggers(joint: Joint) -> frozenset[str]:
    """Return the parts whose change asks for a combination again."""
    own = {part for name in joint.features for part in TRAITS[name].parts}
    return MATRIX_PARTS | own | {"doubtful"}


TRAITS_PARTS = frozenset(part for trait in TRAITS.values() for part in trait.parts)
