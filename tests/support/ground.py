"""A whole stack on which processes are killed, releases that go over it, and what must hold whatever was killed."""

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID, uuid4

from gates.router import CANDIDATE
from registry.client import Client
from schemas.api import ReleaseCreate, TargetCreate
from schemas.evidence import Kind
from schemas.policy import Policy
from schemas.problems import Unavailable
from schemas.release import Phase, ReleaseDetail, Target
from tests.support import chain, factories, fall
from tests.support.embedded import Stack
from tests.support.gateway import ask_many
from tests.support.runners import is_running
from workers.engines.llamacpp import LLAMACPP
from workers.launchers.process import Launched, strays
from workers.traffic.envoy import EnvoyGateway

TARGET = "chat@prod"
LEASES = {"SLUICEGATE_LEASE_SECONDS": "3", "SLUICEGATE_RELEASE_LEASE_SECONDS": "3"}
CANARY: dict[str, Any] = {
    "steps": [
        {"weight_bp": weight, "hold_seconds": "0.2", "min_requests": 29, "max_seconds": "120"}
        for weight in (5000, 10_000)
    ],
    "stop_conditions": [{"metric": "error_ratio", "max_ratio": "0.1"}],
    "soak_seconds": "1",
    "dead_man_seconds": "60",
    "drain_seconds": "2",
}
SETTLED_SECONDS = 90.0

T = TypeVar("T")


def until(condition: Callable[[], Any], *, seconds: float, what: str) -> Any:
    """Wait until something is true, and return it. A service that is away meanwhile is not."""
    ends = time.monotonic() + seconds
    while True:
        try:
            if found := condition():
                return found
        except Unavailable:
            pass
        if time.monotonic() > ends:
            raise AssertionError(f"{what} did not happen within {seconds:g} s")
        time.sleep(0.05)


