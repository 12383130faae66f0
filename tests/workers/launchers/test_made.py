"""What containers and pods really are, held against their order: what was changed on the way is found by its name."""

from dataclasses import replace

import pytest

from gates.booted.comparison import compare
from schemas.bundle import Bundle
from schemas.result import Severity
from tests.support.factories import bundle_body
from tests.support.scripted_containers import ScriptedContainers
from tests.support.scripted_kube import TOKEN, ScriptedKube
from workers.engines.base import Command
from workers.launchers.base import Limits, Order
from workers.launchers.container import ContainerLauncher
from workers.launchers.container_command import Containers
from workers.launchers.kube_client import Cluster, KubeClient
from workers.launchers.kube_made import quantity
from workers.launchers.kube_objects import Pods
from workers.launchers.kubernetes import KubernetesLauncher

DIGEST, OTHER = "sha256:" + "a" * 64, "sha256:" + "b" * 64
IMAGE = f"registry.example/engines/sglang@{DIGEST}"
JOB = "0197a1b2-0000-7000-8000-000000000001"
NAME = f"sg-{JOB}-7"
COMMAND = Command(("python3", "-m", "engine", "$(HOME)", "two\nlines"), variables={"HF_HUB_OFFLINE": "1"})
GPU = {"accelerator": "NVIDIA H200", "count": 8, "memory_bytes": 150_000_000_000}
TOPOLOGY = {f"{kind}_parallel": 1 for kind in ("tensor", "pipeline", "expert", "data", "context")}


def bundle(nodes=1):
    engine = {"name": "sglang", "version": "test", "image": IMAGE, "arguments": []}
    hardware = {**GPU, "count": 8 * nodes}
    return Bundle.model_validate(bundle_body(engine=engine, hardware=hardware, topology={**TOPOLOGY, "nodes": nodes}))


def order(tmp_path, nodes=1):
    return Order(bundle(nodes), tmp_path / "staged", job=JOB, fencing_token=7, devices=("GPU-a",))


def started(launcher, tmp_path, nodes=1):
    workdir = tmp_path / "engines" / JOB
    made = order(tmp_path, nodes)
    launcher.place(made, workdir, drain_seconds=2.0, parent_pid=1)
    return launcher.start(COMMAND, workdir=workdir, log_path=workdir / "engine.log", order=made)


def codes(made):
    """Return what differs: code, what is there, what was asked for; with a mark where it only warns."""
    found = compare(made.told, made.asked).findings
    return [(one.code + "?" * (one.severity is Severity.WARN), one.found, one.expected) for one in found]


def held(launcher, launched, tmp_path, nodes=1):
    return launcher.made(launched, COMMAND, tmp_path / "engines" / JOB, order(tmp_path, nodes))


# ------------------------------------------------------------------------------------------- containers


@pytest.fixture(params=["podman"])
def engine(tmp_path, request):
    (tmp_path / "bin").mkdir()
    made = ScriptedContainers(tmp_path / "bin", request.param)
    made.set(images=[IMAGE])
    return made


def container_launcher(engine, tmp_path, network="none"):
    containers = Containers(runner="r1", folder=tmp_path, user="1000:1000", network=network)
    return ContainerLauncher(str(engine.path), containers)


def as_inspected(engine, launched, part, change):
    """Let the container engine show one part of a container otherwise."""
    world = engine.world()
    world["containers"][launched.handle][part].update(change)
    engine.set(**world)


@pytest.mark.parametrize(("network", "program"), [("none", ["python3"]), ("engines", "python3")])
def test_a_container_that_is_as_it_was_asked_for_differs_in_nothing(engine, tmp_path, network, program):
    launcher = container_launcher(engine, tmp_path, network)
    launched = started(launcher, tmp_path)
    as_inspected(engine, launched, "Config", {"Entrypoint": program})
    made = held(launcher, launched, tmp_path)
    assert codes(made) == []
    assert made.words[-len(COMMAND.argv) :] == COMMAND.argv
    assert {"arguments", "image", "variables", "confinement"} == set(made.told)


OTHER_IMAGE = f"registry.example/engines/sglang@{OTHER}"
OTHERWISE = [
    ("Config", {"Cmd": ["-m", "other"]}, ("arguments-differ", "-m other", "engine $(HOME) two lines")),
    ("Config", {"Image": OTHER_IMAGE}, ("image-differs", OTHER_IMAGE, IMAGE)),
    ("Config", {"Env": ["HF_HUB_OFFLINE=0"]}, ("variables-differ", "HF_HUB_OFFLINE 0", "HF_HUB_OFFLINE 1")),
    ("HostConfig", {"Privileged": True}, ("confinement-differs", "Privileged true", "Privileged false")),
    ("HostConfig", {"ReadonlyRootfs": False}, ("confinement-differs", "ReadonlyRootfs false", "ReadonlyRootfs true")),
]


