"""The container launcher against a program that answers as podman and docker do: no container engine runs here."""

import csv
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from schemas.bundle import Bundle
from tests.support.factories import bundle_body
from tests.support.runners import until
from tests.support.scripted_containers import ScriptedContainers
from workers.agent import end_left_engines
from workers.engines.base import Command
from workers.launchers import passage
from workers.launchers.base import Condition, LaunchFailed, Limits, NotTold, Order
from workers.launchers.container import ContainerLauncher, read_state
from workers.launchers.container_command import NO_PROXIES, Containers, run
from workers.launchers.process import boot_id
from workers.launchers.unanswered import Known

IMAGE = "registry.example/engines/vllm@sha256:" + "a" * 64
JOB = "0197a1b2-0000-7000-8000-000000000001"
COMMAND = Command(("vllm", "serve", "/bundle", "--port", "8000"), variables={"VLLM_NO_USAGE_STATS": "1"})


def bundle(**changes):
    engine = {"name": "llamacpp", "version": "test", "image": IMAGE, "arguments": []}
    return Bundle.model_validate(bundle_body(**{"engine": engine, **changes}))


def order(tmp_path, **changes):
    return replace(Order(bundle(), tmp_path / "staged", job=JOB, fencing_token=7), **changes)


@pytest.fixture(params=["podman"])
def engine(tmp_path, request):
    (tmp_path / "bin").mkdir()
    made = ScriptedContainers(tmp_path / "bin", request.param)
    made.set(images=[IMAGE])
    return made


@pytest.fixture
def containers(tmp_path):
    return Containers(runner="r1", folder=tmp_path, user="1000:1000", network="engines")


@pytest.fixture
def launcher(engine, containers):
    return ContainerLauncher(str(engine.path), containers)


@pytest.fixture
def start(launcher, tmp_path):
    def begin(launcher=launcher, **changes):
        workdir = tmp_path / "engines" / JOB
        workdir.mkdir(parents=True, exist_ok=True)
        made = order(tmp_path, **changes)
        return launcher.start(COMMAND, workdir=workdir, log_path=workdir / "engine.log", order=made)

    return begin


# -------------------------------------------------------------------------------------- the command line


def test_the_command_line_confines_the_engine_and_marks_whose_it_is(containers, tmp_path):
    workdir = tmp_path / "engines" / JOB
    made = order(tmp_path)
    assert run(containers, COMMAND, made, workdir) == [
        "run",
        "--detach",
        "--pull=never",
        f"--name=sluicegate-{JOB}-7",
        "--label=sluicegate.runner=r1",
        f"--label=sluicegate.data={tmp_path}",
        f"--label=sluicegate.folder={workdir}",
        f"--label=sluicegate.job={JOB}",
        "--label=sluicegate.token=7",
        f"--label=sluicegate.bundle={made.bundle.digest}",
        "--cap-drop=ALL",
        "--security-opt=no-new-privileges",
        "--user=1000:1000",
        "--read-only",
        "--tmpfs=/tmp:rw,exec,nosuid,nodev,mode=1777",
        "--ipc=private",
        "--restart=no",
        "--init",
        "--shm-size=1073741824",
        "--ulimit=core=1:1",
        "--pids-limit=4096",
        "--oom-score-adj=500",
        "--ulimit=nofile=65536:65536",
        "--network=engines",
        "--publish=127.0.0.1::8000/tcp",
        f"--mount=type=bind,source={tmp_path / 'staged'},target=/bundle,readonly",
        "--stop-timeout=60",
        "--stop-signal=SIGTERM",
        "--no-healthcheck",
        "--log-driver=json-file",
        "--log-opt=max-size=16777216",
        "--log-opt=max-file=5",
        *(f"--env={name}=" for name in NO_PROXIES),
        "--env=VLLM_NO_USAGE_STATS=1",
        "--env=XDG_CACHE_HOME=/tmp/.cache",
        "--env=HF_HOME=/tmp/.cache/huggingface",
        "--env=HOME=/tmp",
        "--env=TMPDIR=/tmp",
        "--env=LANG=C.UTF-8",
        "--env=USER=engine",
        "--env=NVIDIA_VISIBLE_DEVICES=void",
        "--entrypoint=vllm",
        IMAGE,
        "serve",
        "/bundle",
        "--port",
        "8000",
    ]


