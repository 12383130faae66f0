"""The life of one replica: staged, loading, warming, ready, draining, stopped, or failed.

Ready means three things at once: the health route answers 200, the model list has the served name, and a real
completion of 8 tokens ended with a finish reason. An exit that nobody asked for is a failure whatever its status.
"""

import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import httpx

from gates.answers import FINISHED, Answer, Outcome, read_plain
from gates.booted.comparison import Comparison
from gates.dialects.base import Dialect, Malformed, Request, parse_metrics
from gates.dialects.table import dialect_of
from gates.environment import Environment, EnvironmentAltered, NotInstalled
from gates.plain import NO_AUTHORITY
from schemas.bundle import Bundle, Feature
from schemas.failures import Cause
from schemas.problems import EngineFailed
from schemas.result import Finding
from schemas.runner import Compared, EngineIdentity, ReplicaReport, ReplicaState
from schemas.short import took
from workers import warming
from workers.diagnosis import LoadProgress, classify, compile_ms, is_full, memory_kills
from workers.engines.base import Command, Driver, Launch
from workers.engines.table import DRIVERS
from workers.identity import Booted, expect, hold
from workers.launchers.base import Condition, Launched, Launcher, LaunchFailed, Order, ProcessState
from workers.launchers.logs import trim
from workers.launchers.made import Made
from workers.launchers.proc import PROC, arguments
from workers.vitals import Member, lost, ranks

PROBE_TOKENS = 8
PROBE_TEXT = "ping"
POLL_SECONDS = 0.05
ASK_SECONDS = 0.2
"""The same where looking means asking a container engine or a cluster."""
_ASKED_AGAIN = 10
"""Times that whoever runs an engine is asked what it runs, before it is held to say nothing."""
_LOG_LINES = 20
_CLASSIFIED_LINES = 400
_CLASSIFIED_LINES_ONCE_READY = 60
"""What a request made the engine write long ago is not why it died."""
_PROGRESS_SECONDS = 0.5
_FETCHED_SECONDS = 2.0
# Of a process that is killed the sockets go first, and a moment later it can be told that it has ended.
_HUNG_UP, _ENDING_SECONDS = frozenset({Outcome.CONNECT, Outcome.TRUNCATED}), 0.5
"""The same where the log has to be fetched."""

NEXT: dict[ReplicaState, frozenset[ReplicaState]] = {
    ReplicaState.STAGED: frozenset({ReplicaState.LOADING, ReplicaState.FAILED, ReplicaState.STOPPED}),
    ReplicaState.LOADING: frozenset({ReplicaState.WARMING, ReplicaState.DRAINING, ReplicaState.FAILED}),
    ReplicaState.WARMING: frozenset({ReplicaState.READY, ReplicaState.DRAINING, ReplicaState.FAILED}),
    ReplicaState.READY: frozenset({ReplicaState.DRAINING, ReplicaState.FAILED}),
    ReplicaState.DRAINING: frozenset({ReplicaState.STOPPED, ReplicaState.FAILED}),
    ReplicaState.STOPPED: frozenset(),
    ReplicaState.FAILED: frozenset(),
}
"""State → states that may follow."""


class NotWanted(RuntimeError):
    """Waiting was given up, since the replica is no longer wanted."""


@dataclass(frozen=True)
class Ready:
    """What a replica showed when it became ready. Durations in ms.

    `loading_ms` from the start of the process until the health route answered 200, `compile_ms` as the engine's log
    tells it and part of one of the others, `warming_ms` from then to ready with `warm_requests` after the real
    completion, of which `warm_failed` had no answer that ends properly; `ready_ms` is all of it. An adopted replica
    has none of them. `page_cache_percent` of the weights lay in memory when it was started; None when the kernel does
    not say. `peak_memory_bytes` is the process's resident set at its highest. `compared` is what it says of itself,
    held against its bundle, and `findings` are the differences, none of which blocks.
    """

    identity: EngineIdentity
    address: str
    loading_ms: int | None
    ready_ms: int | None
    peak_memory_bytes: int | None
    compile_ms: int | None = None
    warming_ms: int | None = None
    warm_requests: int | None = None
    warm_failed: int | None = None
    page_cache_percent: int | None = None
    compared: tuple[Compared, ...] = ()
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True)
class Probe:
    """Whether a replica answers. `is_busy` means no answer in time while the engine made progress."""

    is_alive: bool
    is_busy: bool
    detail: str
    latency_ms: float


