"""A replica's whole life through a container engine and a cluster: what they answer is scripted, the engine is real."""

import asyncio
import threading
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

from gates.dialects.llamacpp import LLAMACPP as DIALECT
from gates.endpoint import Endpoint
from schemas.problems import EngineFailed
from schemas.runner import Agreement, ReplicaState
from tests.support import chain
from tests.support.folder_bundles import bundle as folder_bundle
from tests.support.grounds import IMAGE, STAGED, ContainerGround, chain_in_image, container_ground, kube_ground
from tests.support.scripted_kube import ScriptedKube
from workers.launchers.base import Order
from workers.launchers.process import Condition
from workers.serving import NotWanted, Replica
from workers.vitals import Watcher

S = ReplicaState
JOB = "0197a1b2-0000-7000-8000-000000000001"
BOOT_SECONDS = 60.0
GROUNDS = ["podman", "docker", "kubernetes"]
"""podman's containers have no network here, docker's one whose port is published."""


@pytest.fixture
def ground(tmp_path, request):
    data = tmp_path / "data"
    data.mkdir()
    if request.param == "kubernetes":
        with ScriptedKube() as kube:
            made = kube_ground(kube, tmp_path / "node", data)
            yield made
            made.end()
    else:
        network = {"docker": {"network": "bridge"}}.get(request.param, {})
        made = container_ground(tmp_path / "bin", data, request.param, **network)
        yield made
        made.end()


@contextmanager
def silence(ground):
    """Let nobody say what runs."""
    if isinstance(ground, ContainerGround):
        ground.engine.set(unreachable="Cannot connect to the Docker daemon")
        yield
        ground.engine.set(unreachable="")
    else:
        ground.kube.refusal = (503, "ServiceUnavailable", "etcdserver: leader changed")
        yield
        ground.kube.refusal = None


class Life:
    """One replica of CHAIN, with what it reported."""

    def __init__(self, ground, data, **faults):
        self.root = data / STAGED
        self.workdir = data / "engines" / JOB
        self.bundle = chain_in_image(self.root, **faults)
        self.ground, self.transitions = ground, []
        self.replica = self.another()

    def another(self, launcher=None):
        """Return a replica as a runner that has just started would make it."""
        launcher = launcher or self.ground.launcher()
        order = Order(self.bundle, self.root, job=JOB, fencing_token=7)
        return Replica(
            self.bundle,
            launcher.place(order, self.workdir, drain_seconds=20.0, parent_pid=1),
            workdir=self.workdir,
            launcher=launcher,
            order=order,
            on_transition=lambda state, cause: self.transitions.append((state, cause)),
        )

    @property
    def states(self):
        return [state for state, _ in self.transitions]

    def boot(self):
        self.replica.start()
        return self.replica.wait_ready(BOOT_SECONDS)

    def failure(self):
        with pytest.raises(EngineFailed) as caught:
            self.boot()
        assert self.states[-1] is S.FAILED
        assert self.replica.process_id() is None
        return caught.value


@pytest.fixture
def life(ground, tmp_path):
    return lambda **faults: Life(ground, tmp_path / "data", **faults)


def is_apart(pid):
    """Tell whether a process has another network than this one."""
    return pid > 0 and Path(f"/proc/{pid}/ns/net").readlink() != Path("/proc/self/ns/net").readlink()


def interfaces(pid):
    """Return the network interfaces that a process has."""
    lines = Path(f"/proc/{pid}/net/dev").read_text(encoding="ascii").splitlines()[2:]
    return [line.partition(":")[0].strip() for line in lines]


async def stream_while(replica, then):
    """Return the answer of a long stream during which something is done, once it has begun."""
    async with Endpoint(replica.base_url, "chain", DIALECT) as endpoint:
        asked = asyncio.create_task(endpoint.chat(chain.PROMPT, max_tokens=300, template_arguments={"sel": "E"}))
        while (await endpoint.metrics())[DIALECT.metrics.running] < 1 and not asked.done():  # noqa: ASYNC110 - a test waits
            await asyncio.sleep(0.005)
        doing = threading.Thread(target=then)
        doing.start()
        answer = await asked
    await asyncio.to_thread(doing.join)
    return answer


@pytest.mark.parametrize("ground", ["podman", "kubernetes"], indirect=True)
def test_a_replica_is_loaded_warmed_ready_taken_over_drained_and_stopped(life, ground, tmp_path):
    one = life()
    launched = one.replica.start()
    ready = one.replica.wait_ready(BOOT_SECONDS)
    assert ready.identity.model_ids == ["chain"]
    assert ready.findings == ()
    compared = {row.item: row.outcome for row in ready.compared}
    assert [compared[item] for item in ("arguments", "image", "variables", "confinement")] == [Agreement.EQUAL] * 4
    assert ready.address == one.replica.report("ready").address
    with urllib.request.urlopen(f"{one.replica.base_url}{DIALECT.health_path}", timeout=10) as health:
        assert health.status == 200
    if is_apart(launched.pid):
        # Where the kernel lets this account make a network: the engine's has a loopback and nothing else.
        assert interfaces(launched.pid) == ["lo"]
    if launched.pid == 0:
        # A pod is closed by a policy that goes with it.
        assert sorted(kind for kind, _ in ground.kube.objects) == ["networkpolicies", "pods"]
    with silence(ground):
        # Whoever runs it cannot be asked for a moment, and it serves on.
        one.replica.fail_when_ended()
        assert Watcher(one.replica).look() is None
        assert one.replica.probe().is_alive
    # Another runner, after this one was lost, takes up the very same.
    other = one.another()
    assert not one.another().adopt(launched.pid, "another start", launched.boot_id, None, launched.handle)
    assert other.adopt(launched.pid, launched.start_time, launched.boot_id, None, launched.handle)
    assert other.wait_ready(BOOT_SECONDS).address == ready.address
    # It lets a stream end that runs, and then ends itself.
    ended = []
    answer = asyncio.run(stream_while(other, lambda: ended.append(other.stop(grace_seconds=30.0))))
    assert (answer.finish_reason, answer.usage.completion_tokens) == ("length", 300)
    assert (ended[0].condition, other.state) == (Condition.EXITED, S.STOPPED)
    assert [state for state in one.states if state in {S.DRAINING, S.STOPPED}] == [S.DRAINING, S.STOPPED]
    assert one.states[:3] == [S.LOADING, S.WARMING, S.READY]
    assert ground.left() == []
    assert ground.launcher().strays(one.workdir) == []