def test_a_proxy_of_the_runner_s_is_none_of_the_engine_s_however_it_is_written(containers, tmp_path):
    told = run(containers, COMMAND, order(tmp_path), tmp_path)
    for name in ("HTTP_PROXY", "https_proxy", "ALL_PROXY", "no_proxy"):
        assert [word for word in told if word.startswith(f"--env={name}=")] == [f"--env={name}="]


def test_a_folder_with_a_comma_in_its_name_adds_no_option_to_a_mount(containers, tmp_path):
    files = tmp_path / "a,readonly=false,b"
    told = run(containers, COMMAND, order(tmp_path, files=files), tmp_path)
    (mount,) = [word.removeprefix("--mount=") for word in told if word.startswith("--mount=")]
    assert next(csv.reader([mount])) == ["type=bind", f"source={files}", "target=/bundle", "readonly"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gpus": "cdi"}, ["--device=nvidia.com/gpu=GPU-a", "--device=nvidia.com/gpu=GPU-b"]),
        ({"gpus": "runtime"}, ['--gpus="device=GPU-a,GPU-b"']),
        ({"seccomp": Path("/etc/engine.json")}, ["--security-opt=seccomp=/etc/engine.json"]),
        ({"network": "bridge"}, ["--network=bridge", "--publish=127.0.0.1::8000/tcp"]),
        (
            {"limits": Limits(memory_bytes=2**34, files=None, processes=512)},
            ["--pids-limit=512", "--memory=17179869184b", "--memory-swap=17179869184b"],
        ),
    ],
)
def test_what_a_runner_sets_is_in_the_command_line(containers, tmp_path, changes, words):
    told = run(replace(containers, **changes), COMMAND, order(tmp_path, devices=("GPU-a", "GPU-b")), tmp_path)
    assert [word for word in told if word in words] == words


def test_without_a_network_the_only_way_in_is_a_socket_in_the_replica_s_folder(tmp_path):
    alone = Containers(runner="r1", folder=tmp_path, user="1000:1000")
    told = run(alone, COMMAND, order(tmp_path), tmp_path / "engines" / JOB)
    assert "--network=none" in told
    assert "--hostname=localhost" in told
    assert not [word for word in told if word.startswith("--publish")]
    assert [word for word in told if word.startswith("--mount")] == [
        f"--mount=type=bind,source={Path(passage.__file__).resolve()},target=/sluicegate/passage.py,readonly",
        f"--mount=type=bind,source={tmp_path}/engines/{JOB}/reach,target=/sluicegate/reach",
        f"--mount=type=bind,source={tmp_path}/staged,target=/bundle,readonly",
    ]
    assert told[told.index("--entrypoint=python3") :] == [
        *("--entrypoint=python3", IMAGE, "-I", "-S", "/sluicegate/passage.py", "inside", "/sluicegate/reach/engine"),
        *("8000", *COMMAND.argv),
    ]


@pytest.mark.parametrize(
    ("gpus", "devices", "visible"),
    [
        ("cdi", (), "void"),
        ("runtime", (), "void"),
        # By CDI they come from another place than NVIDIA's runtime, which is then to give none beside.
        ("cdi", ("GPU-a", "GPU-b"), "void"),
        ("runtime", ("GPU-a", "GPU-b"), "GPU-a,GPU-b"),
    ],
)
def test_a_runtime_that_would_give_all_accelerators_is_told_which(containers, tmp_path, gpus, devices, visible):
    told = run(replace(containers, gpus=gpus), COMMAND, order(tmp_path, devices=devices), tmp_path)
    assert [word for word in told if "NVIDIA_VISIBLE_DEVICES" in word] == [f"--env=NVIDIA_VISIBLE_DEVICES={visible}"]
    assert any(word.startswith(("--device", "--gpus")) for word in told) is bool(devices)