class Replica:
    """One engine instance on this machine.

    Methods may be called from several threads. `on_transition` is called after every change of state, with the
    new state and one sentence; it must not call back into the replica's methods that change state. `on_progress` is
    called with one line for people while it loads, where the engine's log tells how far it is.
    """

    def __init__(
        self,
        bundle: Bundle,
        launch: Launch,
        *,
        workdir: Path,
        launcher: Launcher,
        order: Order | None = None,
        on_transition: Callable[[ReplicaState, str], None] = lambda _state, _cause: None,
        on_progress: Callable[[str], None] = lambda _line: None,
    ) -> None:
        self.bundle = bundle
        self.driver: Driver = DRIVERS[bundle.engine.name]
        self.dialect: Dialect = dialect_of(bundle.engine)
        self.workdir = workdir
        self.log_path = workdir / "engine.log"
        self.state = ReplicaState.STAGED
        self.launched: Launched | None = None
        self.failure: Cause | None = None
        self.ranks: list[Member] = []
        self._launch = launch
        self._launcher = launcher
        self._order = order or Order(bundle, launch.root)
        self._on_transition = on_transition
        self._on_progress = on_progress
        self._installed: Environment | None = None
        self._memory_kills: int | None = None
        self._page_cache_percent: int | None = None
        self._load = LoadProgress(self.log_path, self.driver.progress_patterns)
        self._command: Command | None = None
        self._started: float | None = None
        self._is_stopping = False
        self._lock = threading.RLock()

    # ------------------------------------------------------------------------------------------- starting

    def start(self) -> Launched:
        """Start the engine and return at once. Raises EngineFailed when it cannot be started at all."""
        self._refuse_what_cannot_run()
        self._command = self.driver.command(self.bundle, self._launch)
        self.workdir.mkdir(parents=True, exist_ok=True)
        with self._lock:
            weights = [self._launch.root / file.path for file in self.bundle.weights()]
            self._page_cache_percent = warming.resident_percent(weights)
            self._started = time.monotonic()
            try:
                self.launched = self._launcher.start(
                    self._command, workdir=self.workdir, log_path=self.log_path, order=self._order
                )
            except LaunchFailed as error:
                raise self._failed(Cause(error.cause or Cause.NOT_STARTED), str(error)) from error
            self._memory_kills = memory_kills(self.launched.pid)
            self._move(ReplicaState.LOADING, f"{self.launched} started")
            return self.launched

    def adopt(
        self,
        pid: int,
        start_time: str,
        boot_id: str,
        port: int | None,
        handle: str | None = None,
        *,
        started: Command | None = None,
    ) -> bool:
        """Take over an engine that an earlier worker started. False when it is not provably that process.

        An adopted replica is loading until `wait_ready` has seen it answer. `started` is the command that it was
        started with: what this product's driver would start today may be another one, and is not what runs. When it
        is not given, the process itself is asked for its words.
        """
        with self._lock:
            found = self._launcher.adopt(pid, start_time, boot_id, handle)
            if found is None:
                return False
            port_file = None if self.driver.takes_port else self._launch.port_file
            self._command = started or Command(tuple(arguments(pid)), port_file)
            self.launched = replace(found, port=port)
            self._launcher.leave(self.workdir)
            self._memory_kills = memory_kills(pid)
            self._move(ReplicaState.LOADING, f"{found} adopted")
            return True

    def wait_ready(self, deadline_seconds: float, *, is_wanted: Callable[[], bool] = lambda: True) -> Ready:
        """Wait until the replica is ready.

        Args:
            deadline_seconds: longest wait.
            is_wanted: asked often; when it says no, waiting ends.

        Raises:
            EngineFailed: it ended, did not become ready in time, or serves another model. It is stopped then.
            NotWanted: `is_wanted` said no, and the replica still runs; or it was stopped meanwhile.
        """
        deadline = time.monotonic() + deadline_seconds
        self._expect()
        self._wait(self._is_listening, deadline, is_wanted, "it does not listen")
        self._wait(self._is_healthy, deadline, is_wanted, f"{self.dialect.health_path} does not answer 200")
        loading_ms = self._elapsed_ms()
        self._move(ReplicaState.WARMING, f"listens on {self.address}")
        identity = self.identity()
        if self.bundle.serving.served_name not in identity.model_ids:
            raise self._failed(Cause.WRONG_MODEL, f"it serves {', '.join(identity.model_ids) or 'nothing'}")
        answer = self.ask(max(1.0, deadline - time.monotonic()), max_tokens=PROBE_TOKENS)
        if answer.finish_reason not in FINISHED:
            self.fail_when_ended()
            raise self._failed(Cause.NO_ANSWER, f"a completion of {PROBE_TOKENS} tokens: {answer.detail}")
        identity, comparison = self._held_to_bundle(identity)
        warm, failed = self._warm(deadline) if loading_ms is not None else (None, None)
        ready_ms = self._elapsed_ms()
        ready = Ready(
            identity=identity,
            address=self.address,
            loading_ms=loading_ms,
            ready_ms=ready_ms,
            peak_memory_bytes=self.peak_memory_bytes(),
            compile_ms=compile_ms(self.log_path, self.driver.compile_pattern),
            warming_ms=None if loading_ms is None or ready_ms is None else ready_ms - loading_ms,
            warm_requests=warm,
            warm_failed=failed,
            page_cache_percent=self._page_cache_percent,
            compared=comparison.rows,
            findings=comparison.findings,
        )
        if self.launched is not None:
            self.ranks = ranks(self.launched.pid, self.driver.rank_pattern)
        since = "after adoption" if ready.ready_ms is None else f"after {took(ready.ready_ms)}"
        differs = "".join(f"; {one.message}" for one in ready.findings)
        self._move(ReplicaState.READY, f"a real completion ended, ready {since}{differs}")
        return ready

    def _expect(self) -> None:
        """Read what the engine should say out of the bundle's files, while it loads; what is read is remembered."""
        expect(self.bundle, self._launch.root, () if self._command is None else self._command.argv)

    def _held_to_bundle(self, identity: EngineIdentity) -> tuple[EngineIdentity, Comparison]:
        """Compare what booted with what the bundle says. Raises EngineFailed on a difference that blocks."""
        is_process = self.launched is not None and self.launched.handle is None
        made = self._made()
        booted = Booted(
            bundle=self.bundle,
            root=self._launch.root,
            argv=() if self._command is None else self._command.argv,
            pid=self.launched.pid if self.launched is not None and is_process else None,
            installed=self._installed,
            is_elsewhere=self.driver.admits is not None,
            is_adopted=self._started is None,
            made=made,
        )
        identity, comparison = hold(booted, self.base_url, identity)
        if comparison.blocking:
            self.fail_when_ended()
            detail = " ".join(one.message for one in comparison.blocking)
            raise self._failed(Cause.IDENTITY_DIFFERS, detail[:2000], comparison.findings)
        return identity, comparison

    def _made(self) -> Made | None:
        """Ask whoever runs the engine what it runs. Raises EngineFailed where nobody tells of one that is new."""
        if self.launched is None or self._command is None or not self._command.argv:
            return None
        for _ in range(_ASKED_AGAIN):
            if (made := self._launcher.made(self.launched, self._command, self.workdir, self._order)) is not None:
                return made
            if not self._launcher.runs_images or self._started is None:
                return None
            self.fail_when_ended()
            time.sleep(ASK_SECONDS)
        raise self._failed(Cause.NO_ANSWER, f"what runs of it could not be asked: {self.launched}")

    def _warm(self, deadline: float) -> tuple[int, int]:
        """Ask once for each shape that is meant, and return how many were asked for and how many failed.

        What an engine cannot do is found by gates, and does not keep a replica that passed them from serving.
        """
        asked = failed = 0
        for request in warming.requests(self.bundle, self.dialect):
            self._on_progress(f"warming: request {asked + 1}")
            answer = self._post(request, max(1.0, deadline - time.monotonic()))
            self.fail_when_ended()
            asked += 1
            failed += answer.finish_reason not in FINISHED
        return asked, failed

    def _refuse_what_cannot_run(self) -> None:
        if problems := self.driver.check_bundle(self.bundle):
            raise self._failed(Cause.UNSUPPORTED, "; ".join(problems))
        if self._launcher.runs_images and self.bundle.engine.image is None:
            named = self.bundle.engine.environment or "an endpoint"
            raise self._failed(Cause.ENVIRONMENT_DIFFERS, f"the bundle names {named}, and engines run from images here")
        if self._launcher.runs_images:
            return  # The digest in its name is what is run.
        if self.driver.admits is not None:
            if refused := self.driver.admits(self.bundle):
                raise self._failed(Cause.ENVIRONMENT_DIFFERS, "; ".join(refused))
            return
        if self.bundle.engine.image is not None:
            raise self._failed(
                Cause.ENVIRONMENT_DIFFERS,
                f"the bundle names {self.bundle.engine.image}, and engines are processes here",
            )
        try:
            installed = self.driver.identity()
        except (EnvironmentAltered, NotInstalled) as error:
            raise self._failed(Cause.ENVIRONMENT_DIFFERS, str(error)) from error
        if installed.digest != self.bundle.engine.environment:
            detail = f"the bundle names {self.bundle.engine.environment}, installed is {installed.digest}"
            raise self._failed(Cause.ENVIRONMENT_DIFFERS, detail)
        self._installed = installed

    def _wait(
        self, condition: Callable[[], bool], deadline: float, is_wanted: Callable[[], bool], missing: str
    ) -> None:
        told = 0.0
        while not condition():
            self.fail_when_ended()
            if time.monotonic() - told >= (_FETCHED_SECONDS if self._launcher.runs_images else _PROGRESS_SECONDS):
                told = time.monotonic()
                self._tell_progress()
            if not is_wanted():
                raise NotWanted(f"no longer wanted while {missing}")
            if time.monotonic() >= deadline:
                waits = self._process_state().reason
                raise self._failed(Cause.TIMEOUT, missing if waits is None else f"{missing}: {waits}")
            time.sleep(ASK_SECONDS if self._launcher.runs_images else POLL_SECONDS)
        self._tell_progress()

    def _tell_progress(self) -> None:
        if self.launched is not None and (self.driver.progress_patterns or self.driver.compile_pattern):
            self._launcher.keep(self.launched, self.log_path)
        if (percent := self._load.percent()) is not None:
            self._on_progress(f"loading: {percent} %")

    # -------------------------------------------------------------------------------------------- watching

    @property
    def command(self) -> Command | None:
        """What it was started with; None before."""
        return self._command

    @property
    def address(self) -> str:
        """Host and port that the engine listens on."""
        if self.launched is None or self.launched.port is None:
            raise RuntimeError("the engine does not listen")
        return f"{self.launched.host or self._launch.host}:{self.launched.port}"

    @property
    def base_url(self) -> str:
        """URL of the engine."""
        return f"http://{self.address}"

    def process_id(self) -> int | None:
        """Return the engine's pid, or None when the process has ended."""
        state = self._process_state()
        return self.launched.pid if self.launched and state.condition is Condition.RUNNING else None

    def was_killed(self) -> bool:
        """Tell whether the process was ended by a SIGKILL that was not ours, as when memory runs out."""
        return self._process_state().code == -9 and not self._is_stopping

    def identity(self) -> EngineIdentity:
        """Return what really booted, as the engine tells it. Raises EngineFailed when it does not."""
        try:
            response = httpx.get(
                self.base_url + self.dialect.models_path, timeout=10.0, trust_env=False, verify=NO_AUTHORITY
            )
            models = self.dialect.read_models(response.json())
        except (httpx.HTTPError, Malformed, ValueError) as error:
            self.fail_when_ended()
            raise self._failed(Cause.NO_ANSWER, f"{self.dialect.models_path}: {error}") from error
        served = [model for model in models if model.id == self.bundle.serving.served_name]
        contexts = [model.context_tokens for model in served if model.context_tokens is not None]
        return EngineIdentity(
            name=self.bundle.engine.name,
            version=self.bundle.engine.version,
            environment=self.bundle.engine.environment,
            basis=None if self.driver.admits is None else "reported",
            arguments=[] if self._command is None else list(self._command.argv),
            model_ids=[model.id for model in models],
            context_tokens=min(contexts, default=0),
        )

    def probe(self, timeout_seconds: float = 10.0) -> Probe:
        """Ask for a real completion, since health routes of a dead engine may still answer.

        A process that has ended makes the replica failed; an answer that does not come leaves that to the caller,
        who knows how often it failed. No answer in time from an engine that decodes for others is `is_busy`.
        """
        with suppress(OSError):  # a full disk says nothing of the engine
            trim(self.log_path)
        started = time.monotonic()
        patience_seconds = min(2.0, timeout_seconds)
        before = self.progress(patience_seconds)
        answer = self.ask(timeout_seconds, max_tokens=PROBE_TOKENS)
        latency_ms = (time.monotonic() - started) * 1000
        if answer.finish_reason in FINISHED:
            return Probe(is_alive=True, is_busy=False, detail="answered", latency_ms=latency_ms)
        state = self._process_state(_ENDING_SECONDS if answer.outcome in _HUNG_UP else 0.0)
        if state.condition is Condition.EXITED:
            with self._lock:
                if not self._is_stopping and self.state not in {ReplicaState.FAILED, ReplicaState.STOPPED}:
                    self._failed(self._exit_cause(state), f"the engine {state}")
            return Probe(is_alive=False, is_busy=False, detail=f"the engine {state}", latency_ms=latency_ms)
        after = self.progress(patience_seconds)
        is_busy = answer.outcome is Outcome.TIMEOUT and before is not None and after is not None and after > before
        detail = f"{answer.outcome}: {answer.detail}"
        return Probe(is_alive=is_busy, is_busy=is_busy, detail=detail, latency_ms=latency_ms)

    def fail(self, cause: Cause, detail: str) -> EngineFailed:
        """End an engine that runs but is of no use any more, and return the problem to raise."""
        return self._failed(cause, detail)

    def fail_when_ended(self) -> None:
        """Return while the engine's process runs. Raises EngineFailed, or NotWanted where it was asked to stop."""
        state = self._process_state()
        if state.condition is not Condition.EXITED:
            return  # Who cannot be asked for a moment, such as a cluster's API, has not ended it.
        if self._is_stopping:
            raise NotWanted("it was stopped while it was awaited")
        raise self._failed(self._exit_cause(state), f"the engine {state}")

    def lost_rank(self) -> Member | None:
        """Return a process that the engine cannot do without and that ended unasked, while the engine's own runs on."""
        return None if self._is_stopping else lost(self.ranks)

    def ran_short_of_memory(self) -> bool:
        """Tell whether the kernel has killed something of this control group for lack of memory since the start."""
        kills = memory_kills(os.getpid()) if self._memory_kills is not None else None
        return kills is not None and self._memory_kills is not None and kills > self._memory_kills

    def crash(self, detail: str) -> None:
        """Kill the engine without any warning, as a crash would, and return when it is gone."""
        if self.launched is not None:
            self._launcher.crash(self.launched)
        self._failed(Cause.KILLED, detail)

    def peak_memory_bytes(self) -> int | None:
        """Return the highest resident set of the engine's process in bytes; None when it has ended."""
        if self.launched is None:
            return None
        try:
            status = (PROC / str(self.launched.pid) / "status").read_text(encoding="utf-8", errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            return None
        found = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
        return int(found[1]) * 1024 if found else None

    def report(self, cause: str) -> ReplicaReport:
        """Return the present state for the service; with the last log lines after a failure."""
        launched = self.launched
        return ReplicaReport(
            state=self.state,
            cause=cause[:4096],
            failure=self.failure if self.state is ReplicaState.FAILED else None,
            address=self.address if launched and launched.port else None,
            pid=launched.pid if launched else None,
            start_time=launched.start_time if launched else None,
            boot_id=launched.boot_id if launched else None,
            log_tail=self._log(_LOG_LINES) if self.state is ReplicaState.FAILED else None,
        )

    # -------------------------------------------------------------------------------------------- stopping

    def stop(self, *, grace_seconds: float = 35.0) -> ProcessState:
        """Let running requests end, then end the engine and all its processes. Harmless when it has ended.

        Args:
            grace_seconds: after so long everything is killed. More than the launch's `drain_seconds`.
        """
        with self._lock:
            self._is_stopping = True
            self._launcher.leave(self.workdir)
            if self.launched is None:
                if self.state is ReplicaState.STAGED:
                    self._move(ReplicaState.STOPPED, "never started")
                return ProcessState(Condition.EXITED)
            if ReplicaState.DRAINING in NEXT[self.state]:
                self._move(ReplicaState.DRAINING, f"at most {grace_seconds:g} s")
        state = self._launcher.stop(self.launched, grace_seconds=grace_seconds)
        self._end_strays()
        with self._lock:
            if ReplicaState.STOPPED in NEXT[self.state]:
                self._move(ReplicaState.STOPPED, f"the engine {state}")
        return state

    # -------------------------------------------------------------------------------------------- plumbing

    def _move(self, state: ReplicaState, cause: str) -> None:
        with self._lock:
            if self._is_stopping and state in {ReplicaState.WARMING, ReplicaState.READY}:
                raise NotWanted("it was stopped while it was awaited")
            if state not in NEXT[self.state]:
                raise RuntimeError(f"a replica that is {self.state} cannot become {state}")
            self.state = state
        self._on_transition(state, cause)

    def _failed(self, cause: Cause, detail: str, findings: Sequence[Finding] = ()) -> EngineFailed:
        """End what runs, move to failed, and return the problem to raise."""
        with self._lock:
            self._launcher.leave(self.workdir)
            if self.launched is not None:
                self._launcher.kill(self.launched)
            # Also of what was never heard of: an order may have been carried out whose answer was lost.
            self._end_strays()
            log_tail = self._log(_LOG_LINES)
            if ReplicaState.FAILED in NEXT[self.state]:
                self.failure = cause
                self._move(ReplicaState.FAILED, f"{cause}: {detail}")
        told = [one.model_dump(mode="json", exclude_none=True) for one in findings]
        more = {"findings": told} if told else {}
        return EngineFailed(f"{cause}: {detail}", cause=str(cause), log_tail=log_tail, **more)

    def _end_strays(self) -> None:
        """End what the engine started in sessions of their own: it would hold memory, an accelerator or a port."""
        for stray in self._launcher.strays(self.workdir):
            self._launcher.kill(stray)

    def _log(self, lines: int) -> list[str]:
        return self._launcher.logs(self.launched, self.log_path, lines)

    def _process_state(self, patience_seconds: float = 0.0) -> ProcessState:
        if self.launched is None:
            return ProcessState(Condition.UNKNOWN)
        ends = time.monotonic() + patience_seconds
        while (state := self._launcher.state(self.launched)).condition is Condition.RUNNING and time.monotonic() < ends:
            time.sleep(POLL_SECONDS)
        return state

    def _exit_cause(self, state: ProcessState) -> Cause:
        is_ready = self.state not in {ReplicaState.LOADING, ReplicaState.WARMING}
        log = self._log(_CLASSIFIED_LINES_ONCE_READY if is_ready else _CLASSIFIED_LINES)
        short = self.ran_short_of_memory()
        cause = classify(state, log, self.driver.failure_patterns, was_short_of_memory=short)
        # Who finds no room cannot write that either.
        return Cause.DISK_FULL if cause in {Cause.EXITED, Cause.CRASHED} and is_full(self.workdir) else cause

    def _is_listening(self) -> bool:
        if self.launched is None or self._command is None:
            raise RuntimeError("start or adopt the replica first")
        self.launched = self._launcher.listening(self.launched, self._command.port_file)
        return self.launched.port is not None

    def _is_healthy(self) -> bool:
        try:
            url = self.base_url + self.dialect.health_path
            return httpx.get(url, timeout=5.0, trust_env=False, verify=NO_AUTHORITY).status_code == 200
        except httpx.HTTPError:
            return False

    def _elapsed_ms(self) -> int | None:
        return None if self._started is None else round((time.monotonic() - self._started) * 1000)

    def progress(self, timeout_seconds: float) -> float | None:
        """Return the engine's counter that moves while it works for anybody; None when it cannot be read in time."""
        try:
            url = self.base_url + self.dialect.metrics_path
            page = httpx.get(url, timeout=timeout_seconds, trust_env=False, verify=NO_AUTHORITY).text
            return parse_metrics(page).get(self.dialect.metrics.progress or "")
        except (httpx.HTTPError, Malformed):
            return None

    def ask(self, timeout_seconds: float, *, max_tokens: int = 1) -> Answer:
        """Ask for a real completion, at most so long."""
        model = self.bundle.serving.served_name
        if Feature.CHAT in self.bundle.serving.features:
            messages: list[Mapping[str, object]] = [{"role": "user", "content": PROBE_TEXT}]
            request = self.dialect.chat(model, messages, max_tokens=max_tokens)
        else:
            request = self.dialect.completion(model, PROBE_TEXT, max_tokens=max_tokens)
        return self._post(request, timeout_seconds)

    def _post(self, request: Request, timeout_seconds: float) -> Answer:
        try:
            url = self.base_url + request.path
            response = httpx.post(url, json=request.body, timeout=timeout_seconds, trust_env=False, verify=NO_AUTHORITY)
        except httpx.TimeoutException:
            return Answer(Outcome.TIMEOUT, f"no answer after {timeout_seconds:g} s")
        except httpx.HTTPError as error:
            return Answer(Outcome.CONNECT, str(error) or type(error).__name__)
        if response.status_code != 200:
            outcome = Outcome.HTTP_5XX if response.status_code >= 500 else Outcome.HTTP_4XX
            return Answer(outcome, f"{response.status_code}: {response.text[:300]}")
        return read_plain(self.dialect, response.content, time.perf_counter_ns())