def test_a_container_that_is_otherwise_is_found_with_both_values(engine, tmp_path):
    launcher = container_launcher(engine, tmp_path, "engines")
    launched = started(launcher, tmp_path)
    before = engine.world()
    for part, change, (code, told, asked) in OTHERWISE:
        as_inspected(engine, launched, part, change)
        ((found, there, wanted),) = codes(held(launcher, launched, tmp_path))
        assert found == code
        assert told in there
        assert asked in wanted
        engine.set(**before)


def test_of_a_container_that_another_runner_made_what_is_still_known_is_compared(engine, tmp_path):
    launched = started(container_launcher(engine, tmp_path), tmp_path)
    as_inspected(engine, launched, "Config", {"Env": []})
    other = container_launcher(engine, tmp_path, "engines")
    assert codes(held(other, launched, tmp_path)) == []
    world = engine.world()
    world["containers"][launched.handle]["Config"]["Cmd"].append("--trust-remote-code")
    engine.set(**world)
    assert [code for code, *_ in codes(held(other, launched, tmp_path))] == ["arguments-differ"]


def test_what_cannot_be_asked_is_not_told_as_equal(engine, tmp_path):
    launcher = container_launcher(engine, tmp_path)
    launched = started(launcher, tmp_path)
    engine.set(unreachable="Cannot connect to the Docker daemon")
    assert held(launcher, launched, tmp_path) is None
    engine.set(unreachable="", containers={})
    assert held(launcher, launched, tmp_path) is None


# -------------------------------------------------------------------------------------------------- pods


@pytest.fixture
def kube():
    with ScriptedKube() as server:
        yield server


@pytest.fixture
def cluster(kube, tmp_path):
    (tmp_path / "token").write_text(TOKEN)
    limits = Limits(memory_bytes=2**36)
    pods = Pods(runner="r1", data=str(tmp_path), claim="engines", is_closed=False, limits=limits)
    return KubernetesLauncher(KubeClient(Cluster(kube.url, "engines", tmp_path / "token")), pods)


def container(body):
    return body["spec"]["containers"][0]


def given_defaults(body):
    """Add what an API server adds by itself, and write a quantity as it does."""
    one = container(body)
    one |= {"terminationMessagePath": "/dev/termination-log", "args": None}
    one["ports"][0]["protocol"] = "TCP"
    one["livenessProbe"]["httpGet"]["scheme"] = "HTTP"
    one["resources"]["limits"] |= {"memory": "64Gi", "cpu": "4"}
    body["spec"] |= {"dnsPolicy": "ClusterFirst", "hostNetwork": False, "schedulerName": "default-scheduler"}
    body["spec"]["tolerations"].append({"key": "node.kubernetes.io/not-ready", "operator": "Exists"})


def told_by_mirror(body):
    container(body)["image"] = f"mirror.example/sglang@{DIGEST}"


ADMITTED = [
    (given_defaults, []),
    (told_by_mirror, []),
    (
        lambda body: container(body).update(args=["--trust-remote-code"]),
        [("arguments-differ", "lines --trust-remote-code", "lines")],
    ),
    (lambda body: container(body)["command"].__setitem__(2, "other"), [("arguments-differ", "other", "engine")]),
    (
        lambda body: container(body).update(image=f"registry.example/engines/sglang@{OTHER}"),
        [("image-differs", OTHER, DIGEST)],
    ),
    (lambda body: container(body).update(image="sglang:latest"), [("image-differs", "sglang:latest", DIGEST)]),
    (
        lambda body: [one.update(value="0") for one in container(body)["env"] if one["name"] == "HF_HUB_OFFLINE"],
        [("variables-differ", "env.HF_HUB_OFFLINE 0", "env.HF_HUB_OFFLINE 1")],
    ),
    (
        lambda body: container(body)["env"].append({"name": "LD_PRELOAD", "value": "/x.so"}),
        [("variables-beyond?", "LD_PRELOAD", "none")],
    ),
    (
        lambda body: container(body).update(envFrom=[{"secretRef": {"name": "keys"}}]),
        [("variables-beyond?", "envFrom", "none")],
    ),
    (
        lambda body: container(body)["resources"]["limits"].update({"nvidia.com/gpu": "4"}),
        [("resources-differ?", "limits.nvidia.com/gpu 4", "limits.nvidia.com/gpu 8")],
    ),
    (
        lambda body: container(body)["resources"]["limits"].update({"amd.com/gpu": "1"}),
        [("resources-differ?", "limits.amd.com/gpu 1", "limits.amd.com/gpu absent")],
    ),
    (
        lambda body: container(body)["livenessProbe"]["httpGet"].update(port=15020),
        [("probes-differ?", "livenessProbe.httpGet.port 15020", "livenessProbe.httpGet.port http")],
    ),
    (
        lambda body: container(body)["securityContext"].update(privileged=True),
        [("confinement-differs", "securityContext.privileged true", "securityContext.privileged false")],
    ),
    (
        lambda body: container(body)["securityContext"]["capabilities"].update(add=["SYS_ADMIN"]),
        [("confinement-differs", 'capabilities.add ["SYS_ADMIN"]', "capabilities.add none")],
    ),
    (
        lambda body: container(body)["volumeMounts"].append({"name": "x", "mountPath": "/bundle/model"}),
        [("confinement-differs", "volumeMounts /bundle/model", "volumeMounts none")],
    ),
    (lambda body: container(body)["volumeMounts"].append({"name": "x", "mountPath": "/certificates"}), []),
    (
        lambda body: body["spec"].update(hostNetwork=True),
        [("confinement-differs", "hostNetwork true", "hostNetwork false")],
    ),
    (
        lambda body: body["spec"]["volumes"][0]["persistentVolumeClaim"].update(claimName="other"),
        [
            (
                "confinement-differs",
                "volumes[bundle].persistentVolumeClaim.claimName other",
                "volumes[bundle].persistentVolumeClaim.claimName engines",
            )
        ],
    ),
    (
        lambda body: body["spec"]["containers"].insert(0, {"name": "istio-proxy", "image": "istio"}),
        [("containers-beyond?", "istio-proxy", "none")],
    ),
]