@pytest.mark.parametrize("name", ["NVIDIA_VISIBLE_DEVICES", "NVIDIA_MIG_CONFIG_DEVICES", "LD_PRELOAD"])
def test_a_bundle_cannot_ask_for_accelerators_or_other_code_by_a_variable(launcher, engine, tmp_path, name):
    command = replace(COMMAND, variables={name: "all"})
    with pytest.raises(LaunchFailed, match=f"no engine is given the variables {name}"):
        launcher.start(command, workdir=tmp_path, log_path=tmp_path / "log", order=order(tmp_path))
    assert engine.calls() == []


def test_ranks_of_one_machine_get_shared_memory_to_exchange_tensors(containers, tmp_path):
    topology = {f"{kind}_parallel": 1 for kind in ("pipeline", "expert", "data", "context")}
    made = bundle(topology={**topology, "tensor_parallel": 4, "nodes": 1})
    assert f"--shm-size={8 * 2**30}" in run(containers, COMMAND, order(tmp_path, bundle=made), tmp_path)


# -------------------------------------------------------------------------------------------- its life


def test_a_container_is_started_reached_stopped_and_removed_with_its_log_kept(launcher, engine, start, tmp_path):
    launched = start()
    assert (launched.pid, launched.handle, launched.boot_id) == (4001, format(1, "064x"), boot_id())
    assert launcher.state(launched).condition is Condition.RUNNING
    assert launcher.listening(launched, None).port == 40001
    assert launcher.logs(launched, tmp_path / "none", 1) == ["ready"]
    state = launcher.stop(launched, grace_seconds=12.4)
    assert (state.condition, state.code) == (Condition.EXITED, 0)
    assert engine.calls("stop") == [["stop", "-t", "12", launched.handle]]
    assert engine.world()["containers"] == {}
    log = tmp_path / "engines" / JOB / "engine.log"
    assert log.read_text() == "loading\nready\n"
    assert launcher.logs(launched, log, 1) == ["ready"]
    before = len(engine.calls())
    assert launcher.stop(launched, grace_seconds=1) == launcher.state(launched) == state
    assert len(engine.calls()) == before


def test_what_does_not_end_when_asked_is_killed(launcher, engine, start):
    engine.set(stubborn=True)
    assert launcher.stop(start(), grace_seconds=1).code == -9
    engine.set(stubborn=False)
    assert str(launcher.crash(start())) == "ended by signal 9"


def test_a_second_container_of_one_job_and_token_is_not_made_and_the_first_is_left(launcher, engine, start):
    launched = start()
    with pytest.raises(LaunchFailed, match="is already in use"):
        start()
    assert launcher.state(launched).condition is Condition.RUNNING
    assert list(engine.world()["containers"]) == [launched.handle]


def test_a_container_that_could_not_start_is_removed_and_says_why(engine, start):
    engine.set(run_error='Error response from daemon: exec: "vllm": executable file not found in $PATH: unknown.')
    with pytest.raises(LaunchFailed, match=r"did not start .* executable file not found in \$PATH"):
        start()
    assert engine.world()["containers"] == {}


def test_an_image_without_python_cannot_be_reached_without_a_network_and_it_is_said_what_can_be_done(
    engine, containers, tmp_path
):
    said = 'exec: "python3": executable file not found in $PATH: unknown.'
    engine.set(run_error=f"Error response from daemon: failed to create task: {said}")
    workdir = tmp_path / "engines" / JOB
    told = {"workdir": workdir, "log_path": workdir / "log", "order": order(tmp_path)}
    for network, advice in (
        ("none", "; without a network an engine is reached by the image's python3"),
        ("bridge", ""),
    ):
        launcher = ContainerLauncher(str(engine.path), replace(containers, network=network))
        with pytest.raises(LaunchFailed) as failed:
            launcher.start(COMMAND, **told)
        assert str(failed.value).partition(said)[2].startswith(advice)
        assert ("SLUICEGATE_RUNNER__CONTAINER_NETWORK" in str(failed.value)) is bool(advice)


