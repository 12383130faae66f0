"""Follows releases and runs until they are decided, and says what happens while it happens."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeVar
from uuid import UUID

from registry.cli.failures import Exit
from registry.cli.options import Until
from registry.cli.output import Clock, Output, plain
from registry.client import Client
from schemas.api import Run
from schemas.evidence import Entry, Kind
from schemas.holds import may_be_agreed_to, way_out
from schemas.policy import Policy
from schemas.problems import NotFound, Unavailable
from schemas.release import TERMINAL, Phase, ReleaseDetail
from schemas.short import many
from schemas.stories import TONES, label, served_in, tell

INTERVAL_SECONDS = 0.5
LOOK_SECONDS = 5.0
"""Longest time without a look at what no entry tells, such as that every slot of the runners is taken."""
STEP_SECONDS = 15.0
"""Shortest time between two lines about one canary step."""

TIME_OUT = "time-out"
"""How it came out where whoever waited had no more time."""

_AT_LEAST_GATED = {Phase.GATED, Phase.APPROVED, Phase.CANARY, Phase.PROMOTED, Phase.SUPERSEDED}
_REACHED: dict[Until, set[Phase]] = {
    Until.GATED: _AT_LEAST_GATED,
    Until.APPROVED: _AT_LEAST_GATED - {Phase.GATED},
    Until.PROMOTED: {Phase.PROMOTED, Phase.SUPERSEDED},
    Until.ENDED: {Phase.SUPERSEDED},
    Until.ROLLED_BACK: {Phase.ROLLED_BACK},
}
_BEFORE_TRAFFIC = {Phase.CANDIDATE, Phase.STAGED, Phase.BOOTED, Phase.GATED, Phase.APPROVED}

SeenT = TypeVar("SeenT")


@dataclass(frozen=True, slots=True)
class Decided:
    """How it came out: `exit_status`, in one word, and why."""

    exit_status: Exit
    outcome: str
    why: str


def follow_release(client: Client, output: Output, release: UUID, *, until: Until, timeout_seconds: float) -> int:
    """Follow a release, print each entry of its log, and end with the release and what became of it.

    A release that holds before it has traffic ends the wait: it goes on only when a person lets it. One that holds
    in its canary may still go on by itself, so the wait goes on too.

    Args:
        client: of the service.
        output: of the command.
        release: its id.
        until: how far.
        timeout_seconds: longest wait.

    Returns:
        The exit status.
    """
    watch = _Watch(client, output, release, until, timeout_seconds)
    try:
        found, verdict = watch.follow()
    except KeyboardInterrupt:
        output.note(f"only the watching ended; the release goes on: sluicegate release watch {release}", "warn")
        raise
    verdict = verdict or _timed_out(found.phase, found.waits, timeout_seconds)
    next_ = what_to_do(client, found)
    if next_ is not None and verdict.exit_status is Exit.DONE:
        verdict = Decided(verdict.exit_status, verdict.outcome, f"{verdict.why}; {next_}")
    told = {**plain(found), "outcome": verdict.outcome, "why": verdict.why, "what_to_do": next_}
    output.result(told, lambda out: out.say(f"{verdict.outcome}: {verdict.why}", _tone(verdict)))
    if verdict.outcome == TIME_OUT:
        output.note(f"the release goes on; come back to it: sluicegate release watch {release} --until {until}", "warn")
    return verdict.exit_status


@dataclass(slots=True)
class _Watch:
    """One release that is followed, and what was said of it already."""

    client: Client
    output: Output
    release: UUID
    until: Until
    timeout_seconds: float
    clock: Clock = field(default_factory=Clock)
    seen: int = 0
    has_told_who: bool = False
    has_told_waits: bool = False
    has_told_way_out: bool = False
    names: dict[str, str] = field(default_factory=dict)
    doing: str | None = None
    counted: tuple[Phase, int | None] | None = None
    told_at: float = 0.0
    is_away: bool = False

    def follow(self) -> tuple[ReleaseDetail, Decided | None]:
        """Look at every new entry, and every few seconds without one, until it is decided or time is up."""
        found, verdict = self._look()
        cursor: str | None = None
        while verdict is None and self._left():
            try:
                window = min(self._left(), LOOK_SECONDS)
                for event in self.client.events(
                    release=self.release, after=cursor, seconds=window, on_away=self._is_away
                ):
                    cursor = event.cursor
                    if event.entry.position > self.seen:
                        found, verdict = self._patiently()
                        if verdict is not None:
                            return found, verdict
            except Unavailable as problem:
                self._is_away(problem)
                time.sleep(min(INTERVAL_SECONDS, self._left()))
                continue
            if self._left():
                found, verdict = self._patiently()
        return found, verdict

    def _look(self) -> tuple[ReleaseDetail, Decided | None]:
        found = self.client.releases.get(self.release)
        self.is_away = False
        fresh = found.log[self.seen :]
        add_names(self.client, self.names, served_in(fresh))
        for entry in fresh:
            self.output.follow(*line(entry, self.names))
        self.seen = len(found.log)
        verdict = decided(found, self.until)
        if found.phase is Phase.GATED and verdict is None and not self.has_told_who:
            self.has_told_who = True
            if (said := _who_agrees(self.client, found)) is not None:
                self.output.note(said)
        if verdict is None and found.doing is not None and self._is_news(found):
            self.doing, self.counted = found.doing, (found.phase, found.step)
            self.told_at = self.clock.seconds
            self.output.note(f"  {found.doing}")
        out = way_out(found, also_waits=False) if verdict is None else None
        if out is not None and not self.has_told_way_out:
            self.output.note(out, "warn")
        self.has_told_way_out = out is not None
        self.has_told_waits = _has_told_waits(self.output, found.waits, self.clock, has_told=self.has_told_waits)
        return found, verdict

    def _is_news(self, found: ReleaseDetail) -> bool:
        """Tell whether what is done is worth a line: a canary step counts on at every look."""
        if found.phase is Phase.CANARY and (found.phase, found.step) == self.counted:
            return found.doing != self.doing and self.clock.seconds - self.told_at >= STEP_SECONDS
        return found.doing != self.doing

    def _patiently(self) -> tuple[ReleaseDetail, Decided | None]:
        """Look, and again when the service went away in between. Raises Unavailable when time is up."""
        while True:
            try:
                return self._look()
            except Unavailable as problem:
                if not self._left():
                    raise
                self._is_away(problem)
                time.sleep(min(INTERVAL_SECONDS, self._left()))

    def _left(self) -> float:
        return max(0.0, self.timeout_seconds - self.clock.seconds)

    def _is_away(self, problem: Unavailable) -> None:
        if not self.is_away:
            self.output.note(f"{problem.detail}; waiting for it", "warn")
        self.is_away = True


def _timed_out(state: str, waits: str | None, timeout_seconds: float) -> Decided:
    why = f"it is {state} after {timeout_seconds:g} s"
    return Decided(Exit.UNDECIDED, TIME_OUT, why if waits is None else f"{why}: {waits}")


def _has_told_waits(output: Output, waits: str | None, clock: Clock, *, has_told: bool) -> bool:
    """Say what something waits for, once while it does. Returns whether that was said."""
    # What waits for a moment only is no news.
    if waits is not None and not has_told and clock.seconds >= LOOK_SECONDS:
        output.note(waits, "warn")
        return True
    return has_told and waits is not None


def _patiently(look: Callable[[], SeenT], note: Callable[[Unavailable], None], left: Callable[[], float]) -> SeenT:
    """Look, and again when the service went away in between. Raises Unavailable when time is up."""
    while True:
        try:
            return look()
        except Unavailable as problem:
            if not left():
                raise
            note(problem)
            time.sleep(min(INTERVAL_SECONDS, left()))


def decided(release: ReleaseDetail, until: Until) -> Decided | None:
    """Return what became of a release, or None while it is under way. Pure."""
    reason = release.reason or ""
    if release.phase in _REACHED[until]:
        return Decided(Exit.DONE, str(release.phase), reason or f"the release is {release.phase}")
    if release.phase in TERMINAL:
        return Decided(Exit.FAILED, str(release.phase), reason or f"the release was {release.phase}")
    if release.held and release.phase in _BEFORE_TRAFFIC and not release.is_paused:
        return Decided(Exit.UNDECIDED, "held", f"{'; '.join(release.held)}; {way_out(release, also_waits=False)}")
    return None


def what_to_do(client: Client, release: ReleaseDetail) -> str | None:
    """Return what a person can do for a release that is paused, holds in its canary, or must be agreed to."""
    return "; ".join(filter(None, [way_out(release), _who_agrees(client, release)])) or None


def _who_agrees(client: Client, release: ReleaseDetail) -> str | None:
    """Return who must agree to a release; None where nobody has to, or not yet, or not any more."""
    if release.phase is not Phase.GATED or not may_be_agreed_to(release):
        return None
    required = Policy.model_validate(client.policies.get(release.policy).document).approval.required
    return None if required < 1 else _waits_for(release, required)


def _waits_for(release: ReleaseDetail, needed: int) -> str:
    given = set[str]()
    for entry in release.log:
        if entry.kind is Kind.APPROVAL_GRANTED:
            given.add(entry.actor)
        elif entry.kind is Kind.APPROVAL_WITHDRAWN:
            given.discard(str(entry.body.get("approver")))
    people = many(needed, "approval") + (f" ({', '.join(sorted(given))} gave one)" if given else "")
    command = f"sluicegate release approve {release.id} --reason …"
    return f"waits for {people} by somebody other than {release.created_by}: {command}"


def line(entry: Entry, names: Mapping[str, str] = MappingProxyType({})) -> tuple[str, str]:
    """Return an entry as one line, and its tone; `names` are those of bundles by digest."""
    return f"{entry.recorded_at:%H:%M:%S}Z  {told(entry, names)}", tell(entry)[0]


def told(entry: Entry, names: Mapping[str, str]) -> str:
    """Return what an entry says, without its time."""
    actor = "" if entry.actor in ("controller", "runner") else f" ({entry.actor})"
    return f"{label(entry.kind)}{actor}: {tell(entry, names)[1]}".rstrip(": ")


def add_names(client: Client, known: dict[str, str], digests: Iterable[str]) -> None:
    """Look up the names of those bundles that are not known yet; one that was deleted stays without.

    So does every other one while the service is away: what is told waits for no name.
    """
    for digest in sorted(set(digests) - known.keys()):
        try:
            known[digest] = client.bundles.get(digest).name
        except NotFound:
            continue
        except Unavailable:
            return


def follow_run(client: Client, output: Output, run: Run, *, timeout_seconds: float) -> int:
    """Follow a run, print its progress and each gate's result, and end with the run. Returns the exit status."""
    clock, told = Clock(), set[str]()
    progress: str | None = None
    has_told_waits = False

    def look() -> tuple[Run, Decided | None]:
        nonlocal progress, has_told_waits
        found = client.runs.get(run.id)
        for result in found.results:
            gate = str(result.get("gate"))
            if gate not in told:
                told.add(gate)
                verdict = str(result.get("verdict"))
                output.follow(f"{gate} {verdict}: {result.get('summary')}", TONES.get(verdict, "plain"))
        if found.progress and found.progress != progress and found.state == "claimed":
            progress = found.progress
            output.note(f"  {progress}")
        has_told_waits = _has_told_waits(output, found.waits, clock, has_told=has_told_waits)
        return found, run_decided(found)

    def note(problem: Unavailable) -> None:
        output.note(f"{problem.detail}; waiting for it", "warn")

    def left() -> float:
        return max(0.0, timeout_seconds - clock.seconds)

    found, verdict = look()

    def is_over() -> bool:
        nonlocal found, verdict
        found, verdict = look()
        return verdict is not None

    try:
        if verdict is None:
            stream = f"run/{run.id}" if run.release is None else f"release/{run.release}"
            for _ in client.events(stream=stream, seconds=left(), on_away=note, on_quiet=is_over):
                found, verdict = _patiently(look, note, left)
                if verdict is not None:
                    break
    except KeyboardInterrupt:
        _say_it_goes_on(output, run)
        raise
    verdict = verdict or _timed_out(found.state, found.waits, timeout_seconds)
    outcome = {**plain(found), "outcome": found.outcome or verdict.outcome, "why": verdict.why}
    output.result(outcome, lambda out: out.say(f"{verdict.outcome}: {verdict.why}", _tone(verdict)))
    _say_next(output, found, verdict)
    return verdict.exit_status


