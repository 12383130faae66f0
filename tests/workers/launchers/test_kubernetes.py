"""The Kubernetes launcher against an API server of our own on loopback: no cluster runs here."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from schemas.bundle import Bundle
from tests.support.factories import bundle_body
from tests.support.folder_bundles import bundle as folder_bundle
from tests.support.scripted_kube import TOKEN, ScriptedKube
from workers.engines.base import Command, Launch
from workers.engines.sglang import SGLANG
from workers.engines.vllm import VLLM
from workers.launchers.base import Condition, LaunchFailed, Limits, NotTold, Order
from workers.launchers.kube_client import Cluster, KubeClient
from workers.launchers.kube_objects import Pods, build, label, literal, name
from workers.launchers.kubernetes import KubernetesLauncher, own_pod, owner_of

IMAGE = "registry.example/engines/vllm@sha256:" + "a" * 64
JOB = "0197a1b2-0000-7000-8000-000000000001"
NAME = f"sg-{JOB}-7"
COMMAND = Command(("python3", "-m", "engine", "/bundle", "--port", "8000"), variables={"VLLM_NO_USAGE_STATS": "1"})
GPU = {"accelerator": "NVIDIA H200", "count": 8, "memory_bytes": 150_000_000_000}
TOPOLOGY = {f"{kind}_parallel": 1 for kind in ("tensor", "pipeline", "expert", "data", "context")}
OWNER = {"apiVersion": "v1", "kind": "Pod", "name": "runner-0", "uid": "uid-runner", "blockOwnerDeletion": False}


def bundle(*, engine="llamacpp", nodes=1, **changes):
    named = {"name": engine, "version": "test", "image": IMAGE, "arguments": []}
    return Bundle.model_validate(bundle_body(engine=named, topology={**TOPOLOGY, "nodes": nodes}, **changes))


@pytest.fixture
def kube():
    with ScriptedKube() as server:
        yield server


@pytest.fixture
def pods(tmp_path):
    return Pods(runner="r1", data=str(tmp_path), claim="engines", owner=OWNER, is_closed=False)


@pytest.fixture
def launcher(kube, pods, tmp_path):
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    return KubernetesLauncher(KubeClient(Cluster(kube.url, "engines", tmp_path / "token")), pods)


@pytest.fixture
def order(tmp_path):
    return Order(bundle(), tmp_path / "staged" / "abc", job=JOB, fencing_token=7)


@pytest.fixture
def start(launcher, order, tmp_path):
    def begin(launcher=launcher, **changes):
        workdir = tmp_path / "engines" / JOB
        workdir.mkdir(parents=True, exist_ok=True)
        made = replace(order, **changes)
        launcher.place(made, workdir, drain_seconds=2.0, parent_pid=1)
        return launcher.start(COMMAND, workdir=workdir, log_path=workdir / "engine.log", order=made)

    return begin


@pytest.fixture
def another(kube, pods, tmp_path):
    """Return the launcher of a runner that has just started."""
    return lambda **changes: KubernetesLauncher(
        KubeClient(Cluster(kube.url, "engines", tmp_path / "token")), replace(pods, **changes)
    )


# ---------------------------------------------------------------------------------------------- the object


def test_a_pod_confines_the_engine_probes_it_cheaply_and_says_whose_it_is(pods, order):
    collection, made = build(pods, COMMAND, replace(order, bundle=bundle(hardware=GPU)), JOB, is_live=False)
    spec = made["spec"]
    (container,) = spec["containers"]
    assert (collection, made["kind"], made["metadata"]["name"]) == ("pods", "Pod", NAME)
    assert made["metadata"]["labels"] == {
        "app.kubernetes.io/managed-by": "sluicegate",
        "sluicegate.dev/runner": "r1",
        "sluicegate.dev/data": label(pods.data),
        "sluicegate.dev/folder": JOB,
        "sluicegate.dev/job": JOB,
        "sluicegate.dev/token": "7",
    }
    assert made["metadata"]["ownerReferences"] == [OWNER]
    assert container["image"] == IMAGE
    assert container["command"] == list(COMMAND.argv)
    memory = str(8 * 6 * 2**30 + sum(file.size for file in order.bundle.files if file.role == "weights"))
    assert container["resources"] == {"limits": {"nvidia.com/gpu": "8"}, "requests": {"memory": memory}}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "privileged": False,
        "readOnlyRootFilesystem": True,
    }
    assert container["volumeMounts"][0] == {
        "name": "bundle",
        "mountPath": "/bundle",
        "subPath": "staged/abc",
        "readOnly": True,
    }
    assert spec["volumes"][0]["persistentVolumeClaim"] == {"claimName": "engines", "readOnly": True}
    assert spec["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H200"}
    assert spec["tolerations"][0]["key"] == "nvidia.com/gpu"
    node = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    # 150,000,000,000 bytes are 143,051.1 MiB: no node with 143,051 will do.
    assert node[0]["matchExpressions"] == [{"key": "nvidia.com/gpu.memory", "operator": "Gt", "values": ["143051"]}]
    assert spec["restartPolicy"] == "Never"
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    asked = {container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")}
    assert asked == {"/health"}
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] == 3600


def test_an_image_s_own_caches_are_not_looked_into(pods, order):
    (container,) = build(pods, COMMAND, order, JOB, is_live=False)[1]["spec"]["containers"]
    told = {one["name"]: one["value"] for one in container["env"]}
    assert (told["XDG_CACHE_HOME"], told["HF_HOME"]) == ("/tmp/.cache", "/tmp/.cache/huggingface")


def test_what_serves_outlives_its_runner_and_so_has_no_owner(pods, order):
    assert "ownerReferences" not in build(pods, COMMAND, order, JOB, is_live=True)[1]["metadata"]


def test_what_is_made_for_gates_goes_with_the_pod_that_the_runner_is(kube, pods, order, tmp_path):
    (tmp_path / "token").write_text(TOKEN)
    client = KubeClient(Cluster(kube.url, "engines", tmp_path / "token"))
    with pytest.raises(LaunchFailed, match="has no pod runner-0 in engines"):
        own_pod(client, "runner-0")
    kube.add("pods", {"metadata": {"name": "runner-0"}}, phase="Running")
    owner = owner_of(own_pod(client, "runner-0"))
    assert owner == {**OWNER, "uid": "uid-1"}
    made = build(replace(pods, owner=owner), COMMAND, order, JOB, is_live=False)[1]
    assert made["metadata"]["ownerReferences"] == [owner]
    kube.refusal = (403, "Forbidden", "no")
    with pytest.raises(LaunchFailed, match="does not say who this runner is: Forbidden: no"):
        own_pod(client, "runner-0")


def test_a_bundle_for_a_processor_asks_for_its_memory_and_no_accelerator(pods, order):
    made = replace(order, bundle=bundle(hardware={"accelerator": "cpu", "count": 0, "memory_bytes": 2**34}))
    spec = build(replace(pods, limits=Limits(memory_bytes=2**35)), COMMAND, made, JOB, is_live=False)[1]["spec"]
    assert spec["containers"][0]["resources"] == {"limits": {"memory": str(2**35)}, "requests": {"memory": str(2**34)}}
    assert not {"nodeSelector", "affinity", "tolerations"} & spec.keys()
    held = str(sum(file.size for file in order.bundle.files if file.role == "weights"))
    spec = build(pods, COMMAND, order, JOB, is_live=False)[1]["spec"]
    assert spec["containers"][0]["resources"] == {"requests": {"memory": held}}


def expanded(text, variables):
    """Return what Kubernetes makes of a text in a command or a variable, as its API reference says."""
    return re.sub(
        r"\$(?:(\$)|\(([^)]*)\))",
        lambda found: "$" if found[1] else variables.get(found[2], found[0]),
        text,
    )


@pytest.mark.parametrize(
    "word",
    ["$(HOME)", "$$(HOME)", "$$$(HOME)", "$HOME", "a$", "$$", "$(", "$()", "{%- if $(LWS_LEADER_ADDRESS) -%}", "plain"],
)
def test_what_looks_like_a_variable_in_a_command_line_stays_what_it_is(pods, order, word):
    command = replace(COMMAND, argv=("python3", word), variables={"TEMPLATE": word})
    (container,) = build(pods, command, order, JOB, is_live=False)[1]["spec"]["containers"]
    known = {"HOME": "/tmp", "LWS_LEADER_ADDRESS": "leader"}
    assert [expanded(one, known) for one in container["command"]] == ["python3", word]
    (template,) = [one["value"] for one in container["env"] if one["name"] == "TEMPLATE"]
    assert expanded(template, known) == word


def test_a_group_s_own_variables_are_put_in_and_those_of_its_bundle_are_not(pods, order):
    made = replace(order, bundle=bundle(engine="sglang", nodes=2, hardware={**GPU, "count": 16}))
    command = replace(COMMAND, argv=(*COMMAND.argv, "$(LWS_LEADER_ADDRESS)"))
    template = build(pods, command, made, JOB, is_live=False)[1]["spec"]["leaderWorkerTemplate"]
    (container,) = template["leaderTemplate"]["spec"]["containers"]
    assert container["command"].count(literal("$(LWS_LEADER_ADDRESS)")) == 1
    assert "$(LWS_LEADER_ADDRESS):20000" in container["command"]


@pytest.mark.parametrize(("hardware", "told"), [({"accelerator": "cpu", "count": 0}, ["void"]), (GPU, [])])
def test_a_pod_without_accelerators_gets_none_of_a_node_that_gives_all(pods, order, hardware, told):
    (container,) = build(pods, COMMAND, replace(order, bundle=bundle(hardware=hardware)), JOB, is_live=False)[1][
        "spec"
    ]["containers"]
    # With some, the device plugin says which; a pod's own word would win over its.
    assert [one["value"] for one in container["env"] if one["name"] == "NVIDIA_VISIBLE_DEVICES"] == told


def test_a_mig_profile_is_asked_for_by_its_own_resource(pods, order):
    made = replace(order, bundle=bundle(hardware={"accelerator": "NVIDIA H200", "count": 1, "mig": "1g.18gb"}))
    spec = build(pods, COMMAND, made, JOB, is_live=False)[1]["spec"]
    assert spec["containers"][0]["resources"]["limits"] == {"nvidia.com/mig-1g.18gb": "1"}


def test_the_other_nodes_of_vllm_are_started_by_the_command_line_that_heeds_that_they_serve_nothing(pods, order):
    made = replace(order, bundle=bundle(engine="vllm", nodes=2, hardware={**GPU, "count": 16}))
    command = Command(("python3", "-m", "vllm.entrypoints.openai.api_server", "--model", "/bundle"))
    template = build(pods, command, made, JOB, is_live=False)[1]["spec"]["leaderWorkerTemplate"]
    leader, worker = (template[f"{kind}Template"]["spec"]["containers"][0]["command"] for kind in ("leader", "worker"))
    told = ["--distributed-executor-backend", "mp", "--nnodes", "2", "--node-rank", "$(LWS_WORKER_INDEX)"]
    told += ["--master-addr", "$(LWS_LEADER_ADDRESS)"]
    assert leader == [*command.argv, *told]
    serve = ["python3", "-m", "vllm.entrypoints.cli.main", "serve", "--model", "/bundle"]
    assert worker == [*serve, *told, "--headless"]
    with pytest.raises(LaunchFailed, match=r"has no -m vllm\.entrypoints\.openai\.api_server"):
        build(pods, COMMAND, made, JOB, is_live=False)


@pytest.mark.parametrize(("engine", "driver"), [("vllm", VLLM), ("sglang", SGLANG)])
def test_what_a_driver_makes_of_a_bundle_of_several_nodes_can_be_made_into_a_group(pods, order, engine, driver):
    topology = {"topology": {"tensor_parallel": 8, "pipeline_parallel": 2, "nodes": 2}}
    version = {"vllm": "0.32.0"}.get(engine)
    made = folder_bundle(engine, version=version, hardware={**GPU, "count": 16}, **topology)
    assert driver.check_bundle(made) == []
    launch = Launch(root=Path("/bundle"), port_file=Path("/tmp/port.json"), host="0.0.0.0", port=8000)
    group = build(pods, driver.command(made, launch), replace(order, bundle=made), JOB, is_live=False)[1]
    assert group["spec"]["leaderWorkerTemplate"]["size"] == 2


@pytest.mark.parametrize(("engine", "others"), [("sglang", [])])
def test_a_replica_of_several_nodes_is_a_group_whose_ranks_know_each_other(pods, order, engine, others):
    made = replace(order, bundle=bundle(engine=engine, nodes=2, hardware={**GPU, "count": 16}))
    collection, group = build(pods, COMMAND, made, JOB, is_live=False)
    template = group["spec"]["leaderWorkerTemplate"]
    leader, worker = (template[f"{kind}Template"]["spec"]["containers"][0] for kind in ("leader", "worker"))
    assert (collection, template["size"], group["spec"]["replicas"]) == ("leaderworkersets", 2, 1)
    told = leader["command"][len(COMMAND.argv) :]
    assert told[:4] == ["--nnodes", "2", "--node-rank", "$(LWS_WORKER_INDEX)"]
    assert told[5].startswith("$(LWS_LEADER_ADDRESS)")
    assert worker["command"] == leader["command"] + others
    # The other ranks answer no requests, so nobody asks them.
    assert "readinessProbe" in leader
    assert not {"ports", "readinessProbe", "livenessProbe", "startupProbe"} & worker.keys()
    assert leader["resources"] == worker["resources"]
    assert leader["resources"]["limits"] == {"nvidia.com/gpu": "8"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bundle": Bundle.model_validate(bundle_body())}, "a cluster runs images"),
        ({"bundle": bundle(nodes=2)}, "llamacpp is not spread over 2 nodes"),
        ({"files": Path("/elsewhere/abc")}, "/elsewhere/abc is not in the data folder"),
    ],
)
def test_what_no_cluster_can_be_asked_for_is_said_before_it_is_asked(kube, start, changes, words):
    with pytest.raises(LaunchFailed, match=words):
        start(**changes)
    assert kube.asked == []


def test_labels_stay_within_what_is_allowed_and_apart():
    assert label("r1") == "r1"
    long = [label(f"/srv/{'x' * 80}/{n}") for n in range(2)]
    assert len(set(long)) == 2
    assert all(len(one) <= 63 and one[0].isalnum() and one[-1].isalnum() for one in long)
    assert label("a_") != label("a-")


def test_a_name_leaves_room_for_what_a_group_s_set_adds_to_it_and_stays_apart(order):
    folders = [f"{JOB}", f"{JOB}-accepted", f"{JOB}-accepted-2", "x" * 90, "x" * 91]
    names = [name(replace(order, fencing_token=12_345_678), folder) for folder in folders]
    assert len(set(names)) == len(folders)
    assert names[0] == f"sg-{JOB}-12345678"
    # As `<name>-0-<digest of ten>`.
    assert all(len(one) + 2 + 11 <= 63 for one in names)


# ---------------------------------------------------------------------------------------------- its life


def test_a_pod_is_created_reached_stopped_and_deleted_with_its_log_kept(kube, launcher, start, tmp_path):
    launched = start()
    assert (launched.pid, launched.start_time, launched.handle) == (0, "uid-1", f"pods/engines/{NAME}/uid-1/1")
    # Streams may take 2 s to end, also where the cluster ends the pod by itself.
    assert kube.objects["pods", NAME]["spec"]["terminationGracePeriodSeconds"] == 7
    assert launcher.state(launched).condition is Condition.RUNNING
    assert launcher.listening(launched, None) == launched
    kube.become(NAME, phase="Running", podIP="10.1.2.3", containerStatuses=[{"state": {"running": {}}}])
    found = launcher.listening(launched, None)
    assert (found.host, found.port) == ("10.1.2.3", 8000)
    assert launcher.logs(launched, tmp_path / "none", 1) == ["ready"]
    assert launcher.stop(launched, grace_seconds=12.4).condition is Condition.EXITED
    (deleted,) = [body for method, _, _, body in kube.asked if method == "DELETE"]
    assert (deleted["gracePeriodSeconds"], deleted["preconditions"]) == (12, {"uid": "uid-1"})
    assert kube.objects == {}
    log = tmp_path / "engines" / JOB / "engine.log"
    assert launcher.logs(launched, log, 2) == ["loading", "ready"]
    assert launcher.stop(launched, grace_seconds=1) == launcher.state(launched)


def test_a_create_whose_answer_was_lost_makes_no_second_pod(kube, start):
    kube.answers_lost = 1
    assert start().start_time == "uid-1"
    assert len(kube.objects) == 1
    assert [method for method, *_ in kube.asked] == ["POST", "POST", "GET"]


def test_what_creates_without_any_answer_made_is_deleted_once_the_cluster_answers(kube, launcher, start):
    kube.answers_lost = 3
    with pytest.raises(LaunchFailed, match="did not take pods"):
        start()
    assert ("pods", NAME) in kube.objects
    launcher.reap()
    assert kube.objects == {}
    (deleted,) = [body for method, _, _, body in kube.asked if method == "DELETE"]
    assert (deleted["gracePeriodSeconds"], deleted["preconditions"]) == (1, {"uid": "uid-1"})
    asked = len(kube.asked)
    launcher.reap()
    assert len(kube.asked) == asked


def test_a_pod_that_a_lost_create_makes_late_is_deleted_and_one_that_was_ordered_anew_is_not(kube, launcher, start):
    kube.answers_lost = 3
    with pytest.raises(LaunchFailed):
        start()
    late = kube.objects.pop(("pods", NAME))
    launcher.reap()
    kube.objects["pods", NAME] = late
    kube.refusal = (503, "ServiceUnavailable", "etcdserver: leader changed")
    launcher.reap()
    kube.refusal = None
    launcher.reap()
    assert kube.objects == {}
    launched = start()
    launcher.reap()
    assert launcher.state(launched).condition is Condition.RUNNING


def test_a_refusal_after_a_lost_answer_does_not_hide_what_the_first_order_made(kube, launcher, start):
    kube.answers_lost = 1
    kube.refuses_after_loss = (403, "Forbidden", "exceeded quota: gpus, requested: 8, used: 8, limited: 8")
    with pytest.raises(LaunchFailed, match="exceeded quota"):
        start()
    assert ("pods", NAME) in kube.objects
    launcher.reap()
    assert kube.objects == {}


def test_a_cluster_that_says_to_come_later_is_asked_again_and_has_neither_refused_nor_done_it(kube, launcher, start):
    launched = start()
    kube.refuses_creates = (429, "TooManyRequests", "the server has received too many requests")
    with pytest.raises(LaunchFailed, match=r"did not take pods .*too many requests"):
        start(fencing_token=8)
    assert len([path for method, path, *_ in kube.asked if method == "POST"]) == 4
    asked = len(kube.asked)
    launcher.reap()
    assert len(kube.asked) == asked
    kube.refusal = kube.refuses_creates
    assert launcher.state(launched).condition is Condition.UNKNOWN
    with pytest.raises(NotTold, match="too many requests"):
        launcher.adopt(0, launched.start_time, launched.boot_id, launched.handle)


def test_another_runner_s_pod_of_the_name_is_left_alone(kube, launcher, start):
    kube.answers_lost = 3
    with pytest.raises(LaunchFailed):
        start()
    kube.objects["pods", NAME]["metadata"]["labels"]["sluicegate.dev/runner"] = "r2"
    launcher.reap()
    assert ("pods", NAME) in kube.objects


def test_a_runner_finds_all_that_it_has_but_what_it_keeps(kube, launcher, pods, start, tmp_path):
    launched = start()
    assert launcher.left([]) == launcher.left(["another job"]) == [launched]
    assert launcher.left([JOB]) == []
    kube.objects["pods", NAME]["metadata"]["labels"]["sluicegate.dev/data"] = "elsewhere"
    assert launcher.left([]) == []


def test_what_an_order_of_a_runner_that_was_killed_makes_late_is_ended_by_the_next_one(kube, start, another):
    start()
    next_one = another()
    assert next_one.sweep(lambda folder: folder == JOB) == []
    own = start(launcher=next_one, fencing_token=8)
    assert next_one.sweep(lambda folder: folder == JOB) == [NAME]
    assert [name for _, name in kube.objects] == [own.handle.split("/")[2]]
    assert next_one.sweep(lambda _: False) == [f"{NAME[:-1]}8"]
    assert kube.objects == {}
    next_one.kill(start(launcher=next_one, fencing_token=9))
    # Never 0, at which a cluster forgets a pod whether or not its node has ended it.
    assert [body["gracePeriodSeconds"] for method, _, _, body in kube.asked if method == "DELETE"] == [1, 1, 1]


def test_a_policy_that_closes_nothing_goes_and_one_that_is_needed_stays(kube, start, another):
    closed = another(is_closed=True)
    start(launcher=closed, fencing_token=8)
    kube.objects["networkpolicies", NAME] = {**kube.objects["networkpolicies", f"{NAME[:-1]}8"]}
    kube.objects["networkpolicies", NAME]["metadata"] = {
        **kube.objects["networkpolicies", NAME]["metadata"],
        "name": NAME,
    }
    assert closed.sweep(lambda folder: folder == JOB) == []
    assert sorted(kube.objects) == [("networkpolicies", f"{NAME[:-1]}8"), ("pods", f"{NAME[:-1]}8")]


def test_a_late_pod_is_ended_where_policies_may_not_be_listed(kube, start, another):
    start()
    kube.refused_kinds = {"GET networkpolicies": (403, "Forbidden", "networkpolicies is forbidden")}
    assert another(is_closed=True).sweep(lambda _: False) == [NAME]
    assert ("pods", NAME) not in kube.objects


def test_nothing_is_swept_away_that_is_not_certainly_this_runner_s(kube, start, another):
    start()
    for changes in ({"mark": "b" * 32}, {"runner": "r2"}, {"data": "/elsewhere"}):
        assert another(**changes).sweep(lambda _: False) == []
    launched = start(launcher=another(mark="b" * 32), fencing_token=8)
    for mark, is_its in (("c" * 32, False), ("b" * 32, True)):
        found = another(mark=mark).adopt(0, launched.start_time, launched.boot_id, launched.handle)
        assert (found == launched) is is_its
    assert another(mark="c" * 32).left([]) != []


def test_while_the_cluster_does_not_answer_nothing_is_swept_away_and_nothing_called_absent(kube, launcher, start):
    start()
    kube.refusal = (503, "ServiceUnavailable", "etcdserver: leader changed")
    assert launcher.sweep(lambda _: False) == []
    with pytest.raises(NotTold, match="503"):
        launcher.left([])
    kube.refusal = None
    # In a cluster that knows no groups, or lets this runner see none, pods are found all the same.
    kube.refused_kinds = {"leaderworkersets": (403, "Forbidden", "leaderworkersets is forbidden")}
    assert len(launcher.left([])) == 1


def test_a_second_pod_of_one_job_and_token_is_not_made_and_the_first_is_left(kube, launcher, start):
    launched = start()
    with pytest.raises(LaunchFailed, match="AlreadyExists"):
        start()
    assert launcher.state(launched).condition is Condition.RUNNING


@pytest.mark.parametrize(
    ("refusal", "words"),
    [
        (
            (403, "Forbidden", 'pods is forbidden: User "x" cannot create resource "pods"'),
            "Forbidden: pods is forbidden",
        ),
        ((403, "Forbidden", "exceeded quota: gpus, requested: 8, used: 8, limited: 8"), "exceeded quota"),
        ((422, "Invalid", "Pod is invalid: spec.containers[0].image"), "Invalid: Pod is invalid"),
    ],
)
def test_what_the_cluster_refuses_is_said_in_its_words(kube, start, refusal, words):
    kube.refusal = refusal
    with pytest.raises(LaunchFailed, match=words):
        start()
    assert len(kube.asked) == 1


def test_a_token_is_read_anew_for_each_request_and_a_wrong_one_is_said(kube, launcher, start, tmp_path):
    (tmp_path / "token").write_text("old")
    with pytest.raises(LaunchFailed, match="Unauthorized"):
        start()
    (tmp_path / "token").write_text(TOKEN)
    assert launcher.state(start()).condition is Condition.RUNNING


def test_while_the_cluster_does_not_answer_nothing_is_known_and_nothing_called_ended(kube, launcher, start):
    launched = start()
    kube.refusal = (503, "ServiceUnavailable", "etcdserver: leader changed")
    for state in (launcher.state(launched), launcher.kill(launched)):
        assert state.condition is Condition.UNKNOWN
        assert "503" in state.reason
    kube.refusal = None
    assert launcher.kill(launched).condition is Condition.EXITED


def test_another_object_of_the_same_name_is_neither_believed_nor_deleted(kube, launcher, start):
    launched = start()
    kube.objects["pods", NAME]["metadata"]["uid"] = "uid-of-another"
    assert launcher.state(launched).reason == "it was deleted, and another one has its name"
    assert launcher.kill(launched).condition is Condition.EXITED
    assert ("pods", NAME) in kube.objects


# ---------------------------------------------------------------------------------- several nodes


@pytest.fixture
def group(kube, launcher, start):
    launched = start(bundle=bundle(engine="sglang", nodes=2, hardware={**GPU, "count": 16}))
    labels = kube.objects["leaderworkersets", NAME]["metadata"]["labels"]
    running = {"phase": "Running", "podIP": "10.0.0.1", "containerStatuses": [{"state": {"running": {}}}]}
    owner = {"kind": "StatefulSet", "controller": True}

    def add(suffix):
        body = {"metadata": {"name": f"{NAME}-{suffix}", "labels": labels, "ownerReferences": [owner]}}
        kube.add("pods", body, **running)

    assert launcher.state(launched).reason == "0 of 2 pods are there"
    add("0")
    assert launcher.state(launched).reason == "1 of 2 pods are there"
    add("0-1")
    assert str(launcher.state(launched)) == "running"
    return launched


def test_a_group_is_reached_by_its_first_pod_and_ended_as_one(kube, launcher, group, tmp_path):
    assert launcher.listening(group, None).host == "10.0.0.1"
    assert launcher.strays(tmp_path / "engines" / JOB) == [group]
    assert launcher.kill(group).condition is Condition.EXITED
    assert kube.objects == {}
    # The group first, which would make its pods anew; and each of those, or they got the grace that is for streams.
    deleted = [(path.rpartition("/")[2], body) for method, path, _, body in kube.asked if method == "DELETE"]
    assert [(name, body["gracePeriodSeconds"]) for name, body in deleted] == [
        (NAME, 1), (f"{NAME}-0", 1), (f"{NAME}-0-1", 1),
    ]  # fmt: skip


@pytest.mark.parametrize("loss", ["gone", "replaced", "restarted", "ended", "evicted"])
def test_one_lost_rank_takes_the_whole_replica_out(kube, launcher, group, loss):
    rank = f"{NAME}-0-1"
    if loss == "gone":
        del kube.objects["pods", rank]
    elif loss == "replaced":
        kube.objects["pods", rank]["metadata"]["uid"] = "uid-new"
    elif loss == "restarted":
        last = {"terminated": {"exitCode": 1, "reason": "Error"}}
        kube.become(rank, phase="Running", containerStatuses=[{"state": {"running": {}}, "lastState": last}])
    elif loss == "ended":
        over = {"terminated": {"exitCode": 1, "reason": "Error"}}
        kube.become(rank, phase="Failed", containerStatuses=[{"state": over}])
    else:
        kube.become(rank, phase="Failed", reason="Evicted", message="low on memory")
    state = launcher.state(group)
    assert state.condition is Condition.EXITED
    assert state.cause == ("evicted" if loss == "evicted" else "rank_lost")
    assert rank in state.reason


# ------------------------------------------------------------------------------------------ found again


def test_a_pod_is_adopted_by_another_worker_only_while_it_is_provably_that_one(kube, launcher, start):
    launched = start()
    identity = {"pid": 0, "start_time_ticks": launched.start_time, "boot": launched.boot_id}
    assert launcher.adopt(**identity, handle=launched.handle) == launched
    for change in ({"pid": 1}, {"start_time_ticks": "uid-2"}, {"boot": "another namespace"}):
        assert launcher.adopt(**identity | change, handle=launched.handle) is None
    assert launcher.adopt(**identity, handle="pods/engines/x") is None
    assert launcher.adopt(**identity, handle=None) is None
    for status in (503, 403):
        kube.refusal = (status, "Unavailable", "leader changed")
        with pytest.raises(NotTold, match="leader changed"):
            launcher.adopt(**identity, handle=launched.handle)
    kube.refusal = None
    kube.objects["pods", NAME]["metadata"]["labels"]["sluicegate.dev/runner"] = "r2"
    assert launcher.adopt(**identity, handle=launched.handle) is None


def test_a_pod_that_is_being_deleted_is_not_adopted(kube, launcher, start):
    launched = start()
    kube.objects["pods", NAME]["metadata"]["deletionTimestamp"] = "2026-11-30T05:00:00Z"
    assert launcher.adopt(0, launched.start_time, launched.boot_id, launched.handle) is None


def test_what_a_dead_worker_left_is_found_by_its_labels_and_nobody_else_s(kube, launcher, pods, start, tmp_path):
    launched = start()
    workdir = tmp_path / "engines" / JOB
    assert launcher.strays(workdir) == [launched]
    assert launcher.strays(tmp_path / "engines" / "other") == []
    for foreign in (replace(pods, runner="r2"), replace(pods, data="/elsewhere")):
        other = KubernetesLauncher(KubeClient(Cluster(kube.url, "engines", tmp_path / "token")), foreign)
        assert other.strays(workdir) == []
