"""Why a release does not move, and what a person can do about each of that. Pure."""

from collections.abc import Sequence
from enum import StrEnum

from schemas.evidence import Kind
from schemas.release import BESIDE, LIVE, SERVES_ON, TERMINAL, Release, ReleaseDetail

RESUMERS = "managers and administrators"
"""Who may resume, in words."""


class Hold(StrEnum):
    """A reason for which a release holds."""

    GATES_UNDECIDED = "gates_undecided"
    NOT_ELIGIBLE = "not_eligible"
    FINDINGS_UNACCEPTED = "findings_unaccepted"
    LIVE_ALREADY = "live_already"
    REPLICA_FAILED = "replica_failed"
    STEP_ERRORED = "step_errored"
    STEP_INCONCLUSIVE = "step_inconclusive"
    NO_WAY_BACK = "no_way_back"
    WAY_BACK_FAILED = "way_back_failed"
    GATE_INCONCLUSIVE = "gate_inconclusive"
    """`gates_undecided` where a gate ended without a verdict for want of data; no entry has it."""
    PAUSED = "paused"
    """A person said so, with an entry of its own."""
    QUARANTINED = "quarantined"
    """Of the bundle."""
    NO_RUNNER = "no_runner"
    """No runner takes its job: no entry says so, since that may end at any moment."""
    LIVE_GOES_BACK = "live_goes_back"
    """The live release beside it is being taken back: no entry says so, since that ends by itself."""
    UNKNOWN = "unknown"
    """Held by an entry that this version does not know, or whose log was not asked for."""


CAUSES = frozenset(
    {
        Hold.GATES_UNDECIDED,
        Hold.NOT_ELIGIBLE,
        Hold.FINDINGS_UNACCEPTED,
        Hold.LIVE_ALREADY,
        Hold.REPLICA_FAILED,
        Hold.STEP_ERRORED,
        Hold.STEP_INCONCLUSIVE,
        Hold.NO_WAY_BACK,
        Hold.WAY_BACK_FAILED,
    }
)
"""Reasons that entries of the kind `held` give as their cause."""

WHAT_TO_DO = {
    Hold.GATES_UNDECIDED: "mend what kept the gate from measuring, as its finding says; then {resume} runs the gates "
    "that are open again, {end}",
    Hold.GATE_INCONCLUSIVE: "give the gate a quieter machine, or release under a policy that measures more; {resume} "
    "runs the gates that are open again, {end}",
    Hold.NOT_ELIGIBLE: "its evidence counts no more, and only a new release measures again: {end}, then "
    "`sluicegate release create` with the same bundle and policy",
    Hold.FINDINGS_UNACCEPTED: "a manager answers for the warning with "
    "`sluicegate release approve {id} --accept CODE --reason …`; {end}",
    Hold.LIVE_ALREADY: "there is nothing to move traffic between: {end}",
    Hold.REPLICA_FAILED: "look at the last lines of the replica's log in `sluicegate release show {id}`; once that is "
    "mended, {resume} boots it again, {end}",
    Hold.STEP_ERRORED: "see that the gateway answers and its access log is written; {resume} gives the step a fresh "
    "start, {end}",
    Hold.STEP_INCONCLUSIVE: "send it more traffic: {resume} gives the step a fresh start, {end}",
    Hold.NO_WAY_BACK: "release another version, or `sluicegate release rollback {id} --to-nothing --reason …` lets "
    "the target serve nothing",
    Hold.WAY_BACK_FAILED: "it goes on by itself once that version is ready: `sluicegate target show TARGET "
    "--all` shows how its replicas ended; `sluicegate release rollback {id} --to-nothing --reason …` does not "
    "wait for it and lets the target serve nothing, at once",
    Hold.PAUSED: "{resume} lets it go on, {end}",
    Hold.QUARANTINED: "find out whether the bundle's bytes are right: then `sluicegate bundle lift {bundle} "
    "--reason …` trusts it again, {end}",
    Hold.NO_RUNNER: "it goes on by itself once a runner takes its job: `sluicegate runner list` shows who could, "
    "`sluicegate runner undrain NAME` lets one take jobs again, {end}",
    Hold.LIVE_GOES_BACK: "it goes on by itself once that is done: `sluicegate target show TARGET` shows what is live; "
    "{end}",
    Hold.UNKNOWN: "{resume} lets it go on, {end}",
}
"""Reason → what to do. `{resume}` and `{end}` are commands."""


def holds(release: Release) -> list[Hold]:
    """Return every reason for which a release does not move, in the order in which pages tell them."""
    if release.phase in TERMINAL:
        return []
    found = [Hold.PAUSED] if release.is_paused else []
    if release.quarantined:
        found.append(Hold.QUARANTINED)
    if release.held:
        found.append(_cause(release))
    if (why := waits_for(release)) is not None:
        found.append(why)
    return found


def may_be_agreed_to(release: Release) -> bool:
    """Tell whether agreeing to a release is of use: where its evidence counts no more, nobody can."""
    return Hold.NOT_ELIGIBLE not in holds(release)


def waits_for(release: Release) -> Hold | None:
    """Return the reason of what a release waits for; None where it waits for nothing, or serves on meanwhile."""
    if release.waits is None or release.waits.startswith(SERVES_ON):
        return None
    return Hold.LIVE_GOES_BACK if release.waits.startswith(BESIDE) else Hold.NO_RUNNER


def _cause(release: Release) -> Hold:
    """Return why a release holds: the last entry that says so replaced every one before it."""
    log = release.log if isinstance(release, ReleaseDetail) else []
    last = next((entry for entry in reversed(log) if entry.kind is Kind.HELD), None)
    cause = None if last is None else last.body.get("cause")
    if cause not in CAUSES:
        return Hold.UNKNOWN
    is_undecided = any(gate.verdict == "inconclusive" for gate in release.gates)
    return Hold.GATE_INCONCLUSIVE if cause == Hold.GATES_UNDECIDED and is_undecided else Hold(cause)


def advice(hold: Hold, release: Release) -> str:
    """Return what a person can do about one reason for which a release holds."""
    has_traffic = release.phase in LIVE
    deed, ends = ("rollback", "takes its traffic back") if has_traffic else ("reject", "ends it")
    return WHAT_TO_DO[hold].format(
        id=release.id,
        bundle=release.bundle[7:19],
        resume=f"`sluicegate release resume {release.id} --reason …`",
        end=f"`sluicegate release {deed} {release.id} --reason …` {ends}",
    )


def way_out(release: Release, *, also_waits: bool = True) -> str | None:
    """Return what a person can do about all that holds a release; None where nothing does.

    Without `also_waits`, nothing is said of a job that waits for a runner: at first every one does.
    """
    found = [hold for hold in holds(release) if also_waits or hold is not Hold.NO_RUNNER]
    return "; ".join(lines(found, release)) or None


def lines(found: Sequence[Hold], release: Release) -> list[str]:
    """Return what a person can do about each of some reasons, once, and behind the last who may resume."""
    told = list(dict.fromkeys(advice(hold, release) for hold in found))
    if any("{resume}" in WHAT_TO_DO[hold] for hold in found):
        told[-1] += f"; {RESUMERS} may resume"
    return told
