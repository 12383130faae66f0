"""Turns the records of a rollback drill into a verdict. Pure: the same records, rule and suite give the same result.

What must hold for each cause, after it was triggered with the candidate in traffic:

- the router acknowledged that traffic goes back, and what it goes back to answered under that very split in time;
- asked a second time, it changed nothing;
- asked quietly, the accepted bundle answered each prompt as it had by itself before the drill;
- no request was lost but those that the rule allows, and no stream ended as if it were whole when it was not.

A request is lost when it got no whole answer. Two kinds are counted apart: those that were open on the candidate when
its engine was killed, which no router can save; and, on a target that has accepted nothing, those that were told 503
because nothing serves, which is what going back means there.

What failed by being slow alone, in exercises during which other processes kept the machine busy, is errored instead:
answers that timed out, a recovery that came too late, a boot or an acknowledgement that was waited for in vain.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from gates import crowding, stats
from gates.answers import Outcome
from gates.crowding import Machine
from gates.errors import InstrumentError
from gates.gate import Judged, JudgeInput, Records, errored, finding
from gates.rollback_traffic import COLUMNS
from schemas.policy import RollbackRule
from schemas.result import Finding, Measurement, Severity, Verdict
from schemas.suite import LoadSuite

MANUAL: Final = "manual"
GATE_FAILED: Final = "gate_failed"
SLO_BREACH: Final = "slo_breach"
DURING_SHIFT: Final = "during_shift"
COLD_START: Final = "cold_start"
CRASH: Final = "crash"
CAUSES: Final = (MANUAL, GATE_FAILED, SLO_BREACH, DURING_SHIFT, COLD_START, CRASH)
"""In the order in which they are drilled: the last one ends the candidate's engine."""

COLD_SECONDS: Final = 600.0
"""Longest time from a trigger to the first answer where the engine has to boot first, unless the rule says it."""
PROBES: Final = 4
"""Prompts of the suite, from its first, that are asked quietly before and after."""
DRILL_REQUESTS: Final = (20, 2_000)
"""Fewest and most requests of the plan, which is sent once for each cause."""
LEAST_PLAN_US: Final = 1_000_000
"""A router writes down what ended a moment late; a shorter plan would be over before the candidate is seen."""
STALE_US: Final = 1_000_000
"""An acknowledged router whose threads still take the old split after so long has not gone back."""
IDLE_ROUTE: Final = "idle"
ENDED: Final = (
    "engine ended by itself or was replaced during the drill; look at its log and at the memory of the runner, which"
    " holds two engines then, and run the gate again."
)


def causes(*, has_accepted: bool) -> tuple[str, ...]:
    """Return what is drilled, in its order. Where nothing is accepted yet, there is no engine to boot."""
    return tuple(cause for cause in CAUSES if has_accepted or cause != COLD_START)


def recovery_seconds(cause: str, rule: RollbackRule) -> float:
    """Return the longest time from a trigger to the first answer of what traffic goes back to."""
    if cause != COLD_START:
        return float(rule.recovery_seconds)
    return COLD_SECONDS if rule.cold_recovery_seconds is None else float(rule.cold_recovery_seconds)


@dataclass(frozen=True, slots=True)
class Back:
    """What traffic goes back to: an engine's address, or None for no traffic at all."""

    address: str | None

    def has(self, served: str | None, route: str | None, code: int | None, *, is_whole: bool) -> bool:
        """Tell whether an answer is that of what traffic goes back to."""
        if self.address is None:
            return route == IDLE_ROUTE and code == 503
        return is_whole and served == self.address


@dataclass(frozen=True, slots=True)
class Request:
    """One request as the records have it; see `gates.rollback_traffic.Sent`."""

    prompt: str
    at_us: int
    sent_us: int
    done_us: int
    outcome: str
    is_silent: bool
    output: str | None
    served: str | None
    route: str | None
    revision: int | None
    code: int | None

    @property
    def is_whole(self) -> bool:
        """Whether a whole answer came."""
        return self.outcome == "ok"