@pytest.mark.parametrize(
    ("ground", "fate", "said"),
    [
        ("podman", "killed", "the engine ended by signal 9"),
        ("docker", "out_of_memory", "the engine ended by signal 9 (out of its memory limit)"),
        ("kubernetes", "out_of_memory", "the engine ended by signal 9 (out of its memory limit)"),
        ("kubernetes", "evicted", "the engine exited (Evicted: The node was low on resource: memory."),
    ],
    indirect=["ground"],
)
def test_an_engine_that_is_ended_from_outside_is_found_by_the_next_probe_with_the_cause(life, ground, fate, said):
    one = life()
    launched = one.replica.start()
    one.replica.wait_ready(BOOT_SECONDS)
    assert one.replica.probe().is_alive
    ground.meet(launched, fate)
    probe = one.replica.probe()
    assert (probe.is_alive, one.states[-1]) == (False, S.FAILED)
    assert one.transitions[-1][1].startswith(f"{fate}: {said}")
    assert one.replica.report("gone").failure == fate
    assert ground.left() == []


@pytest.mark.parametrize("ground", GROUNDS, indirect=True)
def test_an_image_that_cannot_be_had_is_the_cause(life, ground):
    one = life()
    ground.lose_image()
    problem = one.failure()
    assert problem.members["cause"] == "image_unavailable"
    assert IMAGE in problem.detail
    assert one.states[-1] is S.FAILED
    assert ground.left() == []


@pytest.mark.parametrize("ground", ["docker", "kubernetes"], indirect=True)
def test_what_the_engine_wrote_says_why_it_ended_by_itself(life, ground):
    problem = life(truncated_bytes=900_000).failure()
    assert problem.members["cause"] == "weights_unreadable"
    assert any("not within the file bounds" in line for line in problem.members["log_tail"])
    assert ground.left() == []


@pytest.mark.parametrize("ground", GROUNDS, indirect=True)
def test_an_order_whose_answer_is_lost_leaves_no_engine(life, ground):
    one = life()
    ground.lose_answer()
    problem = one.failure()
    assert problem.members["cause"] == "not_started"
    assert one.states == [S.FAILED]
    assert ground.left() == []


@pytest.mark.parametrize("ground", ["docker", "kubernetes"], indirect=True)
def test_how_far_an_engine_has_loaded_is_told_as_its_log_tells_it(ground, tmp_path):
    bundle = folder_bundle("sglang", hardware={"accelerator": "cpu", "count": 0})
    order = Order(bundle, tmp_path / "data" / "staged", job=JOB, fencing_token=7)
    launcher, workdir, told = ground.launcher(), tmp_path / "data" / "engines" / JOB, []
    launch = launcher.place(order, workdir, drain_seconds=1.0, parent_pid=1)
    replica = Replica(bundle, launch, workdir=workdir, launcher=launcher, order=order, on_progress=told.append)
    ground.write(
        "Loading safetensors checkpoint shards:  40% Completed | 2/5\rLoading safetensors checkpoint shards:  60%\n"
    )
    replica.start()
    with pytest.raises(NotWanted):
        replica.wait_ready(BOOT_SECONDS, is_wanted=lambda: not told)
    replica.stop(grace_seconds=0.0)
    assert told == ["loading: 60 %"]


@pytest.mark.parametrize("ground", ["kubernetes"], indirect=True)
def test_a_pod_that_a_webhook_changed_does_not_get_ready_and_says_in_what(life, ground):
    def admission(body):
        body["spec"]["containers"][0]["env"][:] = [
            {**one, "value": "/elsewhere"} if one["name"] == "XDG_CACHE_HOME" else one
            for one in body["spec"]["containers"][0]["env"]
        ]

    ground.kube.admission = admission
    problem = life().failure()
    assert problem.members["cause"] == "identity_differs"
    (finding,) = problem.members["findings"]
    told = (finding["code"], finding["found"], finding["expected"])
    assert told == ("variables-differ", "env.XDG_CACHE_HOME /elsewhere", "env.XDG_CACHE_HOME /tmp/.cache")
    assert ground.left() == []


@pytest.mark.parametrize("ground", ["kubernetes"], indirect=True)
def test_a_replica_that_is_not_ready_in_time_says_what_its_pod_waits_for(life, ground):
    ground.kube.node = None
    one = life()
    launched = one.replica.start()
    message = "0/5 nodes are available: 5 Insufficient memory."
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    ground.kube.become(launched.handle.split("/")[2], phase="Pending", conditions=[condition])
    ground.kube.created_now(launched.handle.split("/")[2])
    with pytest.raises(EngineFailed, match=f"timeout: it does not listen: Unschedulable: {message}"):
        one.replica.wait_ready(0.0)
    assert ground.left() == []
