"""The rollback drill: traffic is taken back from the candidate, for every cause, before anybody's traffic is on it.

The candidate and what the target has accepted stand behind one private router (`gates.stage`). For each cause the
suite's plan is sent through it while all traffic is moved to the candidate; then the cause comes, traffic is taken
back as a release would take it back, twice, and quiet questions tell who answers. Nothing here is acted:

- `manual`: the way back is put in force.
- `gate_failed`: a failed verdict is folded as a release folds it, and the decision takes traffic back.
- `slo_breach`: a stop condition that the candidate cannot keep (1 ms to the first token) is judged from the
  router's log as a canary's is, until it fires.
- `during_shift`: traffic is taken back while a further shift to the candidate is under way.
- `cold_start`: the accepted bundle's engine is ended before, as it is once a soak is over. Going back begins with its
  boot, from bytes that are hashed anew, and the candidate serves until it is ready.
- `crash`: the candidate's engine is killed under traffic. It is the last, since the engine is gone then.

On a target that has accepted nothing, going back means no traffic: every request is told 503, and there is nothing to
boot.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Final

from gates import policy
from gates.canary import StepOutcome, judge_stop
from gates.endpoint import Endpoint
from gates.errors import InstrumentError
from gates.gate import Gate, GateContext, Records
from gates.machine import Processors, together
from gates.rollback_judgement import (
    COLD_START,
    CRASH,
    DURING_SHIFT,
    ENDED,
    GATE_FAILED,
    PROBES,
    SLO_BREACH,
    Back,
    causes,
    judge,
    recovery_seconds,
)
from gates.rollback_traffic import COLUMNS, Clock, Sent, Traffic, ask
from gates.router import WHOLE_BP, Split
from gates.stage import NotTakenBack, Overtaken, Stage
from gates.tally import LogRecord, Tally
from schemas.bundle import COMPONENTS
from schemas.policy import RollbackRule, TtftCondition
from schemas.result import Verdict
from schemas.suite import LoadSuite

LOOK_SECONDS: Final = 0.02
LOG_SECONDS: Final = 10.0
"""Longest wait for the router to write down a request that has ended."""
OPEN_SECONDS: Final = 0.25
"""How long a trigger waits for an open stream."""
AGAIN_SECONDS: Final = 0.2
BREACHED: Final = TtftCondition(metric="ttft", percentile=Decimal("0.9"), max_ms=1)
PART_BP: Final = 5_000


def measure(context: GateContext) -> Records:
    """Drill every cause, until one has failed.

    Raises:
        InstrumentError: no rule, suite or stage was given, the stage broke, or the candidate got no traffic.
    """
    rule, suite, stage = context.rule, context.suite, context.stage
    if not isinstance(rule, RollbackRule) or not isinstance(suite, LoadSuite):
        raise InstrumentError("The rollback gate needs a rollback rule and a load suite.")
    if stage is None:
        raise InstrumentError("The rollback gate needs two engines behind a router of its own.")
    return _Drill(context, rule, suite, stage).run()


class _Drill:
    def __init__(self, context: GateContext, rule: RollbackRule, suite: LoadSuite, stage: Stage) -> None:
        self.context, self.rule, self.suite, self.stage = context, rule, suite, stage
        self.clock = Clock()
        self.back = Back(None if stage.accepted is None else stage.accepted.address)
        self.prompts = suite.prompts[:PROBES]
        self.lines: dict[str, LogRecord] = {}
        self.parts: list[dict[str, int | None]] = []
        """What the machine did in the present exercise, between the moments at which engines came or went."""
        self.looked: Processors = self._look()

    def run(self) -> Records:
        answers, accepted = self._own_answers(), self.stage.accepted
        exercises = []
        told = {
            "candidate": {"bundle": self.stage.candidate.bundle, "address": self.stage.candidate.address},
            "accepted": None if accepted is None else {"bundle": accepted.bundle, "address": accepted.address},
        }
        chosen = causes(has_accepted=accepted is not None)
        for number, cause in enumerate(chosen, start=1):
            self.context.progress(f"rollback {number} of {len(chosen)}: {cause}")
            exercises.append(self._cold_start() if cause == COLD_START else self._exercise(cause))
            self.stage.check()
            if not self._is_back(exercises[-1], answers) or self._is_cut(exercises[-1]):
                break  # it has failed, and what came after might begin from a state that nobody knows
        return {"columns": list(COLUMNS), **told, "answers": answers, "exercises": exercises}

    def _own_answers(self) -> dict[str, list[str | None]]:
        """Have the accepted bundle answer twice by itself, past the router."""
        side = self.stage.accepted
        if side is None:
            return {}
        answers: dict[str, list[str | None]] = {prompt.id: [] for prompt in self.prompts}
        for number in range(2):
            for sent in self._ask(side.endpoint, f"own-{number}-"):
                if sent.outcome != "ok":
                    raise InstrumentError(
                        f"The accepted bundle did not answer {sent.prompt} by itself: {sent.detail}; run it again."
                    )
                answers[sent.prompt].append(sent.output)
        return answers

    def _ask(self, endpoint: Endpoint, prefix: str) -> list[Sent]:
        return ask(endpoint, self.prompts, prefix, self.clock, seconds=float(self.suite.request_seconds))

    def _public(self) -> Endpoint:
        """Return the router's address, under the name that callers of what is accepted use."""
        known = (self.stage.accepted or self.stage.candidate).endpoint
        return Endpoint(self.stage.public_url, known.model, known.dialect)

    # ------------------------------------------------------------------------------------------ one cause

    def _exercise(self, cause: str) -> dict[str, Any]:
        self.stage.settle()
        share = PART_BP if cause == DURING_SHIFT and self.stage.accepted is not None else WHOLE_BP
        is_moved = cause != DURING_SHIFT or self.stage.accepted is not None
        began_at = datetime.now(UTC)
        split = self.stage.shift(share, self.stage.next_revision()) if is_moved else None
        pids = self._pids()
        self._watch()
        with self._traffic(f"{cause}-") as traffic:
            if cause != SLO_BREACH:  # that one has its own time: the sooner it is seen, the better
                self._await_half(traffic)
            if split is not None:
                self._await(traffic, lambda: self._is_seen(cause), "no request reached the candidate")
            pids["candidate"].append(self.stage.candidate.process_id())
            told = self._trigger(cause, split, began_at, traffic)
            requests = traffic.finish()
        return self._told(cause, told | {"ready_us": None, "pids": pids}, requests)

    def _cold_start(self) -> dict[str, Any]:
        """Take traffic back to an engine that has to boot first.

        The plan is sent from before the trigger on. Where it is over when the engine is ready, it is sent once more, so
        that there is traffic to take back; in between nobody asks, and so nobody is lost.
        """
        self.stage.settle()
        pids = self._pids()
        self.stage.cool()
        self._watch()
        with contextlib.ExitStack() as stack:
            rounds = [stack.enter_context(self._traffic(f"{COLD_START}-0-"))]
            self._await_half(rounds[0])
            self._await(rounds[0], lambda: self._is_seen(COLD_START), "no request reached the candidate")
            self._await_open(rounds[0])
            trigger_us, ready_us = self.clock.now(), None
            failed = self._warm()
            if failed is None:
                ready_us = self.clock.now()
                if rounds[0].is_over:
                    rounds.append(stack.enter_context(self._traffic(f"{COLD_START}-1-")))
                    self._await(rounds[1], lambda: rounds[1].sent > 0, "none of it was sent")
            pids["candidate"].append(self.stage.candidate.process_id())
            restored = failed or self._restore()
            again = self._restore() if restored["problem"] is None else restored
            requests = [each for one in rounds for each in one.finish()]
        told = {"trigger_us": trigger_us, "gone_us": None, "restored": restored, "again": again}
        return self._told(COLD_START, told | {"ready_us": ready_us, "pids": pids}, requests)

    def _warm(self) -> dict[str, Any] | None:
        """Boot the accepted bundle anew; return what is told where it did not boot, or None."""
        try:
            self.stage.warm()
        except NotTakenBack as problem:
            return _not_taken_back(problem)
        if self.stage.accepted is not None:
            self.back = Back(self.stage.accepted.address)
        return None

    def _told(self, cause: str, told: dict[str, Any], requests: list[Sent]) -> dict[str, Any]:
        """Return an exercise's records, once it is seen who answers after it. Without an engine nobody is asked."""
        is_booted = cause != COLD_START or told["ready_us"] is not None
        probes = self._recover(cause, told["trigger_us"]) if is_booted else []
        told["pids"]["accepted"].append(self._accepted_pid())
        self.parts.append(self._look().since(self.looked))
        machine = together(self.parts)
        self._attribute(requests)
        rows = {"requests": [each.row() for each in requests], "probes": [each.row() for each in probes]}
        return {"cause": cause, "back": self.back.address, "machine": machine, **told, **rows}

    # ---------------------------------------------------------------------------------------- the machine

    def _look(self) -> Processors:
        """Read the processors' clocks: of both engines, and of those who measure, the router among them."""
        engines = [pid for pid in (self.stage.candidate.process_id(), self._accepted_pid()) if pid is not None]
        return Processors.look(engines=engines, own=(os.getpid(), *self.stage.process_ids()))

    def _watch(self) -> None:
        """Begin an exercise: what the processors do from here on is its own."""
        self.parts, self.looked = [], self._look()

    def _traffic(self, prefix: str) -> Traffic:
        return Traffic(self._public(), self.suite, prefix, self.clock)

    def _pids(self) -> dict[str, list[int | None]]:
        return {"candidate": [self.stage.candidate.process_id()], "accepted": [self._accepted_pid()]}

    def _accepted_pid(self) -> int | None:
        return None if self.stage.accepted is None else self.stage.accepted.process_id()

    def _trigger(self, cause: str, split: Split | None, began_at: datetime, traffic: Traffic) -> dict[str, Any]:
        gone_us: int | None = None
        if cause == CRASH:
            self.parts.append(self._look().since(self.looked))
        if cause == SLO_BREACH and split is not None:
            trigger_us = self._await_breach(split, began_at, traffic)
        else:
            self._await_open(traffic)
            trigger_us = self.clock.now()
        if cause == CRASH:
            self.stage.kill_candidate()
            gone_us = self.clock.now()
            self.looked = self._look()  # the time of the one that is gone is in the part before
            if self.stage.candidate.process_id() is not None:
                raise InstrumentError("The candidate's engine runs on though it was killed; look at the runner.")
        if cause == GATE_FAILED:
            decision = policy.decide(["rollback"], {"rollback": Verdict.FAILED})
            if decision.outcome is not policy.Outcome.FAILED:
                raise InstrumentError("A failed verdict was not folded into a failure.")
        restored = self._restore_during_shift() if cause == DURING_SHIFT else self._restore()
        again = self._restore() if restored["problem"] is None else restored
        return {"trigger_us": trigger_us, "gone_us": gone_us, "restored": restored, "again": again}

    def _restore(self) -> dict[str, Any]:
        try:
            revision = self.stage.restore()
        except NotTakenBack as problem:
            self.stage.check()
            return _not_taken_back(problem)
        return {"revision": revision, "at_us": self.clock.now(), "problem": None, "is_late": False}

    def _restore_during_shift(self) -> dict[str, Any]:
        """Take traffic back while another thread gives all of it to the candidate; whoever comes second must lose."""
        revision = self.stage.next_revision()
        begun = threading.Event()
        faults: list[InstrumentError] = []

        def shift() -> None:
            begun.set()
            try:
                self.stage.shift(WHOLE_BP, revision)
            except Overtaken:
                pass  # traffic was taken back first
            except InstrumentError as error:
                faults.append(error)

        thread = threading.Thread(target=shift, name="drill-shift", daemon=True)
        thread.start()
        begun.wait()
        try:
            return self._restore()
        finally:
            thread.join()
            if faults:
                raise faults[0]

    # -------------------------------------------------------------------------------------------- waiting

    def _await_half(self, traffic: Traffic) -> None:
        self._await(traffic, lambda: traffic.sent * 2 >= len(self.suite.plan), "half of it was not sent")

    def _await(self, traffic: Traffic, condition: Callable[[], bool], otherwise: str) -> None:
        """Wait until something is true; traffic that has ended long ago will not make it so."""
        ended: float | None = None
        while not condition():
            self._read()
            if self.stage.candidate.process_id() is None:
                raise InstrumentError(f"The candidate's {ENDED}")
            if traffic.is_over:
                ended = ended or time.monotonic()
                if time.monotonic() - ended > LOG_SECONDS:
                    self.stage.check()
                    raise InstrumentError(f"The drill's traffic has ended, and {otherwise}; run the gate again.")
            time.sleep(LOOK_SECONDS)

    def _await_open(self, traffic: Traffic) -> None:
        ends = time.monotonic() + OPEN_SECONDS
        while traffic.in_flight == 0 and not traffic.is_over and time.monotonic() < ends:
            time.sleep(0.001)

    def _await_breach(self, split: Split, began_at: datetime, traffic: Traffic) -> int:
        """Wait until the stop condition fires, and return when the request that decided it ended."""
        tally, seen, decided = Tally(split, began_at), 0, datetime.now(UTC)

        def is_breached() -> bool:
            nonlocal seen, decided
            for record in list(self.lines.values())[seen:]:
                seen += 1
                tally.add([record])
                if judge_stop(tally, conditions=[BREACHED], now=datetime.now(UTC)).outcome is StepOutcome.FAILED:
                    decided = record.ended_at
                    return True
            return False

        self._await(traffic, is_breached, f"its answers kept to {BREACHED.max_ms} ms, so no stop condition fired")
        return max(0, self.clock.of_wall(decided))

    def _is_seen(self, cause: str) -> bool:
        address = self.stage.candidate.address
        return any(name.startswith(f"{cause}-") and each.served == address for name, each in self.lines.items())

    def _read(self) -> None:
        for record in self.stage.log():
            if record.request_id is not None:
                self.lines[record.request_id] = record

    # -------------------------------------------------------------------------------------- who answered

    def _recover(self, cause: str, trigger_us: int) -> list[Sent]:
        """Ask quietly until what traffic goes back to has answered every prompt, or its time is over."""
        deadline_us = trigger_us + round(recovery_seconds(cause, self.rule) * 1e6)
        probes: list[Sent] = []
        while True:
            self.stage.check()
            if self.stage.accepted is not None and self._accepted_pid() is None:
                raise InstrumentError(f"The accepted bundle's {ENDED}")
            asked = self._ask(self._public(), f"{cause}-quiet-{len(probes)}-")
            self._attribute(asked)
            probes += asked
            if all(self._conforms(each) for each in asked) or self.clock.now() > deadline_us:
                return probes
            time.sleep(AGAIN_SECONDS)

    def _conforms(self, sent: Sent) -> bool:
        return self.back.has(sent.served, sent.route, sent.code, is_whole=sent.outcome == "ok")

    def _attribute(self, requests: list[Sent]) -> None:
        """Have the router's log tell who served each request that reached it."""
        reached = [each for each in requests if each.outcome != "connect"]
        ends = time.monotonic() + LOG_SECONDS
        self._read()
        while any(each.id not in self.lines for each in reached):
            if time.monotonic() > ends:
                self.stage.check()
                raise InstrumentError("The router did not write down every request of the drill; run the gate again.")
            time.sleep(LOOK_SECONDS)
            self._read()
        for each in reached:
            each.attribute(self.lines[each.id])

    def _is_back(self, exercise: dict[str, Any], answers: dict[str, list[str | None]]) -> bool:
        """Tell whether the last quiet questions were answered by what traffic goes back to, as it answers by itself."""
        last = [dict(zip(COLUMNS, row, strict=True)) for row in exercise["probes"][-len(self.prompts) :]]
        return exercise["restored"]["problem"] is None and all(
            self.back.has(each["served"], each["route"], each["code"], is_whole=each["outcome"] == "ok")
            and (self.back.address is None or each["output"] in answers[each["prompt"]])
            for each in last
        )

    def _is_cut(self, exercise: dict[str, Any]) -> bool:
        return any(dict(zip(COLUMNS, row, strict=True))["is_silent"] for row in exercise["requests"])


def _not_taken_back(problem: NotTakenBack) -> dict[str, Any]:
    return {"revision": None, "at_us": None, "problem": str(problem), "is_late": problem.is_late}


GATE = Gate("rollback", version=2, depends_on=tuple(COMPONENTS), measure=measure, judge=judge, ends_engine=True)