@dataclass(frozen=True, slots=True)
class Exercise:
    """One cause, drilled. Instants in µs on the drill's clock.

    `restored_us` is the router's acknowledgement, None with a `problem`. `gone_us`: when a killed engine was gone.
    `ready_us`: when the engine that had to boot first was ready, None where it did not boot or there was none to boot.
    `is_late`: the problem is that it was waited for in vain. `machine`: what the processors did, where that was seen.
    `again` is the revision in force after the second rollback, None with an `again_problem`.
    """

    cause: str
    back: Back
    trigger_us: int
    is_late: bool
    machine: Machine | None
    gone_us: int | None
    ready_us: int | None
    restored_us: int | None
    revision: int | None
    problem: str | None
    again: int | None
    again_problem: str | None
    candidate_pids: tuple[int | None, ...]
    accepted_pids: tuple[int | None, ...]
    requests: tuple[Request, ...]
    probes: tuple[Request, ...]

    @property
    def recovered_us(self) -> int | None:
        """When the first answer came, to a request after the trigger, of what traffic goes back to."""
        back = self.back
        found = [
            each.done_us
            for each in (*self.requests, *self.probes)
            if each.sent_us >= self.trigger_us
            and back.has(each.served, each.route, each.code, is_whole=each.is_whole)
            and each.revision is not None
            and (self.revision is None or each.revision >= self.revision)
        ]
        return min(found, default=None)

    def is_spared(self, request: Request, candidate: str) -> bool:
        """Tell whether a request without a whole answer is counted apart; see the module."""
        back = self.back
        if back.address is None and back.has(request.served, request.route, request.code, is_whole=False):
            return True
        if self.gone_us is None:
            return False
        if back.address is None and request.sent_us <= (self.restored_us or self.gone_us):
            return request.done_us >= self.trigger_us and not request.is_silent
        is_theirs = request.served in {candidate, None}
        return is_theirs and request.sent_us <= self.gone_us and request.done_us >= self.trigger_us

    def open_at_trigger(self, candidate: str) -> int:
        """Return how many requests were open on the candidate when the cause came."""
        return sum(
            each.sent_us <= self.trigger_us <= each.done_us and each.served == candidate for each in self.requests
        )


@dataclass(frozen=True, slots=True)
class Drill:
    """All of a drill."""

    candidate: str
    back: Back
    accepted: str | None
    answers: dict[str, str]
    exercises: tuple[Exercise, ...]


def no_way_back(reason: str, detail: str, *, bundle: str, log_tail: Sequence[str] = ()) -> Records:
    """Return the records of a drill that ended before it began: the accepted bundle cannot be served here any more.

    Args:
        reason: `boot` (it does not boot), `bytes` (its files are not what it names) or `blobs` (they are gone).
        detail: one sentence.
        bundle: digest of the accepted bundle.
        log_tail: the engine's last lines.
    """
    return {"no_way_back": {"reason": reason, "detail": detail, "bundle": bundle, "log_tail": list(log_tail)}}


def judge(given: JudgeInput) -> Judged:
    """Judge a drill from its records, see the module. Errored when they are missing, torn or not to be believed."""
    rule, suite = given.rule, given.suite
    if not isinstance(rule, RollbackRule) or not isinstance(suite, LoadSuite):
        return errored("A rollback rule and a load suite are needed to judge a drill.")
    if "no_way_back" in given.records:
        return _no_way_back(given.records["no_way_back"])
    try:
        drill = _read(given.records, suite)
        _require_one_and_the_same(drill)
        _require_traffic(drill)
    except InstrumentError as error:
        return errored(str(error))
    faults = [(each, one) for each in drill.exercises for one in _faults(each, drill, rule)]
    found = [one for _, one in faults]
    lost = [
        (each, request)
        for each in drill.exercises
        for request in each.requests
        if not request.is_whole and not each.is_spared(request, drill.candidate)
    ]
    if len(lost) > rule.lost_max:
        found.append(_lost(lost, drill, rule))
        faults += [(each, found[-1]) for each, _ in lost]
    measured = _measurements(drill, rule, len(lost))
    if found and (excuse := _excuse(faults, lost)) is not None:
        told = [finding(each.code, each.message, severity=Severity.INFO, found=each.found) for each in found]
        first = finding(crowding.CODE, excuse, advice=crowding.ADVICE)
        return errored(f"{excuse} ({'; '.join(each.message for each in found)})", [first, *told], measured)
    if found:
        return Judged(Verdict.FAILED, "; ".join(one.message for one in found), measured, found, drill.accepted)
    if tuple(each.cause for each in drill.exercises) != causes(has_accepted=drill.accepted is not None):
        return errored("Not every cause was drilled; run the gate again.", measurements=measured)
    return Judged(Verdict.PASSED, _passed(drill, len(lost)), measured, _remarks(drill), drill.accepted)