# ---------------------------------------------------------------------------------------------- the image


def test_a_missing_image_is_pulled_by_its_digest_before(engine, start):
    engine.set(images=[])
    start()
    verbs = [words[0] for words in engine.calls()]
    assert verbs[:3] == ["image", "pull", "run"]
    assert engine.calls("pull") == [["pull", "--quiet", IMAGE]]


@pytest.mark.parametrize(
    "said",
    [
        "Error response from daemon: manifest for registry.example/engines/vllm not found: manifest unknown",
        "Error: initializing source docker://registry.example/engines/vllm: unauthorized: authentication required",
        "Error response from daemon: pull access denied for vllm, repository does not exist",
    ],
)
def test_an_image_that_cannot_be_had_is_named_with_what_was_said(engine, start, said):
    engine.set(images=[], pull_error=said)
    with pytest.raises(LaunchFailed) as failed:
        start()
    assert str(failed.value) == f"{IMAGE} could not be pulled: {said}"
    assert failed.value.cause == "image_unavailable"
    assert engine.calls("run") == []


def test_a_runner_that_pulls_none_says_that_the_image_is_missing(engine, containers, tmp_path):
    engine.set(images=[])
    launcher = ContainerLauncher(str(engine.path), replace(containers, pulls=False))
    with pytest.raises(LaunchFailed, match="is not on this machine, and this runner pulls none"):
        launcher.start(COMMAND, workdir=tmp_path, log_path=tmp_path / "log", order=order(tmp_path))
    assert engine.calls("pull") == []


def test_a_replica_that_spans_machines_is_not_run_in_a_container(engine, launcher, tmp_path):
    topology = {f"{kind}_parallel": 1 for kind in ("tensor", "pipeline", "expert", "data", "context")}
    made = order(tmp_path, bundle=bundle(topology={**topology, "nodes": 2}))
    with pytest.raises(LaunchFailed, match="a container is on one machine, and this replica spans 2"):
        launcher.start(COMMAND, workdir=tmp_path, log_path=tmp_path / "log", order=made)
    assert engine.calls() == []


def test_an_environment_is_not_run_in_a_container(engine, launcher, tmp_path):
    made = order(tmp_path, bundle=Bundle.model_validate(bundle_body()))
    with pytest.raises(LaunchFailed, match="containers run images"):
        launcher.start(COMMAND, workdir=tmp_path, log_path=tmp_path / "log", order=made)
    assert engine.calls() == []


# ---------------------------------------------------------------------------------------------- its state

RECORDED = [
    ({"Status": "running", "Running": True, "ExitCode": 0}, "running"),
    ({"Status": "paused", "Running": True, "Paused": True, "ExitCode": 0}, "running (paused)"),
    ({"Status": "exited", "Running": False, "ExitCode": 0, "OOMKilled": False}, "exited with status 0"),
    ({"Status": "exited", "Running": False, "ExitCode": 3, "OOMKilled": False}, "exited with status 3"),
    ({"Status": "exited", "Running": False, "ExitCode": 143, "OOMKilled": False}, "ended by signal 15"),
    (
        {"Status": "exited", "Running": False, "ExitCode": 137, "OOMKilled": True},
        "ended by signal 9 (out of its memory limit)",
    ),
    ({"Status": "created", "Running": False, "ExitCode": 127, "Error": "no such file"}, "unknown (no such file)"),
    ({"Status": "removing", "Running": False}, "unknown (its status is removing)"),
    ({}, "unknown (its status is not told)"),
    ({"Status": "exited", "ExitCode": "137"}, "exited"),
]


@pytest.mark.parametrize(("recorded", "words"), RECORDED)
def test_the_state_that_a_container_engine_tells_is_read(recorded, words):
    assert str(read_state(recorded)) == words


