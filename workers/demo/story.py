"""The four releases of the demonstration, one after the other, only by the command line and the client library."""

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final
from uuid import UUID

from gates.dialects.llamacpp import LLAMACPP
from gates.served import Served, served_at
from registry.client import Client
from schemas.api import RoleName, TokenCreate
from schemas.evidence import Entry, Kind
from schemas.policy import GoldenRule, LoadRule, Policy
from schemas.release import Phase, ReleaseDetail
from schemas.result import GateResult
from workers.demo.bundles import BROKEN_TEMPLATE, FIRST, LONGER, SLOW, Sort, write
from workers.demo.follow import Follower, Stuck
from workers.demo.people import Person
from workers.demo.prompts import MODEL, SHAPES
from workers.demo.report import Outcome, engine_of, instants, rollback_of
from workers.demo.screen import Screen
from workers.demo.stack import Facts, Stack
from workers.demo.traffic import LiveTraffic
from workers.examples import examples

TARGET: Final = "chat@demo"
RATES_PER_SECOND: Final = (0.8, 4.0)
"""Lowest and highest rate of live traffic."""
BUSY_RATIO: Final = 0.3
"""Rate of live traffic times the median answer of the first load gate, so that live traffic takes less than half of
one engine's time on a fast machine as on a slow one: a live answer takes longer, and several are made at once."""
SEED: Final = 270
PEOPLE: Final[tuple[RoleName, ...]] = ("engineer", "manager")
OBSERVED_WITHIN: Final = timedelta(seconds=90)
"""After so long a restore that no request has shown is not waited for."""
SETTLED: Final = frozenset({Phase.PROMOTED, Phase.SUPERSEDED, Phase.REJECTED, Phase.ROLLED_BACK})


class Unexpected(Exception):
    """A release did not end as it should, so that what follows would show nothing."""