def _excuse(faults: Sequence[tuple[Exercise, Finding]], lost: Sequence[tuple[Exercise, Request]]) -> str | None:
    """Return why nobody is to blame: each fault is slowness on a machine that others kept busy meanwhile. Else None."""
    slow = {
        "requests-lost": all(request.outcome == Outcome.TIMEOUT for _, request in lost),
        "not-recovered": True,
        "back-on-candidate": True,
    }
    reason = None
    for each, fault in faults:
        reason = crowding.crowded(each.machine)
        is_slow = slow.get(fault.code, False)
        if fault.code in {"router-did-not-go-back", "accepted-not-booted"}:
            is_slow = each.is_late
        if fault.code == "not-answered-after":
            is_slow = fault.found == Outcome.TIMEOUT
        if reason is None or not is_slow:
            return None
    return reason


def _no_way_back(told: dict[str, Any]) -> Judged:
    what = {
        "boot": "does not boot",
        "bytes": "has other bytes than it names",
        "blobs": "is not kept any more",
    }[told["reason"]]
    message = f"There is no way back: the accepted bundle {told['bundle'][:19]} {what}: {told['detail']}"
    advice = "Mend what is accepted first: a release without a way back ends in no traffic."
    tail = "\n".join(told["log_tail"]) or None
    return Judged(Verdict.FAILED, message, (), [finding("no-way-back", message, found=tail, advice=advice)])


# ------------------------------------------------------------------------------------------------ reading


def _read(records: Records, suite: LoadSuite) -> Drill:
    if tuple(records["columns"]) != COLUMNS or not records["exercises"]:
        raise InstrumentError("The records are no drill of this version; run the gate again.")
    accepted = records["accepted"]
    back = Back(None if accepted is None else str(accepted["address"]))
    prompts = [prompt.id for prompt in suite.prompts[:PROBES]]
    answers: dict[str, str] = {}
    for prompt, digests in records["answers"].items():
        if len(set(digests)) != 1 or not isinstance(digests[0], str):
            raise InstrumentError(
                f"The accepted bundle answered {prompt} differently from itself before anything moved, so its answers"
                " cannot tell who it is; choose prompts that it answers alike."
            )
        answers[prompt] = digests[0]
    if sorted(answers) != sorted(prompts if back.address is not None else []):
        raise InstrumentError("The accepted bundle's own answers are not all on record; run the gate again.")
    exercises = tuple(_exercise(each, suite) for each in records["exercises"])
    if tuple(each.cause for each in exercises) != causes(has_accepted=accepted is not None)[: len(exercises)]:
        raise InstrumentError("The causes on record are not those of this version; run the gate again.")
    bundle = None if accepted is None else str(accepted["bundle"])
    return Drill(str(records["candidate"]["address"]), back, bundle, answers, exercises)


