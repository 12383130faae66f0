"""One sentence and one tone for each entry of a log, as page and command line show it. Pure."""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from schemas.evidence import Entry, Kind, SplitEntry
from schemas.release import Phase, Release
from schemas.runner import JobKind, JobState, ReplicaState
from schemas.short import many, took

Body = dict[str, Any]


def _percent(bp: int) -> str:
    return f"{bp / 100:g} %"


def _split(body: Body) -> str:
    if not body["desired"]:
        return "nothing is served (503)"
    return " + ".join(f"{_percent(arm['weight_bp'])} {arm['told']}" for arm in body["desired"])


def told_bundle(digest: str, names: Mapping[str, str]) -> str:
    """Return a bundle as people read it: its name and enough of its digest to name it, or twelve digits alone."""
    return f"{names[digest]} ({digest[7:15]})" if digest in names else digest[7:19]


def told_split(split: Iterable[SplitEntry], names: Mapping[str, str]) -> str:
    """Return a split as people read it, by the names of its bundles; an empty text for none."""
    return " + ".join(f"{_percent(arm.weight_bp)} {told_bundle(arm.bundle, names)}" for arm in split)


def served_in(log: Iterable[Entry]) -> set[str]:
    """Return the digests of the bundles that the splits of a log name."""
    return {arm["bundle"] for entry in log if entry.kind in _SPLITS for arm in entry.body["desired"]}


def _files(body: Body) -> str:
    count, size = body["files"], body["size"]
    amount = f"{size} bytes" if size < 100_000 else f"{size / 1e6:,.1f} MB"
    return f"{many(count, 'file')}, {amount}"


def _booted(body: Body) -> str:
    engine, told = body["engine"], []
    if body.get("loading_ms") is not None:
        told.append(f"load {took(body['loading_ms'])}")
    if body.get("compile_ms") is not None:
        told.append(f"of that compiling {took(body['compile_ms'])}")
    if body.get("warming_ms") is not None:
        told.append(f"warm {took(body['warming_ms'])}")
    if body.get("page_cache_percent") is not None:
        told.append(f"{body['page_cache_percent']} % of the weights were in memory")
    codes = sorted({one["code"] for one in body.get("findings") or []})
    if codes:
        told.append(f"warns of {', '.join(codes)}")
    more = f": {', '.join(told)}" if told else ""
    return f"{engine['name']} {engine['version']} ready in {took(body['ready_ms'])} on {body['runner']}{more}"


def _project(body: Body) -> str:
    limits = [f"{name[4:].replace('_', ' ')} {body[name]}" for name in sorted(body) if name.startswith("max_")]
    found = ", as it was found" if body.get("was_found") else ""
    return f"{body['name']}{found}" + (f", with limits of its own: {', '.join(limits)}" if limits else "")


def _asked(body: Body) -> str:
    what = f"runs {', '.join(body['gates'])} on" if body["gates"] else "records what is answered by"
    told = f"{body['created_by']} asked: {what} {body['bundle'][7:19]}"
    told += f", for {body['target']}" if body.get("target") else ""
    return told + (f": {body['reason']}" if body.get("reason") else "")


def _reasons(body: Body) -> str:
    return "; ".join(body.get("reasons") or [])