@dataclass(slots=True)
class Story:
    """One run of the demonstration on a stack that is ready.

    Args:
        stack: that runs.
        facts: what it told.
        root: folder for bundles and what the command line remembers.
        model: the GGUF file.
        screen: where it is told.
        outcome: filled in as things happen.
    """

    stack: Stack
    facts: Facts
    client: Client
    root: Path
    model: Path
    screen: Screen
    outcome: Outcome
    traffic: LiveTraffic | None = None
    policy: str = ""
    bundles: dict[str, str] = field(default_factory=dict)
    _rate: float = RATES_PER_SECOND[0]
    _people: dict[str, Person] = field(default_factory=dict)

    @property
    def engineer(self) -> Person:
        """Who proposes."""
        return self._people["engineer"]

    @property
    def manager(self) -> Person:
        """Who makes the rules and lets through."""
        return self._people["manager"]

    # ---------------------------------------------------------------------------------------------- chapters

    def prepare(self) -> None:
        """Make people, rules, a target, and the four bundles' directories."""
        for role in PEOPLE:
            made = self.client.tokens.create(TokenCreate(name=role, role=role))
            self._people[role] = Person(
                role, self.facts.url, made.secret, self.root / "bundles", self.root / "home", self.screen.act
            )
        for sort in (FIRST, LONGER, BROKEN_TEMPLATE, SLOW):
            # All at once: a further link to the model changes its time, and it would be read again.
            write(sort, self.model, self.root / "bundles")
        suites, policy_file = examples("suites"), examples("policies") / "demo.json"
        policy = Policy.parse(policy_file.read_bytes())
        for name in ("demo-golden.json", "demo-load.json"):
            self.engineer.act("suite", "push", str(suites / name))
        self.policy = str(self.manager.act("policy", "push", str(policy_file))["digest"])
        self.manager.act("target", "create", TARGET, "--runner-class", self.facts.runner_class)
        for rule in policy.gates:
            if isinstance(rule, GoldenRule):
                self._record(rule.suite)
            if isinstance(rule, LoadRule):
                self.screen.line(
                    f"the policy asks for {rule.requests} requests a load run and the percentile {rule.percentile}: "
                    "sample sizes of a demonstration"
                )

    def _record(self, suite: str) -> None:
        """Have the first bundle answer the golden suite: the yardstick, set by a person's signed act."""
        self._register(FIRST)
        words = ("suite", "record", short(suite), "--bundle", short(self.bundles[FIRST.name]), "--target", TARGET)
        run = self.manager.act(*words, "--reason", "its answers were read and accepted")
        found = self._follower().run(UUID(str(run["id"])))
        if found.reference is None:
            raise Stuck(f"no reference was recorded: {found.problem or found.state}")
        self.screen.line(f"reference {found.reference[7:19]} recorded from {FIRST.name}", "good")

    def first(self) -> None:
        """(a) The first bundle: nothing served before, so that it takes all traffic after gates and approval."""
        self._release(FIRST)

    def successor(self) -> None:
        """(b) A good successor, step by step to the whole."""
        self._register(LONGER)
        self._release(LONGER)

    def broken(self) -> None:
        """(c) A broken template, which the golden gate refuses."""
        self._register(BROKEN_TEMPLATE)
        self._release(BROKEN_TEMPLATE)

    def slow(self) -> None:
        """(d) Slow where no suite looks: every gate passes, and live traffic shows it."""
        self._register(SLOW)
        self._release(SLOW)

    def finish(self) -> None:
        """Let the last streams end, have evidence verified, and ask who served when."""
        self.screen.now("waiting for the open streams to end")
        self.end_traffic()
        self.screen.line(f"{self.outcome.streams.sent} streams were sent, {len(self.outcome.streams.broken)} broke")
        self.outcome.releases = [self.client.releases.get(release.id) for release in self.outcome.releases]
        for release in self.outcome.releases:
            self.outcome.engine = self.outcome.engine or engine_of(release.log)
            self.outcome.rollback = rollback_of(release.log)
        verified = self.engineer.act("evidence", "verify", statuses=frozenset({0, 1}))
        self.outcome.entries, self.outcome.verified = int(verified["entries"]), bool(verified["verified"])
        for fault in verified["faults"]:
            self.screen.line(f"{fault['stream']} {fault['position']}: {fault['problem']}", "bad")
        self.outcome.served = self._served()

    def end_traffic(self) -> None:
        """Send no more, and wait for open streams: before the stack stops, so that it breaks none."""
        if self.traffic is not None:
            self.traffic.stop()

    # --------------------------------------------------------------------------------------------- what they do

    def _register(self, sort: Sort) -> None:
        words = ("bundle", "create", sort.name, "--name", sort.name, "--file", f"{sort.name}.json")
        told = self.engineer.act(*words, "--hard-links")  # the four directories share one file of weights
        digest = self.bundles[sort.name] = str(told["digest"])
        self.screen.names[short(digest)] = sort.name
        self.screen.line(
            f"{sort.name} is {digest}; {told['bytes'] / 1e6:,.0f} MB, of which {told['bytes_read'] / 1e6:,.0f} MB were "
            f"read and {told['bytes_sent'] / 1e6:,.0f} MB sent"
        )

    def _release(self, sort: Sort) -> None:
        words = ("release", "create", "--target", TARGET, "--bundle", short(self.bundles[sort.name]))
        made = self.engineer.act(*words, "--policy", short(self.policy), "--reason", sort.reason)
        until = _is_taken_back if sort.ends is Phase.ROLLED_BACK else _is_settled
        found = self._follower().release(UUID(str(made["id"])), until=until)
        self.outcome.releases.append(found)
        if found.phase is not sort.ends:
            raise Unexpected(f"{sort.name} is {found.phase}, not {sort.ends}: {found.reason}")

    def _follower(self) -> Follower:
        return Follower(
            client=self.client,
            screen=self.screen,
            check=self.stack.check,
            streams=self.outcome.streams,
            on_entry=self._on_entry,
            on_gated=self._approve,
            on_held=self._resume,
        )

    def _on_entry(self, entry: Entry) -> None:
        """Send live traffic from the first moment that something serves."""
        if entry.kind is Kind.GATE_RECORDED and self.traffic is None:
            self._rate = rate_for(GateResult.model_validate(entry.body)) or self._rate
        if entry.kind is Kind.TRAFFIC_SHIFTED and self.traffic is None:
            target = self.client.targets.get(TARGET)
            base = (target.url or "").removesuffix("/v1")
            self.traffic = LiveTraffic(
                base, MODEL, LLAMACPP, SHAPES, rate_per_second=self._rate, seed=SEED, account=self.outcome.streams
            )
            self.traffic.start()
            self.screen.line(f"live traffic begins: {self._rate:.2g} streams a second to {target.url}")

    def _approve(self, release: ReleaseDetail) -> None:
        reason = "all gates passed; the evidence was read"
        self.manager.act("release", "approve", str(release.id), "--reason", reason)

    def _resume(self, release: ReleaseDetail) -> None:
        self.manager.act("release", "resume", str(release.id), "--reason", "this machine is busy: try once more")

    def _served(self) -> list[Served]:
        """Ask the evidence who served at the arrival of three requests: before, in and after the canaries."""
        streams = {f"release/{release.id}" for release in self.outcome.releases}
        entries = [entry for entry in self.client.evidence.list() if entry.stream in streams]
        return [served_at(entries, at) for at in instants(self.outcome.releases, self.outcome.streams)]


def rate_for(result: GateResult) -> float | None:
    """Return the rate of live traffic that the engine can bear, by its load gate; None for another gate's result."""
    medians = [one.value for one in result.measurements if (one.name, one.statistic) == ("e2e", "p50")]
    if not medians or not medians[0]:
        return None
    low, high = RATES_PER_SECOND
    return min(high, max(low, BUSY_RATIO * 1000 / medians[0]))


def short(digest: str) -> str:
    """Return a digest as a person types it."""
    return digest[7:19]


def _is_settled(release: ReleaseDetail) -> bool:
    return release.phase in SETTLED


def _is_taken_back(release: ReleaseDetail) -> bool:
    """Whether traffic is seen where it was before, or the release ended otherwise."""
    if release.phase is not Phase.ROLLED_BACK:
        return _is_settled(release)
    is_observed = any(entry.kind is Kind.RESTORE_OBSERVED for entry in release.log)
    return is_observed or datetime.now(UTC) - release.phase_since > OBSERVED_WITHIN
