"""What pods may reach: a NetworkPolicy each, there before the pod is, and gone with it.

Source: the Kubernetes API reference for networking.k8s.io/v1 NetworkPolicy: what a policy selects is closed in each of
its directions but for its rules, `egress: []` has none, and the cluster's network plugin has to enforce it.
"""

from collections.abc import Iterable, Mapping
from ipaddress import ip_address, ip_network
from typing import Any

from workers.launchers.kube_client import ClusterRefused, ClusterUnreachable, KubeClient
from workers.launchers.kube_objects import BASES, Pods, is_ours, owner_marks, path_of

BASE = "/apis/networking.k8s.io/v1"
_TRIES = 3


def policy(pods: Pods, made: dict[str, Any]) -> dict[str, Any]:
    """Return the policy of one replica's object: requests of callers come in at its port, and nothing goes out.

    The pods of a group reach each other too, and the cluster's DNS, in which they find the first of them.
    """
    metadata = {key: made["metadata"][key] for key in ("name", "labels", "ownerReferences") if key in made["metadata"]}
    selected = {"matchLabels": made["metadata"]["labels"]}
    ports = [{"protocol": "TCP", "port": pods.port}]
    ingress: list[dict[str, Any]] = []
    # A rule that names no peer, or an empty list of them, is one for everybody.
    if pods.is_for_anybody:
        ingress.append({"ports": ports})
    elif pods.callers:
        ingress.append({"from": [_peer(one) for one in pods.callers], "ports": ports})
    egress: list[dict[str, Any]] = []
    if made["kind"] != "Pod":
        ingress.append({"from": [{"podSelector": selected}]})
        egress = [{"to": [{"podSelector": selected}]}, _dns(pods.resolvers)]
    spec = {"podSelector": selected, "policyTypes": ["Ingress", "Egress"], "ingress": ingress, "egress": egress}
    return {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": metadata, "spec": spec}


def _peer(told: str) -> dict[str, Any]:
    """Return whom a text names: pods as NAMESPACE/LABEL=VALUE, or an address or network. Raises ValueError."""
    if "=" not in told:
        return {"ipBlock": {"cidr": str(ip_network(told))}}
    (namespace, label), value = told.partition("=")[0].split("/", 1), told.partition("=")[2]
    return {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        "podSelector": {"matchLabels": {label: value}},
    }


def admits(callers: Iterable[str], pod: Mapping[str, Any]) -> bool:
    """Tell whether one of those who may call is a pod that there is; of one without an address, networks may be it."""
    metadata, address = pod["metadata"], (pod.get("status") or {}).get("podIP")
    own = {f"{metadata.get('namespace')}/{key}={value}" for key, value in (metadata.get("labels") or {}).items()}
    return any(
        one in own if "=" in one else address is None or ip_address(address) in ip_network(one) for one in callers
    )


def _dns(resolvers: tuple[str, ...]) -> dict[str, Any]:
    """Return the rule that lets questions for names out, and nothing else.

    A cache on each node, as NodeLocal DNSCache, is no pod that could be selected: it answers at an address of the node.
    """
    ports = [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]
    return {"to": [_peer(one) for one in ("kube-system/k8s-app=kube-dns", *resolvers)], "ports": ports}


def _kept(spec: dict[str, Any]) -> dict[str, Any]:
    """Return what a cluster keeps of a policy: an empty list is left out, and `policyTypes` closes that direction."""
    return {key: value for key, value in spec.items() if value != []}


class Policies:
    """The policies of one runner's pods."""

    def __init__(self, client: KubeClient, pods: Pods) -> None:
        """Make and remove them in this cluster."""
        self._client = client
        self._pods = pods

    def path(self, name: str = "") -> str:
        """Return where a policy is, or all of them are."""
        return f"{BASE}/namespaces/{self._client.namespace}/networkpolicies{'/' if name else ''}{name}"

    def make(self, wanted: dict[str, Any]) -> None:
        """Create a policy; one that is there already will do when it says the very same of the same pods.

        Raises ClusterRefused or ClusterUnreachable: there may be none.
        """
        last = ClusterUnreachable("it was not asked")
        for _ in range(_TRIES):
            try:
                self._client.create(self.path(), wanted)
            except ClusterUnreachable as error:
                last = error
                continue
            except ClusterRefused as refused:
                found = self._client.get(self.path(wanted["metadata"]["name"]))
                is_it = found is not None and _kept(found.get("spec") or {}) == _kept(wanted["spec"])
                if refused.reason != "AlreadyExists" or not is_it:
                    raise
            return
        raise last

    def tie(self, name: str, owner: dict[str, Any]) -> None:
        """Let a policy go with its replica's object, however that goes; it is removed with it in any case."""
        reference = {
            "apiVersion": owner["apiVersion"],
            "kind": owner["kind"],
            "name": owner["metadata"]["name"],
            "uid": owner["metadata"]["uid"],
            "blockOwnerDeletion": False,
        }
        try:
            self._client.patch(self.path(name), {"metadata": {"ownerReferences": [reference]}})
        except (ClusterRefused, ClusterUnreachable):
            return

    def remove(self, name: str) -> None:
        """Remove a policy that is ours, unless it closes something that is there.

        Raises ClusterRefused or ClusterUnreachable: it may still be there.
        """
        found = self._client.get(self.path(name))
        if found is None or not is_ours(self._pods, found):
            return
        if any(self._client.get(f"{path_of(self._client.namespace, kind)}/{name}") is not None for kind in BASES):
            return
        self._client.delete(self.path(name), uid=found["metadata"]["uid"], grace_seconds=0)

    def names(self) -> list[str]:
        """Return the names of the policies that are certainly this runner's. Raises as `remove` does."""
        found = self._client.listed(self.path(), owner_marks(self._pods))
        return [one["metadata"]["name"] for one in found if is_ours(self._pods, one, is_certain=True)]