def test_only_the_memory_limit_names_a_cause():
    assert [read_state(recorded).cause for recorded, _ in RECORDED if "ExitCode" in recorded].count(
        "out_of_memory"
    ) == 1


def test_an_end_by_the_memory_limit_is_told(launcher, engine, start):
    launched = start()
    engine.change(launched.handle, Status="exited", Running=False, ExitCode=137, OOMKilled=True)
    state = launcher.state(launched)
    assert (state.condition, state.code, state.cause) == (Condition.EXITED, -9, "out_of_memory")


def test_a_container_that_somebody_removed_has_ended(launcher, engine, start):
    launched = start()
    engine.set(containers={})
    assert str(launcher.state(launched)) == "exited (it was removed)"
    assert launcher.stop(launched, grace_seconds=1).condition is Condition.EXITED


def test_while_the_container_engine_does_not_answer_nothing_is_known_and_nothing_called_ended(launcher, engine, start):
    launched = start()
    engine.set(unreachable="Cannot connect to the Docker daemon at unix:///var/run/docker.sock.")
    for state in (launcher.state(launched), launcher.stop(launched, grace_seconds=1), launcher.kill(launched)):
        assert state.condition is Condition.UNKNOWN
        assert "Cannot connect" in state.reason
    with pytest.raises(NotTold, match="Cannot connect"):
        launcher.adopt(launched.pid, launched.start_time, launched.boot_id, launched.handle)
    engine.set(unreachable="")
    assert launcher.kill(launched).condition is Condition.EXITED


def test_an_answer_that_is_no_container_is_unknown(launcher, engine, start):
    launched = start()
    world = engine.world()
    world["containers"][launched.handle]["State"] = None
    engine.set(**world)
    assert launcher.state(launched).condition is Condition.UNKNOWN


# ------------------------------------------------------------------------------------------ found again


def test_a_container_is_adopted_by_another_worker_and_stopped(launcher, engine, containers, start):
    launched = start()
    other = ContainerLauncher(str(engine.path), containers)
    assert other.adopt(launched.pid, launched.start_time, launched.boot_id, launched.handle) == launched
    other.stop(launched, grace_seconds=1)
    assert other.adopt(launched.pid, launched.start_time, launched.boot_id, launched.handle) is None


@pytest.mark.parametrize("made_in", ["engines", "none"])
def test_a_container_is_reached_as_it_was_made_whatever_the_next_runner_is_set_to(
    engine, containers, tmp_path, made_in
):
    networks = {"engines": "none", "none": "engines"}
    first, second = (
        ContainerLauncher(str(engine.path), replace(containers, network=each)) for each in (made_in, networks[made_in])
    )
    workdir = tmp_path / "engines" / JOB
    workdir.mkdir(parents=True)
    launched = first.start(COMMAND, workdir=workdir, log_path=workdir / "engine.log", order=order(tmp_path))
    ports = []
    for launcher in (first, second):
        found = launcher.adopt(launched.pid, launched.start_time, launched.boot_id, launched.handle)
        until(lambda one=launcher, seen=found: one.listening(seen, None).port is not None, what="a way in")
        ports.append(launcher.listening(found, None).port)
    assert ports[0] == ports[1]
    second.kill(launched)


def test_nothing_is_adopted_that_is_not_provably_that_start_of_that_runner_s_container(
    launcher, engine, containers, start
):
    launched = start()
    identity = {"pid": launched.pid, "start_time_ticks": launched.start_time, "boot": boot_id()}
    for change in ({"start_time_ticks": "2026-11-30T05:00:00Z"}, {"pid": 1}, {"boot": "of another boot"}):
        assert launcher.adopt(**identity | change, handle=launched.handle) is None
    assert launcher.adopt(**identity, handle=None) is None
    assert launcher.adopt(**identity, handle=format(9, "064x")) is None
    for foreign in (replace(containers, runner="r2"), replace(containers, folder=Path("/elsewhere"))):
        assert ContainerLauncher(str(engine.path), foreign).adopt(**identity, handle=launched.handle) is None