def _exercise(told: dict[str, Any], suite: LoadSuite) -> Exercise:
    requests, cause = tuple(_request(row) for row in told["requests"]), str(told["cause"])
    _require_plan(requests, cause, suite)
    restored, again = told["restored"], told["again"]
    return Exercise(
        cause=cause,
        back=Back(_text(told["back"])),
        trigger_us=_count(told["trigger_us"]),
        is_late=restored["is_late"] is True,
        machine=crowding.read_machine(told["machine"]),
        gone_us=None if told["gone_us"] is None else _count(told["gone_us"]),
        ready_us=None if told["ready_us"] is None else _count(told["ready_us"]),
        restored_us=None if restored["problem"] else _count(restored["at_us"]),
        revision=None if restored["problem"] else _count(restored["revision"]),
        problem=restored["problem"],
        again=None if again["problem"] else _count(again["revision"]),
        again_problem=again["problem"],
        candidate_pids=_pids(told["pids"]["candidate"]),
        accepted_pids=_pids(told["pids"]["accepted"]),
        requests=requests,
        probes=tuple(_request(row) for row in told["probes"]),
    )


def _require_plan(requests: Sequence[Request], cause: str, suite: LoadSuite) -> None:
    """Refuse requests that are not the plan; where an engine had to boot it may have been sent twice."""
    n = len(suite.plan)
    planned = [(arrival.prompt, arrival.at_us - suite.plan[0].at_us) for arrival in suite.plan]
    rounds = [requests[at : at + n] for at in range(0, len(requests), n)]
    sent = [[(each.prompt, each.at_us - one[0].at_us) for each in one] for one in rounds]
    if sent not in ([planned], [planned, planned]) or (len(sent) > 1 and cause != COLD_START):
        raise InstrumentError(f"The requests on record for {cause} are not the plan; run the gate again.")


def _request(row: Sequence[Any]) -> Request:
    told = dict(zip(COLUMNS, row, strict=True))
    if not isinstance(told["outcome"], str) or not isinstance(told["is_silent"], bool):
        raise InstrumentError(f"Request {told['id']} has no end on record; run the gate again.")
    sent_us, done_us = _count(told["sent_us"]), _count(told["done_us"])
    if sent_us > done_us:
        raise InstrumentError(f"Request {told['id']} ended before it was sent; run the gate again.")
    return Request(
        prompt=str(told["prompt"]),
        at_us=_count(told["at_us"]),
        sent_us=sent_us,
        done_us=done_us,
        outcome=told["outcome"],
        is_silent=told["is_silent"],
        output=_text(told["output"]),
        served=_text(told["served"]),
        route=_text(told["route"]),
        revision=None if told["revision"] is None else _count(told["revision"]),
        code=None if told["code"] is None else _count(told["code"]),
    )