def _say_it_goes_on(output: Output, run: Run) -> None:
    output.note(f"only the waiting ended; the run goes on: sluicegate gate watch {run.id}", "warn")
    if run.release is None:
        output.note(f"end it: sluicegate gate cancel {run.id} --reason …")


def _say_next(output: Output, run: Run, verdict: Decided) -> None:
    if verdict.outcome == TIME_OUT:
        output.note(f"the run goes on; come back to it: sluicegate gate watch {run.id}", "warn")
    if run.reference is not None:
        output.note(f"what it answered: sluicegate suite reference {run.reference[7:19]}")


def run_result(output: Output, run: Run) -> int:
    """Print a run that is not followed. Returns the exit status."""
    output.result(run, lambda out: out.fields([("run", run.id), ("kind", run.kind), ("state", run.state)]))
    output.note(f"follow it: sluicegate gate watch {run.id}")
    return Exit.DONE


def run_decided(run: Run) -> Decided | None:
    """Return what became of a run, or None while it is under way. Pure."""
    if run.state not in ("done", "cancelled"):
        return None
    why = run.problem or f"run {run.id}"
    if run.state == "cancelled":
        return Decided(Exit.UNDECIDED, "cancelled", why)
    if run.reference is not None:
        return Decided(Exit.DONE, "recorded", f"reference {run.reference}")
    verdicts = [(str(result.get("gate")), str(result.get("verdict"))) for result in run.results]
    if run.outcome == "passed":
        return Decided(Exit.DONE, "passed", f"{many(len(verdicts), 'gate')} passed")
    if run.outcome == "failed":
        failed = ", ".join(gate for gate, verdict in verdicts if verdict == "failed")
        return Decided(Exit.FAILED, "failed", failed or why)
    open_ones = ", ".join(f"{gate} {verdict}" for gate, verdict in verdicts if verdict != "passed")
    return Decided(Exit.UNDECIDED, "undecided", open_ones or why)


def _tone(verdict: Decided) -> str:
    return {Exit.DONE: "good", Exit.FAILED: "bad"}.get(verdict.exit_status, "warn")