@pytest.mark.parametrize(("admission", "expected"), ADMITTED)
def test_what_admission_made_of_a_pod_is_found_with_both_values(kube, cluster, tmp_path, admission, expected):
    kube.admission = admission
    found = codes(held(cluster, started(cluster, tmp_path), tmp_path))
    assert [code for code, *_ in found] == [code for code, *_ in expected]
    for (_, there, asked), (_, told, wanted) in zip(found, expected, strict=True):
        assert told in there
        assert wanted in asked


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (f"registry.example/engines/sglang@{DIGEST}", []),
        (f"docker-pullable://mirror.example/sglang@{OTHER}", ["image-id-differs?"]),
        (OTHER, []),  # the digest of its configuration, which is another thing
        ("", []),
    ],
)
def test_the_image_that_a_node_says_it_runs_is_compared_where_it_names_it_by_a_registry_s_digest(
    kube, cluster, tmp_path, told, expected
):
    launched = started(cluster, tmp_path)
    kube.become(NAME, phase="Running", containerStatuses=[{"name": "engine", "imageID": told}])
    assert [code for code, *_ in codes(held(cluster, launched, tmp_path))] == expected


def test_a_worker_of_a_group_that_is_otherwise_is_found_with_its_name(kube, cluster, tmp_path):
    launched = started(cluster, tmp_path, nodes=2)
    body = kube.objects["leaderworkersets", NAME]
    template = body["spec"]["leaderWorkerTemplate"]
    for suffix, kind in (("0", "leaderTemplate"), ("0-1", "workerTemplate")):
        pod = {"metadata": {"name": f"{NAME}-{suffix}", "labels": body["metadata"]["labels"]}}
        made = kube.add("pods", {**pod, "spec": {"containers": [dict(template[kind]["spec"]["containers"][0])]}})
        made["spec"] = {**template[kind]["spec"], **made["spec"]}
        one = container(made)
        one["env"] = [{"name": "LWS_LEADER_ADDRESS", "value": "leader"}, *one["env"]]
    assert codes(held(cluster, launched, tmp_path, 2)) == []
    worker = kube.objects["pods", f"{NAME}-0-1"]
    container(worker)["command"] = [*container(worker)["command"], "--enable-metrics"]
    container(worker)["image"] = "other"
    found = codes(held(cluster, launched, tmp_path, 2))
    assert [code for code, *_ in found] == ["arguments-differ", "image-differs"]
    assert "--enable-metrics" in found[0][1]
    assert found[1][1] == f"{NAME}-0-1 other"


def test_of_a_pod_that_another_runner_made_what_is_still_known_is_compared(kube, cluster, tmp_path):
    launched = started(cluster, tmp_path)
    container(kube.objects["pods", NAME])["env"] = []
    other = KubernetesLauncher(KubeClient(Cluster(kube.url, "engines", tmp_path / "token")), replace(cluster.pods))
    assert codes(held(other, launched, tmp_path)) == []
    container(kube.objects["pods", NAME])["args"] = ["--trust-remote-code"]
    assert [code for code, *_ in codes(held(other, launched, tmp_path))] == ["arguments-differ"]


def test_a_pod_of_another_s_is_not_taken_for_it(kube, cluster, tmp_path):
    launched = started(cluster, tmp_path)
    kube.objects["pods", NAME]["metadata"]["uid"] = "uid-of-another"
    assert held(cluster, launched, tmp_path) is None


def test_quantities_are_the_same_however_they_are_written():
    assert quantity("64Gi") == quantity(str(2**36)) == quantity("65536Mi")
    assert quantity("1") == quantity("1000m")
    assert quantity("16G") == quantity("16000000000") != quantity("16Gi")
    assert (quantity(None), quantity("1.2.3")) == (None, "1.2.3")