def _text(value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{value!r} is no text")
    return value


def _pids(told: Sequence[Any]) -> tuple[int | None, ...]:
    return tuple(None if pid is None else _count(pid) for pid in told)


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no count or instant")
    return value


def _require_one_and_the_same(drill: Drill) -> None:
    """Refuse a drill in which an engine ended or was another one before the drill itself ended it."""
    lives = [("candidate", [pid for each in drill.exercises for pid in each.candidate_pids])]
    if drill.back.address is not None:
        lives += [("accepted", pids) for pids in _accepted_lives(drill)]
    for name, pids in lives:
        if not pids or None in pids or len(set(pids)) != 1:
            raise InstrumentError(f"The {name} bundle's {ENDED}")
    address = drill.back.address
    for each in drill.exercises:
        is_booted = each.ready_us is not None
        if each.cause == COLD_START and is_booted and each.back.address is not None:
            address = each.back.address
        if each.back.address != address or (is_booted and each.cause != COLD_START):
            raise InstrumentError("The records do not say alike what traffic goes back to; run the gate again.")


def _accepted_lives(drill: Drill) -> list[list[int | None]]:
    """Return the processes of the accepted bundle, with those of before a cold start apart from those of after it."""
    lives: list[list[int | None]] = [[]]
    for each in drill.exercises:
        pids = each.accepted_pids
        if each.cause == COLD_START:
            lives[-1] += pids[:1]
            if each.ready_us is not None:
                lives.append([])
            pids = pids[1:] or (None,) if each.ready_us is not None else ()
        lives[-1] += pids
    if len(lives) > 1 and set(lives[0]) & set(lives[1]):
        raise InstrumentError("The accepted bundle's engine was to boot anew, and did not end; run the gate again.")
    return lives


def _require_traffic(drill: Drill) -> None:
    """Refuse a drill with a cause that came when the traffic was over: nothing was at risk."""
    for each in drill.exercises:
        if all(request.done_us < each.trigger_us for request in each.requests):
            raise InstrumentError(
                f"The plan was over when the cause {each.cause} came, so nothing was at risk; take a longer plan, or"
                " run the gate again on a machine with a free core."
            )


# ------------------------------------------------------------------------------------------------ faults


def _faults(each: Exercise, drill: Drill, rule: RollbackRule) -> list[Finding]:
    silent = [request for request in (*each.requests, *each.probes) if request.is_silent]
    found = []
    if silent:
        message = f"{each.cause}: {len(silent)} streams ended as if they were whole, and were not"
        found.append(finding("stream-cut-silently", message, expected=0, found=len(silent)))
    if each.problem is not None and each.cause == COLD_START and each.ready_us is None:
        message = f"{each.cause}: the accepted bundle did not boot again: {each.problem}"
        found.append(finding("accepted-not-booted", message))
    elif each.problem is not None:
        message = f"{each.cause}: the router did not go back: {each.problem}"
        found.append(finding("router-did-not-go-back", message))
    recovered = each.recovered_us
    limit = recovery_seconds(each.cause, rule)
    limit_ms = round(limit * 1000)
    took_ms = None if recovered is None else (recovered - each.trigger_us) / 1000
    if took_ms is None or took_ms > limit_ms:
        when = "none came" if took_ms is None else f"the first came after {took_ms:.0f} ms"
        message = f"{each.cause}: no answer of {_name(drill)} within {limit:g} s of the trigger: {when}"
        found.append(finding("not-recovered", message, expected=f"{limit_ms} ms", found=took_ms))
    if each.problem is None:
        found += _second(each)
    if took_ms is not None:
        found += _stale(each, drill) + _answers(each, drill)
    return found


def _name(drill: Drill) -> str:
    return "no traffic (503)" if drill.accepted is None else f"the accepted bundle {drill.accepted[:19]}"


def _second(each: Exercise) -> list[Finding]:
    if each.again == each.revision:
        return []
    what = each.again_problem or f"revision {each.again} is in force, after {each.revision}"
    message = f"{each.cause}: a second rollback was not without effect: {what}"
    return [finding("second-rollback-changed", message, expected=each.revision, found=each.again)]


def _stale(each: Exercise, drill: Drill) -> list[Finding]:
    if each.restored_us is None:
        return []
    late = [
        request
        for request in (*each.requests, *each.probes)
        if request.sent_us > each.restored_us + STALE_US and request.served == drill.candidate
    ]
    if not late:
        return []
    message = f"{each.cause}: {len(late)} requests reached the candidate though the router had acknowledged to go back"
    return [finding("back-on-candidate", message, expected=0, found=len(late))]


def _answers(each: Exercise, drill: Drill) -> list[Finding]:
    """Hold the last quiet question of each prompt against the accepted bundle's own answer."""
    last = {request.prompt: request for request in each.probes}
    found = []
    for prompt, expected in drill.answers.items():
        seen = last.get(prompt)
        if seen is None or not each.back.has(seen.served, seen.route, seen.code, is_whole=seen.is_whole):
            message = f"{each.cause}: the accepted bundle did not answer {prompt} after traffic had gone back"
            found.append(finding("not-answered-after", message, pointer=prompt, found=seen and seen.outcome))
        elif seen.output != expected:
            message = f"{each.cause}: {prompt} is answered otherwise than by the accepted bundle before the drill"
            found.append(finding("answers-differ", message, pointer=prompt, expected=expected, found=seen.output))
    return found


def _lost(lost: Sequence[tuple[Exercise, Request]], drill: Drill, rule: RollbackRule) -> Finding:
    on_candidate = sum(request.served == drill.candidate for _, request in lost)
    causes = ", ".join(dict.fromkeys(each.cause for each, _ in lost))
    kinds = ", ".join(sorted({request.outcome for _, request in lost}))
    message = (
        f"{len(lost)} requests got no whole answer ({kinds}; {on_candidate} of them on the candidate; {causes});"
        f" {rule.lost_max} are allowed"
    )
    return finding("requests-lost", message, expected=rule.lost_max, found=len(lost))


# ------------------------------------------------------------------------------------------ what is told


def _passed(drill: Drill, lost: int) -> str:
    times = {each.cause: (at - each.trigger_us) / 1000 for each in drill.exercises if (at := each.recovered_us)}
    n = sum(len(each.requests) for each in drill.exercises)
    cold = times.pop(COLD_START, None)
    count = len(drill.exercises)
    took = f"after each of {count} causes, at most {max(times.values()):.0f} ms after it"
    took += "" if cold is None else f" and {cold:.0f} ms where its engine had to boot first"
    took += f"; {lost} of {n} requests were lost"
    if drill.accepted is None:
        return f"The target has accepted no bundle yet, so going back means no traffic: it was told 503 {took}."
    return f"Traffic went back to the accepted bundle {drill.accepted[:19]} {took}."


def _remarks(drill: Drill) -> list[Finding]:
    if any(each.open_at_trigger(drill.candidate) for each in drill.exercises if each.cause != CRASH):
        return []
    message = "No stream was open on the candidate at a trigger, so none was seen to end whole after it."
    advice = "Take a suite whose answers last longer than the gaps between its requests."
    return [finding("no-stream-open", message, severity=Severity.INFO, advice=advice)]


def _measurements(drill: Drill, rule: RollbackRule, lost: int) -> list[Measurement]:
    n = sum(len(each.requests) for each in drill.exercises)
    found = []
    for each in drill.exercises:
        recovered = each.recovered_us
        took = None if recovered is None else (recovered - each.trigger_us) / 1000
        limit = recovery_seconds(each.cause, rule) * 1000
        found.append(_measured(f"recovery_{each.cause}", "ms", took, n=1, limit=limit))
        acknowledged = None if each.restored_us is None else (each.restored_us - each.trigger_us) / 1000
        found.append(_measured(f"acknowledged_{each.cause}", "ms", acknowledged, n=1))
        if each.cause == COLD_START:
            booted = None if each.ready_us is None else (each.ready_us - each.trigger_us) / 1000
            found.append(_measured("boot_cold_start", "ms", booted, n=1))
    spared = [
        request
        for each in drill.exercises
        for request in each.requests
        if not request.is_whole and each.is_spared(request, drill.candidate)
    ]
    shares = [each.machine.foreign_ratio for each in drill.exercises if each.machine is not None]
    idle = sum(request.route == IDLE_ROUTE for request in spared)
    silent = sum(request.is_silent for each in drill.exercises for request in (*each.requests, *each.probes))
    opened = sum(each.open_at_trigger(drill.candidate) for each in drill.exercises)
    return [
        *found,
        Measurement(
            name="lost_requests",
            unit="count",
            statistic="value",
            value=float(lost),
            n=n,
            k=lost,
            limit=float(rule.lost_max),
        ),
        Measurement(
            name="lost_ratio", unit="ratio", statistic="upper_bound_95", value=stats.upper_bound(lost, n), n=n, k=lost
        ),
        _measured("cut_by_crash", "count", float(len(spared) - idle), n=n),
        _measured("told_no_traffic", "count", float(idle), n=n),
        _measured("silent_cuts", "count", float(silent), n=n, limit=0.0),
        _measured("open_at_trigger", "count", float(opened), n=n),
        Measurement(
            name="foreign_cpu",
            unit="ratio",
            statistic="max",
            value=max(shares, default=None),
            n=len(shares),
            limit=crowding.MAX_FOREIGN_RATIO,
        ),
    ]


def _measured(name: str, unit: str, value: float | None, *, n: int, limit: float | None = None) -> Measurement:
    return Measurement(name=name, unit=unit, statistic="value", value=value, n=n, limit=limit)