STORIES: dict[Kind, tuple[str, Callable[[Body], str]]] = {
    Kind.CREATED: ("plain", lambda b: f"created for {b['target']}" + (f": {b['reason']}" if b.get("reason") else "")),
    Kind.STAGED: ("plain", lambda b: f"{_files(b)} staged in {took(b['duration_ms'])}"),
    Kind.ENGINE_BOOTED: ("plain", _booted),
    Kind.GATES_PASSED: ("good", lambda b: f"all gates passed: {', '.join(b['gates'])}"),
    Kind.REFUSED: ("bad", _reasons),
    Kind.APPROVAL_GRANTED: ("good", lambda b: b["reason"]),
    Kind.APPROVAL_WITHDRAWN: ("warn", lambda b: f"{b['approver']} approves no more: {b['reason']}"),
    Kind.APPROVAL_NOT_REQUIRED: ("plain", lambda b: b["reason"]),
    Kind.APPROVED: ("good", lambda b: f"{len(b['approvals'])} of {b['required']} approvals"),
    Kind.FINDING_ACCEPTED: ("warn", lambda b: f"{b['gate']}: {', '.join(b['codes'])}: {b['reason']}"),
    Kind.TRAFFIC_SHIFTED: (
        "plain",
        lambda b: (
            f"{_split(b)}, acknowledged in {b['applied_ms']:.1f} ms" + (f": {_reasons(b)}" if b.get("reasons") else "")
        ),
    ),
    Kind.STEP_PASSED: ("good", lambda b: f"step {b['step'] + 1}: {_reasons(b)}"),
    Kind.STOP_CONDITION_FIRED: ("bad", _reasons),
    Kind.TRAFFIC_RESTORED: ("bad", lambda b: f"{_split(b)} ({b.get('cause')}): {_reasons(b)}"),
    Kind.RESTORE_OBSERVED: (
        "good",
        lambda b: f"seen on {many(b['observed'], 'request')}, {b['seconds']:.2f} s after the breach",
    ),
    Kind.PROMOTED: ("good", lambda b: b["reason"]),
    Kind.REPLACED: ("plain", lambda b: f"by release {b['release']}"),
    Kind.REINSTATED: ("good", lambda b: f"after release {b['release']} was rolled back"),
    Kind.PAUSED: ("warn", lambda b: b["reason"]),
    Kind.RESUMED: ("plain", lambda b: b["reason"]),
    Kind.HELD: ("warn", _reasons),
    Kind.ATTEMPT_ERRORED: ("warn", lambda b: f"{b['problem']}: {b['detail']}"),
    Kind.RUN_ASKED: ("plain", _asked),
    Kind.RUN_CANCELLED: ("warn", lambda b: b["reason"]),
    Kind.RUN_ENDED: ("plain", lambda b: b["outcome"] + (f": {b['problem']}" if b.get("problem") else "")),
    Kind.PROMOTION_REQUESTED: ("plain", lambda b: b["reason"]),
    Kind.ROLLBACK_REQUESTED: ("warn", lambda b: b["reason"]),
    Kind.REPLICA_CHANGED: ("plain", lambda b: f"{b['replica']['state']} ({b['purpose']}): {b['replica']['cause']}"),
    **dict.fromkeys(
        (Kind.BUNDLE_REGISTERED, Kind.POLICY_REGISTERED, Kind.SUITE_REGISTERED),
        ("plain", lambda b: f"{b['name']} {b['digest'][:19]}"),
    ),
    Kind.BUNDLE_DELETED: ("warn", lambda b: f"{b['name']} {b['digest'][:19]}: {b['reason']}"),
    Kind.BUNDLE_QUARANTINED: (
        "bad",
        lambda b: f"{b['name']} {b['digest'][:19]} quarantined ({b['cause'].replace('_', ' ')}): {b['reason']}",
    ),
    Kind.QUARANTINE_LIFTED: ("warn", lambda b: f"{b['name']} {b['digest'][:19]} is trusted again: {b['reason']}"),
    Kind.ALIAS_SET: ("plain", lambda b: f"@{b['alias']} names {b['bundle'][7:19]}: {b['reason']}"),
    Kind.ALIAS_DELETED: ("warn", lambda b: f"@{b['alias']} names nothing any more: {b['reason']}"),
    Kind.ALIAS_PROTECTED: (
        "plain",
        lambda b: f"@{b['alias']} is moved by {'managers' if b['is_protected'] else 'whoever proposes'}: {b['reason']}",
    ),
    Kind.ALIAS_PATTERN_SET: ("plain", lambda b: f"@{b['pattern']} is for {b['movers']} or more: {b['reason']}"),
    Kind.ALIAS_PATTERN_REMOVED: ("warn", lambda b: f"@{b['pattern']} protects nothing any more: {b['reason']}"),
    Kind.RECORDS_ERASED: ("warn", lambda b: f"raw records {b['records'][:19]} erased: {b['reason']}"),
    Kind.TARGET_CREATED: ("plain", lambda b: f"{b['name']} on {b['runner_class']}, behind {b['gateway']}"),
    Kind.REFERENCE_SET: (
        "plain",
        lambda b: f"{b['target']} compares suite {b['suite'][7:19]} with what {b['bundle'][7:19]} answered",
    ),
    Kind.PROJECT_SET: ("plain", _project),
    Kind.TOKEN_FOUND: ("plain", lambda b: f"token {b['token']} is held to the secret that it had"),
    Kind.TOKEN_CREATED: (
        "plain",
        lambda b: f"for {b['name']}, as {b['role']}" + (f", on {', '.join(b['targets'])}" if b.get("targets") else ""),
    ),
    Kind.TOKEN_REVOKED: ("warn", lambda b: f"of {b['name']}: {b['reason']}"),
    Kind.KEY_ROTATED: ("warn", lambda b: f"key {b['key_id'][:12]} signs instead of {b['retired'][:12]}: {b['reason']}"),
    Kind.RUNNER_DRAINED: (
        "warn",
        lambda b: (
            f"{b['runner']} drains"
            + (f", and is emptied at {b['empty_at'][:19]}Z" if b.get("empty_at") else "")
            + f": {b['reason']}"
        ),
    ),
    Kind.RUNNER_UNDRAINED: (
        "plain",
        lambda b: f"{b['runner']} takes jobs again" + (f": {b['reason']}" if b.get("reason") else ""),
    ),
    Kind.EVIDENCE_REVOKED: ("warn", lambda b: f"{b['gate']} result {b['entry'][7:19]} no longer counts: {b['reason']}"),
}
"""Kind → tone, and what to say of its body."""

