"""What pods may reach: the policies that the Kubernetes launcher makes, against an API server of our own."""

import pytest

from schemas.bundle import Bundle
from tests.support.factories import bundle_body
from tests.support.scripted_kube import TOKEN, ScriptedKube
from workers.engines.base import Command
from workers.launchers.base import Condition, LaunchFailed, Order
from workers.launchers.kube_client import Cluster, KubeClient
from workers.launchers.kube_objects import Pods
from workers.launchers.kubernetes import KubernetesLauncher

IMAGE = "registry.example/engines/sglang@sha256:" + "a" * 64
JOB = "0197a1b2-0000-7000-8000-000000000001"
NAME = f"sg-{JOB}-7"
OWNER = {"apiVersion": "v1", "kind": "Pod", "name": "runner-0", "uid": "uid-1", "blockOwnerDeletion": False}
TOPOLOGY = {f"{kind}_parallel": 1 for kind in ("tensor", "pipeline", "expert", "data", "context")}
RESOLVERS = ("169.254.20.10", "fd00::10")
ENVOY = {
    "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "edge"}},
    "podSelector": {"matchLabels": {"app": "envoy"}},
}
NO_POLICIES = (404, "NotFound", "the server could not find the requested resource")


@pytest.fixture
def kube():
    with ScriptedKube() as server:
        server.add("pods", {"metadata": {"name": "runner-0"}}, phase="Running")
        yield server


@pytest.fixture
def launcher(kube, tmp_path):
    (tmp_path / "token").write_text(TOKEN)
    pods = Pods(
        runner="r1",
        data=str(tmp_path),
        claim="engines",
        owner=OWNER,
        port=8080,
        resolvers=RESOLVERS,
        callers=("edge/app=envoy",),
    )
    return KubernetesLauncher(KubeClient(Cluster(kube.url, "engines", tmp_path / "token")), pods)


@pytest.fixture
def start(launcher, tmp_path):
    def begin(*, nodes=1, is_live=False, launcher=launcher):
        engine = {"name": "sglang", "version": "test", "image": IMAGE, "arguments": []}
        body = bundle_body(engine=engine, topology={**TOPOLOGY, "nodes": nodes})
        order = Order(Bundle.model_validate(body), tmp_path / "staged", job=JOB, fencing_token=7)
        workdir = tmp_path / "engines" / JOB
        launcher.place(order, workdir, drain_seconds=2.0, parent_pid=None if is_live else 1)
        return launcher.start(Command(("python3",)), workdir=workdir, log_path=workdir / "log", order=order)

    return begin


def kinds(kube):
    return sorted(kind for kind, name in kube.objects if name == NAME)


def test_nothing_goes_out_of_a_pod_and_only_requests_of_callers_come_in(kube, start):
    start()
    made, pod = kube.objects["networkpolicies", NAME], kube.objects["pods", NAME]
    selected = {"matchLabels": pod["metadata"]["labels"]}
    assert made["spec"] == {
        "podSelector": selected,
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [{"from": [ENVOY], "ports": [{"protocol": "TCP", "port": 8080}]}],
        "egress": [],
    }
    created = [path.rpartition("/")[2] for method, path, *_ in kube.asked if method == "POST"]
    assert created == ["networkpolicies", "pods"]


def test_the_pods_of_a_group_reach_each_other_and_the_names_of_each_other(kube, start):
    start(nodes=2)
    made = kube.objects["networkpolicies", NAME]["spec"]
    own = {"podSelector": made["podSelector"]}
    assert made["ingress"] == [{"from": [ENVOY], "ports": [{"protocol": "TCP", "port": 8080}]}, {"from": [own]}]
    assert made["egress"][0] == {"to": [own]}
    (names,) = made["egress"][1:]
    assert [port["port"] for port in names["ports"]] == [53, 53]
    assert names["to"][0]["podSelector"] == {"matchLabels": {"k8s-app": "kube-dns"}}
    template = kube.objects["leaderworkersets", NAME]["spec"]["leaderWorkerTemplate"]
    for kind in ("leader", "worker"):
        labels = template[f"{kind}Template"]["metadata"]["labels"]
        assert made["podSelector"]["matchLabels"].items() <= labels.items()


def test_a_cache_of_names_on_each_node_is_reached_at_its_address_and_nothing_else_there(kube, start, launcher):
    start(nodes=2)
    rules = kube.objects["networkpolicies", NAME]["spec"]["egress"]
    blocks = [(peer["ipBlock"], rule["ports"]) for rule in rules for peer in rule["to"] if "ipBlock" in peer]
    ports = [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}]
    assert blocks == [({"cidr": "169.254.20.10/32"}, ports), ({"cidr": "fd00::10/128"}, ports)]


def test_where_it_is_said_who_may_call_nobody_else_reaches_an_engine(kube, start, tmp_path):
    callers = ("edge/app.kubernetes.io/name=envoy", "10.0.0.0/24", "10.1.2.3")
    pods = Pods(runner="r1", data=str(tmp_path), claim="engines", port=8080, callers=callers)
    start(nodes=2, launcher=KubernetesLauncher(KubeClient(Cluster(kube.url, "engines", tmp_path / "token")), pods))
    first, own = kube.objects["networkpolicies", NAME]["spec"]["ingress"]
    assert first == {
        "from": [
            {
                "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "edge"}},
                "podSelector": {"matchLabels": {"app.kubernetes.io/name": "envoy"}},
            },
            {"ipBlock": {"cidr": "10.0.0.0/24"}},
            {"ipBlock": {"cidr": "10.1.2.3/32"}},
        ],
        "ports": [{"protocol": "TCP", "port": 8080}],
    }
    assert own.keys() == {"from"}