def test_what_a_dead_worker_left_is_found_by_its_labels_and_nobody_else_s(
    launcher, engine, containers, start, tmp_path
):
    launched = start()
    workdir = tmp_path / "engines" / JOB
    assert launcher.strays(workdir) == [launched]
    assert launcher.strays(tmp_path) == []
    assert ContainerLauncher(str(engine.path), replace(containers, runner="r2")).strays(workdir) == []
    # One that is another data folder's, under the same name of a runner.
    assert ContainerLauncher(str(engine.path), replace(containers, folder=Path("/elsewhere"))).strays(workdir) == []


def test_a_runner_finds_all_that_it_has_but_what_it_keeps_whether_or_not_its_folder_is_there(
    launcher, engine, containers, start, tmp_path
):
    launched = start()
    (tmp_path / "engines" / JOB).rmdir()
    assert launcher.left([]) == launcher.left(["another job"]) == [launched]
    assert launcher.left([JOB]) == []
    assert ContainerLauncher(str(engine.path), replace(containers, runner="r2")).left([]) == []
    engine.set(unreachable="Cannot connect to the Docker daemon")
    with pytest.raises(NotTold, match="Cannot connect to the Docker daemon"):
        launcher.left([])


def test_a_runner_that_starts_ends_what_it_has_but_the_replicas_on_its_shelf(launcher, engine, start, tmp_path):
    serves, left = start(), start(fencing_token=8)
    world = engine.world()
    world["containers"][left.handle]["Config"]["Labels"]["sluicegate.folder"] = str(tmp_path / "engines" / "gone")
    engine.set(**world)
    (tmp_path / "replicas" / JOB).mkdir(parents=True)
    shutil.rmtree(tmp_path / "engines")
    end_left_engines(tmp_path, [launcher])
    assert list(engine.world()["containers"]) == [serves.handle]


# -------------------------------------------------------------------------------------- answers that are lost

LOST = [
    "error during connect: Post http://%2Fvar%2Frun%2Fdocker.sock/containers/create: EOF",
    "Error: read unixpacket: connection reset by peer",
    "Error response from daemon: context deadline exceeded",
]


def test_what_an_order_made_of_which_no_answer_came_is_ended_as_soon_as_it_can_be_found(launcher, engine, start):
    engine.set(dies="run")
    with pytest.raises(LaunchFailed, match="podman run: status -9, without a word") as failed:
        start()
    assert failed.value.cause is None
    assert len(engine.world()["containers"]) == 1
    engine.set(dies="")
    launcher.reap()
    assert engine.world()["containers"] == {}
    before = len(engine.calls())
    launcher.reap()
    assert len(engine.calls()) == before


def test_what_a_broken_off_order_made_later_is_ended_and_what_was_ordered_anew_is_not(launcher, engine, start):
    for token, said in enumerate(LOST):
        engine.set(run_error=said)
        with pytest.raises(LaunchFailed):
            start(fencing_token=token)
    made, *_ = made_all = engine.world()["containers"]
    assert len(made_all) == len(LOST)
    engine.set(run_error="", unreachable="Cannot connect to the Docker daemon")
    launcher.reap()
    engine.set(unreachable="")
    engine.change(made, Status="running", Running=True)
    launcher.reap()
    assert engine.world()["containers"] == {}
    with_token = start(fencing_token=8)
    launcher.reap()
    assert launcher.state(with_token).condition is Condition.RUNNING


def test_somebody_else_s_container_of_the_name_is_left_alone(launcher, engine, start):
    engine.set(run_error=LOST[0])
    with pytest.raises(LaunchFailed):
        start()
    world = engine.world()
    (made,) = world["containers"].values()
    made["Config"]["Labels"]["sluicegate.runner"] = "r2"
    engine.set(**world)
    launcher.reap()
    assert len(engine.world()["containers"]) == 1