LABELS = {Kind.REFUSED: "rejected"}
"""Kind → the word for people where it is not the kind's own: a release is rejected, a request is refused."""

REPLACES = {Phase.PROMOTED: "replaces", Phase.SUPERSEDED: "replaced", Phase.REJECTED: None, Phase.ROLLED_BACK: None}


def replaces(release: Release) -> str | None:
    """Return what a release is to the one that was live before it, as a verb; None when it took nothing's place."""
    return None if release.predecessor is None else REPLACES.get(release.phase, "is to replace")


def job_state(kind: str, state: str) -> str:
    """Return where a job stands, in the word for people: a replica that was not wanted any more has ended."""
    return "ended" if kind == JobKind.SERVE and state == JobState.CANCELLED else state


def label(kind: Kind) -> str:
    """Return the word for a kind of entry that people read."""
    return LABELS.get(kind, str(kind))


_SPLITS = (Kind.TRAFFIC_SHIFTED, Kind.TRAFFIC_RESTORED)
TONES = {"passed": "good", "failed": "bad", "errored": "warn", "inconclusive": "warn", "aborted": "warn"}


def tell(entry: Entry, names: Mapping[str, str] = MappingProxyType({})) -> tuple[str, str]:
    """Return the tone (good, bad, warn, plain) and the sentence of an entry.

    Args:
        entry: of a log.
        names: digest → name of bundles; a bundle of a split that is not among them is told by its digest.
    """
    if entry.kind is Kind.GATE_RECORDED:
        return TONES[entry.body["verdict"]], f"{entry.body['gate']} {entry.body['verdict']}: {entry.body['summary']}"
    tone, story = STORIES[entry.kind]
    if entry.kind is Kind.REPLICA_CHANGED and entry.body["replica"]["state"] == ReplicaState.FAILED:
        tone = "bad"
    body = entry.body
    if entry.kind in _SPLITS:
        arms = [arm | {"told": told_bundle(arm["bundle"], names)} for arm in body["desired"]]
        body = body | {"desired": arms}
    return tone, story(body)