class Ground:
    """A stack with a target, a policy, and traffic; whatever is killed, its client waits for it."""

    def __init__(self, home: Path) -> None:
        """Start the stack; `prepare` waits for it."""
        self.home = home
        self.armed = home / "armed"
        self.stack = self._start()
        self.policy = ""
        self.target = TARGET

    def _start(self) -> Stack:
        module = ("tests.support.fall", str(self.armed), "stack")
        return Stack(self.home / "data", "--drain-seconds", "2", module=module, settings=LEASES)

    def prepare(self) -> None:
        """Wait for the stack, make a target and a policy, and take a first bundle live."""
        self.stack.wait_ready()
        self.client = Client(self.stack.facts["url"], self.stack.facts["token"], timeout_seconds=10)
        self.client.targets.create(TargetCreate(name=TARGET, runner_class="cpu", gateway="local"))
        body = Policy.model_validate(factories.policy_body("faults", canary=CANARY))
        self.policy = self.client.policies.create(body.canonical()).digest
        first = self.release()
        with self.traffic():
            self.until_phase(first, Phase.PROMOTED)
        self.settle()

    def restart(self) -> None:
        """Kill the supervisor alone, and start the stack on the same data again."""
        self.stack.kill()
        self.stack = self._start()
        self.stack.wait_ready()

    # ------------------------------------------------------------------------------------------- releases

    def patiently(self, call: Callable[[], T], *, seconds: float = 60.0) -> T:
        """Ask until the service answers, as a pipeline does that is started again."""
        ends = time.monotonic() + seconds
        while True:
            try:
                return call()
            except Unavailable:
                if time.monotonic() > ends:
                    raise
                time.sleep(0.1)

    def bundle(self) -> str:
        """Register a bundle that nobody has seen before."""
        name = f"b{uuid4().hex[:8]}"
        directory = chain.write_bundle_directory(
            self.home / "bundles" / name, template=chain.TEMPLATE + f"{{# {name} #}}"
        )
        environment, arguments = LLAMACPP.identity().digest, ["--threads", "1"]
        bundle = chain.describe(directory, environment=environment, arguments=arguments)
        for file in bundle.files:
            self.patiently(lambda file=file: self.client.blobs.upload(file.sha256, directory / file.path))  # type: ignore[misc]
        return self.patiently(lambda: self.client.bundles.create(bundle)).digest

    def release(self, bundle: str | None = None, policy: str | None = None) -> UUID:
        """Start a release of a new bundle, once, however often that has to be asked."""
        digest, key = bundle or self.bundle(), uuid4().hex
        body = ReleaseCreate(target=TARGET, bundle=digest, policy=policy or self.policy)
        return self.patiently(lambda: self.client.releases.create(body, key=key)).id

    def show(self, release: UUID) -> ReleaseDetail:
        """Return a release as it is."""
        return self.patiently(lambda: self.client.releases.get(release))

    def showing(self) -> Target:
        """Return the target as it is."""
        return self.patiently(lambda: self.client.targets.get(TARGET))

    def until_phase(self, release: UUID, *phases: Phase, seconds: float = 120.0) -> ReleaseDetail:
        """Wait until a release is in one of these phases."""
        try:
            until(lambda: self.client.releases.get(release).phase in phases, seconds=seconds, what=f"{phases}")
        except AssertionError as late:
            shown = self.show(release)
            told = [f"{entry.kind} {entry.act}" for entry in shown.log][-12:]
            raise AssertionError(f"{late}: it is {shown.phase}, {shown.held}, {shown.waits}, {told}") from None
        return self.show(release)

    def roll_back(self, release: UUID) -> None:
        """Ask for the way back, once, however often that has to be asked."""
        self.patiently(lambda: self.client.releases.roll_back(release, "a test"))

    @contextmanager
    def traffic(self) -> Iterator[Counter[int]]:
        """Ask for streams all the time; yields the statuses so far. A gateway that is away is asked again."""
        statuses: Counter[int] = Counter()
        ends = threading.Event()
        url = f"{self.stack.facts['gateway_url']}/{TARGET}/v1/chat/completions"

        def ask() -> None:
            while not ends.is_set():
                statuses.update(ask_many(url, 4, concurrency=2).statuses)
                ends.wait(0.1)

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        try:
            yield statuses
        finally:
            ends.set()
            thread.join(30)

    # ------------------------------------------------------------------------------------------- processes

    def parts(self) -> dict[str, int]:
        """Return the process ids of the parts that run now."""
        try:
            return self.stack.running()
        except (FileNotFoundError, ValueError):
            return {}

    def kill(self, part: str) -> int:
        """Kill a part, as the kernel does when memory runs out. Returns which process it was."""
        pid = int(until(lambda: self.parts().get(part), seconds=30, what=f"a running {part}"))
        os.kill(pid, signal.SIGKILL)
        return pid

    def engines(self, purpose: str) -> dict[str, list[Launched]]:
        """Return the processes of engines by job; `replicas` are those that serve, `engines` those of gates."""
        folders = sorted((self.home / "data" / "runner" / purpose).glob("*/"))
        found = {folder.name: strays(folder) for folder in folders}
        return {name: processes for name, processes in found.items() if processes}

    def gateway(self) -> EnvoyGateway:
        """Return the gateway, to read what it should do."""
        return EnvoyGateway(self.home / "data" / "gateway", port=1)

    def weights(self) -> dict[str, int]:
        """Return bundle → weight in force, by the first digits of its digest; nothing without weight."""
        split = self.gateway().desired(TARGET)
        return {arm.cluster.split("/")[1]: arm.weight_bp for arm in split.arms if arm.weight_bp} if split else {}

    def settle(self) -> None:
        """Wait until nothing moves: one bundle is live, alone and answering, and no engine but its own runs."""

        def is_settled() -> bool:
            target = self.client.targets.get(TARGET)
            split = self.gateway().desired(TARGET)
            if split is None or split.arm(CANDIDATE) is not None or target.stable_bundle is None:
                return False
            is_alone = self.weights() == {target.stable_bundle[7:19]: 10_000}
            engines = self.engines("replicas")
            is_one = len(engines) == 1 and all(len(processes) == 1 for processes in engines.values())
            ready = [one for one in target.replicas if one.state == "ready" and str(one.job) in engines]
            is_told = {arm.bundle: arm.weight_bp for arm in target.applied if arm.weight_bp} == {
                target.stable_bundle: 10_000
            }
            url = f"{self.stack.facts['gateway_url']}/{TARGET}/v1/chat/completions"
            return (
                is_alone and is_one and is_told and len(ready) == 1 and not self.engines("engines")
                and ask_many(url, 2).whole == 2
            )  # fmt: skip

        try:
            until(is_settled, seconds=SETTLED_SECONDS, what="that nothing moves")
        except AssertionError as late:
            target = self.showing()
            replicas = [(one.state, one.bundle[7:19], one.cause) for one in target.replicas[:4]]
            raise AssertionError(
                f"{late}: live {target.stable_bundle}, weights {self.weights()}, recorded {target.applied}, "
                f"replicas {replicas}, engines {self.engines('replicas')} {self.engines('engines')}"
            ) from None

    def orphans(self) -> list[str]:
        """Return processes of the stack that nobody owns: neither the supervisor, nor the runner's own file."""
        mark = f"XDG_RUNTIME_DIR={self.home}".encode()
        owned = {self.stack.process.pid, *(one.pid for found in self.engines("replicas").values() for one in found)}
        lost = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) in owned:
                continue
            try:
                environment, line = (entry / "environ").read_bytes(), (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if mark in environment and not owned & set(ancestors(int(entry.name))) and is_running(int(entry.name)):
                lost.append(f"{entry.name} {line.replace(bytes(1), b' ').decode(errors='replace')[:200]}")
        return lost

    # --------------------------------------------------------------------------------------- what must hold

    def assert_sound(self, *releases: UUID) -> None:
        """One result a gate, nothing doubled, nothing lost, and the log says what is in force."""
        self.settle()
        assert fall.armed(self.armed) == set(), f"nobody died at {fall.armed(self.armed)}"
        orphans = self.orphans()
        assert orphans == [], orphans
        for release in releases:
            assert_once(self.show(release))
        found = self.patiently(self.client.evidence.verify)
        assert found.verified, found.faults
        target = self.showing()
        last = next(one for one in self.patiently(lambda: list(self.client.targets.history(TARGET))) if one.split)
        told = {arm.bundle[7:19]: arm.weight_bp for arm in last.split or [] if arm.weight_bp}
        live = {str(target.stable_bundle)[7:19]: 10_000}
        assert self.weights() == told == live, f"in force {self.weights()}, in the log {told}, live {live}"

    def close(self) -> None:
        """Stop the stack."""
        self.client.close()
        self.stack.stop()


ONCE = (
    Kind.CREATED,
    Kind.GATES_PASSED,
    Kind.APPROVED,
    Kind.PROMOTED,
    Kind.TRAFFIC_RESTORED,
    Kind.REPLACED,
)


def assert_once(release: ReleaseDetail) -> None:
    """Each gate has one result, and each thing that happens once in a release is in its log once."""
    gates = Counter(entry.body["gate"] for entry in release.log if entry.kind is Kind.GATE_RECORDED)
    assert set(gates.values()) <= {1}, gates
    kinds = Counter(entry.kind for entry in release.log)
    assert not [kind for kind in ONCE if kinds[kind] > 1], kinds
    acts = Counter(entry.act for entry in release.log)
    assert max(acts.values()) == 1
    assert [entry.position for entry in release.log] == list(range(1, len(release.log) + 1))


def ancestors(pid: int) -> Iterator[int]:
    """Yield the parent of a process, its parent, and so on."""
    while pid > 1:
        try:
            text = Path(f"/proc/{pid}/stat").read_text("utf-8", errors="replace")
        except OSError:
            return
        pid = int(text[text.rindex(")") + 2 :].split()[1])
        yield pid


@contextmanager
def ground(home: Path) -> Iterator[Ground]:
    """Run a stack to kill on; in the end nothing of it is left."""
    made = Ground(home)
    try:
        made.prepare()
        yield made
    finally:
        made.close()