def test_what_an_order_of_a_runner_that_was_killed_makes_late_is_ended_by_the_next_one(engine, containers, start):
    late, next_one = start(), ContainerLauncher(str(engine.path), containers)
    assert next_one.sweep(lambda folder: folder == JOB) == []
    assert list(engine.world()["containers"]) == [late.handle]
    assert next_one.sweep(lambda _: False) == [f"sluicegate-{JOB}-7"]
    assert engine.world()["containers"] == {}


def test_beside_what_a_job_is_known_to_have_nothing_else_of_it_runs(engine, containers, start):
    late, next_one = start(), ContainerLauncher(str(engine.path), containers)
    own = start(launcher=next_one, fencing_token=8)
    asked = len(engine.calls("container"))
    assert next_one.sweep(lambda folder: folder == JOB) == [f"sluicegate-{JOB}-7"]
    assert list(engine.world()["containers"]) == [own.handle] != [late.handle]
    # What is known is not asked about again.
    assert len(engine.calls("container")) == asked + 1
    # What could not be ended when its job was over is.
    assert next_one.sweep(lambda _: False) == [f"sluicegate-{JOB}-8"]


def test_what_is_taken_up_is_known(engine, containers, start):
    launched, next_one = start(), ContainerLauncher(str(engine.path), containers)
    assert next_one.adopt(launched.pid, launched.start_time, launched.boot_id, launched.handle) == launched
    late = start(fencing_token=8)
    assert next_one.sweep(lambda folder: folder == JOB) == [f"sluicegate-{JOB}-8"]
    assert list(engine.world()["containers"]) == [launched.handle] != [late.handle]


@pytest.mark.parametrize("changes", [{"mark": "b" * 32}, {"mark": ""}, {"runner": "r2"}])
def test_nothing_is_swept_away_that_is_not_certainly_this_runner_s(engine, containers, start, changes):
    start()
    marked = ContainerLauncher(str(engine.path), replace(containers, **{"mark": "a" * 32, **changes}))
    assert marked.sweep(lambda _: False) == ([f"sluicegate-{JOB}-7"] if changes == {"mark": ""} else [])


def test_a_container_that_was_made_before_there_were_marks_is_taken_up_and_not_swept_away(engine, containers, start):
    launched, marked = start(), ContainerLauncher(str(engine.path), replace(containers, mark="a" * 32))
    assert marked.sweep(lambda _: False) == []
    assert marked.adopt(launched.pid, launched.start_time, launched.boot_id, launched.handle) == launched


def test_while_the_container_engine_does_not_answer_nothing_is_swept_away(launcher, engine, start):
    start()
    engine.set(unreachable="Cannot connect to the Docker daemon")
    assert launcher.sweep(lambda _: False) == []


def test_what_is_ordered_at_this_moment_is_nobody_s_to_end():
    known = Known()
    with known.ordering("new"):
        assert not known.is_nobody_s("id", "new", "folder", lambda _: False)
        assert known.is_nobody_s("id", "other", "folder", lambda _: False)
    assert known.is_nobody_s("id", "new", "folder", lambda _: False)


# ---------------------------------------------------------------------------------- no container engine


def test_without_the_program_the_finding_names_it(containers, tmp_path):
    launcher = ContainerLauncher("/no/such/podman", containers)
    with pytest.raises(LaunchFailed, match="/no/such/podman cannot be run: No such file or directory"):
        launcher.start(COMMAND, workdir=tmp_path, log_path=tmp_path / "log", order=order(tmp_path))


def test_a_real_docker_without_its_daemon_is_named_as_what_it_is(containers, tmp_path, monkeypatch):
    docker = shutil.which("docker")
    if docker is None:
        pytest.skip("no docker client on this machine")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")
    assert subprocess.run([docker, "ps"], capture_output=True, check=False).returncode != 0
    with pytest.raises(LaunchFailed, match=r"docker image: .*(Cannot connect|daemon running|no such file)"):
        ContainerLauncher(docker, containers).start(
            COMMAND, workdir=tmp_path, log_path=tmp_path / "log", order=order(tmp_path)
        )
