"""What a runner finds of the launchers that it was set to before, and what it says when it cannot look."""

from uuid import uuid4

import pytest

from registry.settings import RunnerSettings
from schemas.bundle import Bundle
from tests.support.factories import bundle_body
from tests.support.scripted_containers import ScriptedContainers
from workers.engines.base import Command
from workers.launchers import earlier
from workers.launchers.base import Condition, NotTold, Order
from workers.launchers.choice import launcher_of
from workers.launchers.earlier import Unreachable, Way
from workers.launchers.process import ProcessLauncher
from workers.live import Left

IMAGE = "registry.example/engine@sha256:" + "a" * 64
DIGEST = "sha256:" + "a" * 64


@pytest.fixture
def engine(tmp_path):
    (tmp_path / "bin").mkdir()
    made = ScriptedContainers(tmp_path / "bin")
    made.set(images=[IMAGE])
    return made


@pytest.fixture
def settings(tmp_path, engine):
    def made(launcher, **changes):
        given = {"name": "r1", "runner_class": "cpu", "api_url": "http://127.0.0.1:1", "token": "t"}
        given |= {"container_program": str(engine.path), "container_network": "engines", "launcher": launcher}
        return RunnerSettings(**given | changes, broker_url="redis://127.0.0.1:1", data_dir=tmp_path)

    return made


@pytest.fixture
def started(settings, tmp_path):
    """Return what a runner that starts containers has started."""

    def start():
        told = settings("container")
        earlier.others(told, [])
        body = bundle_body(engine={"name": "llamacpp", "version": "test", "image": IMAGE, "arguments": []})
        workdir = tmp_path / "replicas" / str(uuid4())
        workdir.mkdir(parents=True)
        order = Order(Bundle.model_validate(body), tmp_path / "staged", job=workdir.name, fencing_token=1)
        return launcher_of(told).start(Command(("engine",)), workdir=workdir, log_path=workdir / "log", order=order)

    return start


def left(launched):
    claim = {
        "job": str(uuid4()), "kind": "serve", "fencing_token": 1, "lease_seconds": 30, "release": None, "target": None,
        "bundle": DIGEST, "policy": None, "suites": [], "references": {}, "gates": [], "attempt": 1, "replica": None,
    }  # fmt: skip
    identity = {"pid": launched.pid, "start_time": launched.start_time, "boot_id": launched.boot_id}
    told = {"claim": claim, "bundle": DIGEST, "handle": launched.handle, "drain_seconds": 1.0}
    return Left.model_validate(told | identity)


def test_what_was_started_as_containers_is_known_to_a_runner_that_starts_processes_until_it_is_gone(settings, started):
    launched, told = started(), settings("process")
    ways = earlier.others(told, [])
    launchers = earlier.all_of(launcher_of(told), ways.values())
    assert [one.name for one in launchers] == ["process", "container"]
    owner = left(launched).launcher_among(launchers)
    assert owner is launchers[1]
    assert owner.state(launched).condition is Condition.RUNNING
    assert earlier.others(told, []).keys() == ways.keys()
    owner.kill(launched)
    assert earlier.others(told, []) == {}
    assert earlier.kept(told.data_dir) == []


def test_what_was_started_by_another_container_engine_is_known_too(settings, started, engine, tmp_path):
    launched = started()
    other = ScriptedContainers(tmp_path, "docker")
    told = settings("container", container_program=str(other.path))
    (way,) = ways = earlier.others(told, [])
    assert way.container_program != told.container_program
    assert left(launched).launcher_among(earlier.all_of(launcher_of(told), ways.values())) is ways[way]
    assert len(earlier.kept(told.data_dir)) == 2
    # While the one does not answer, nobody can say that it is the other's.
    launchers = earlier.all_of(launcher_of(told), ways.values())
    other.set(unreachable="Cannot connect to the Docker daemon")
    assert left(launched).launcher_among(launchers) is ways[way]
    engine.set(unreachable="Cannot connect to the podman service")
    with pytest.raises(NotTold, match="Cannot connect to the podman service"):
        left(launched).launcher_among(launchers)


def test_a_replica_that_was_left_before_ways_were_kept_is_known_by_its_handle(settings, started):
    launched, told = started(), settings("process")
    (told.data_dir / earlier.FILE).unlink()
    (way,) = earlier.others(told, [launched.handle])
    assert way == Way(launcher="container", container_program=told.container_program)
    with pytest.raises(Unreachable, match=r"may still run by kubernetes \(https://kubernetes.default.svc default\)"):
        earlier.others(told, ["pods/default/sg-1/uid-1/1"])


def test_nothing_is_started_beside_what_cannot_be_found_and_it_is_said_what_to_do(settings, started, engine):
    started()
    told = settings("process")
    engine.set(unreachable="Cannot connect to the Docker daemon at unix:///var/run/docker.sock.")
    with pytest.raises(Unreachable) as refused:
        earlier.others(told, [])
    assert "Cannot connect to the Docker daemon" in str(refused.value)
    assert f"remove container from {told.data_dir / earlier.FILE}" in str(refused.value)
    assert earlier.kept(told.data_dir) != []
    (told.data_dir / earlier.FILE).write_text("[]")
    assert earlier.others(told, []) == {}


def test_a_file_that_cannot_be_read_says_nothing_of_what_runs(settings):
    told = settings("process")
    (told.data_dir / earlier.FILE).write_text('[{"launcher": "vm"}]')
    with pytest.raises(Unreachable, match="cannot be read"):
        earlier.others(told, [])


def test_processes_are_always_known(settings):
    own = launcher_of(settings("container"))
    assert isinstance(earlier.all_of(own, [])[1], ProcessLauncher)
    assert len(earlier.all_of(launcher_of(settings("process")), [])) == 1