@pytest.mark.parametrize("is_for_anybody", [False, True])
def test_where_no_caller_is_named_nobody_reaches_an_engine_unless_everybody_may(kube, start, tmp_path, is_for_anybody):
    pods = Pods(runner="r1", data=str(tmp_path), claim="engines", port=8080, is_for_anybody=is_for_anybody)
    start(launcher=KubernetesLauncher(KubeClient(Cluster(kube.url, "engines", tmp_path / "token")), pods))
    rule = {"ports": [{"protocol": "TCP", "port": 8080}]}
    made = kube.objects["networkpolicies", NAME]["spec"]
    assert (made["ingress"], made["policyTypes"]) == ([rule] if is_for_anybody else [], ["Ingress", "Egress"])


def test_a_replica_of_one_pod_asks_nobody_for_names(kube, start):
    start()
    assert kube.objects["networkpolicies", NAME]["spec"]["egress"] == []


@pytest.mark.parametrize("is_live", [False, True])
def test_a_policy_goes_with_its_pod_however_that_goes(kube, start, is_live):
    start(is_live=is_live)
    (owner,) = kube.objects["networkpolicies", NAME]["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"]) == ("Pod", NAME)
    kube.remove(NAME)
    assert kinds(kube) == []


def test_a_policy_that_could_not_be_tied_to_its_pod_is_removed_with_it_all_the_same(kube, launcher, start):
    launched = start(is_live=True)
    kube.objects["networkpolicies", NAME]["metadata"]["ownerReferences"] = []
    assert launcher.stop(launched, grace_seconds=1).condition is Condition.EXITED
    assert kinds(kube) == []


def test_between_the_two_a_policy_goes_with_the_runner(kube, start):
    kube.refused_kinds = {"pods": (500, "InternalError", "etcdserver: request timed out")}
    with pytest.raises(LaunchFailed):
        start()
    first = next(body for method, path, _, body in kube.asked if path.endswith("networkpolicies"))
    assert first["metadata"]["ownerReferences"] == [OWNER]


@pytest.mark.parametrize("refusal", [NO_POLICIES, (403, "Forbidden", "networkpolicies is forbidden")])
def test_a_pod_that_cannot_be_closed_is_not_made(kube, start, refusal):
    kube.refused_kinds = {"networkpolicies": refusal}
    with pytest.raises(LaunchFailed, match=f"KUBERNETES_NETWORK=open: {refusal[1]}: {refusal[2]}"):
        start()
    assert kinds(kube) == []


def test_where_it_is_said_to_be_open_no_policy_is_asked_for(kube, launcher, start, tmp_path):
    pods = Pods(runner="r1", data=str(tmp_path), claim="engines", is_closed=False)
    opened = KubernetesLauncher(KubeClient(Cluster(kube.url, "engines", tmp_path / "token")), pods)
    launched = start(launcher=opened)
    opened.kill(launched)
    assert not [path for _, path, *_ in kube.asked if "networkpolicies" in path]


def test_a_pod_that_is_refused_leaves_no_policy(kube, start):
    kube.refused_kinds = {"POST pods": (403, "Forbidden", "exceeded quota")}
    with pytest.raises(LaunchFailed, match="exceeded quota"):
        start()
    assert kinds(kube) == []


def test_a_policy_that_cannot_be_removed_now_is_removed_later(kube, launcher, start):
    launched = start(is_live=True)
    kube.objects["networkpolicies", NAME]["metadata"]["ownerReferences"] = []
    kube.refused_kinds = {"networkpolicies": (503, "ServiceUnavailable", "etcdserver: leader changed")}
    assert launcher.kill(launched).condition is Condition.EXITED
    assert kinds(kube) == ["networkpolicies"]
    launcher.reap()
    kube.refused_kinds = {}
    launcher.reap()
    assert kinds(kube) == []


def test_a_policy_whose_answer_was_lost_is_taken_and_one_that_says_something_else_is_not(kube, launcher, start):
    kube.answers_lost, kube.loses = 1, ("/networkpolicies",)
    launched = start()
    assert kinds(kube) == ["networkpolicies", "pods"]
    launcher.kill(launched)
    kube.add("networkpolicies", {"metadata": {"name": NAME}, "spec": {"egress": [{}]}})
    with pytest.raises(LaunchFailed, match="AlreadyExists"):
        start()
    assert kinds(kube) == ["networkpolicies"]


def test_a_policy_that_is_there_is_taken_as_clusters_keep_it_and_none_that_closes_less(kube, launcher, start):
    launcher.kill(start())
    spec = next(body for method, path, _, body in kube.asked if path.endswith("networkpolicies"))["spec"]
    kept = {key: value for key, value in spec.items() if value != []}
    kube.add("networkpolicies", {"metadata": {"name": NAME}, "spec": {**kept, "policyTypes": ["Ingress"]}})
    with pytest.raises(LaunchFailed, match="AlreadyExists"):
        start()
    kube.remove(NAME)
    kube.add("networkpolicies", {"metadata": {"name": NAME}, "spec": kept})
    start()
    assert kinds(kube) == ["networkpolicies", "pods"]


def test_somebody_else_s_policy_is_left_alone(kube, launcher, start):
    launched = start(is_live=True)
    made = kube.objects["networkpolicies", NAME]["metadata"]
    made |= {"ownerReferences": [], "labels": {**made["labels"], "sluicegate.dev/runner": "r2"}}
    launcher.kill(launched)
    assert kinds(kube) == ["networkpolicies"]


def test_a_second_order_of_one_job_and_token_leaves_the_first_one_closed(kube, launcher, start):
    launched = start()
    with pytest.raises(LaunchFailed, match="AlreadyExists"):
        start()
    launcher.reap()
    assert launcher.state(launched).condition is Condition.RUNNING
    assert kinds(kube) == ["networkpolicies", "pods"]
