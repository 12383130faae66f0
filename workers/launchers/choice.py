"""Which launcher a runner uses, as its settings say, with what each of them takes."""

import os
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from registry.settings import ANYBODY, RunnerSettings
from workers import fingerprint
from workers.launchers import proc
from workers.launchers.base import Launcher, LaunchFailed, Limits
from workers.launchers.container import ContainerLauncher
from workers.launchers.container_command import Containers
from workers.launchers.kube_client import Cluster, KubeClient
from workers.launchers.kube_network import admits
from workers.launchers.kube_objects import Pods
from workers.launchers.kubernetes import KubernetesLauncher, own_pod, owner_of
from workers.launchers.process import ProcessLauncher

NOBODY = 65534
_CALLERS = "SLUICEGATE_RUNNER__KUBERNETES_CALLERS"


def launcher_of(settings: RunnerSettings) -> Launcher:
    """Return the launcher that a runner's settings name.

    Raises:
        LaunchFailed: the settings lack what it needs, shut the runner itself out, or the cluster does not know the
            runner's own pod.
        OSError: the cluster's certificate cannot be read.
    """
    limits = Limits(
        memory_bytes=settings.engine_memory_bytes,
        files=settings.engine_files,
        processes=settings.engine_processes,
        nice=settings.engine_nice,
    )
    if settings.launcher == "container":
        return ContainerLauncher(settings.container_program, _containers(settings, limits))
    if settings.launcher == "kubernetes":
        return _kubernetes(settings, limits)
    return ProcessLauncher(limits)


def _containers(settings: RunnerSettings, limits: Limits) -> Containers:
    # A runner that is root does not make its engines root.
    user = (os.getuid(), os.getgid()) if os.getuid() != 0 else (NOBODY, NOBODY)
    return Containers(
        runner=settings.name,
        folder=settings.data_dir,
        mark=proc.mark(settings.data_dir),
        user=f"{user[0]}:{user[1]}",
        limits=limits,
        gpus=settings.container_gpus,
        seccomp=settings.container_seccomp,
        network=settings.container_network,
        pulls=settings.container_pull == "missing",
    )


def _kubernetes(settings: RunnerSettings, limits: Limits) -> KubernetesLauncher:
    if settings.kubernetes_claim is None:
        raise LaunchFailed("pods need a volume to read bundles from: set SLUICEGATE_RUNNER__KUBERNETES_CLAIM")
    if not _is_sealed(settings.kubernetes_url):
        raise LaunchFailed(f"the service account's token would go to {settings.kubernetes_url} in clear: name https")
    cluster = Cluster(
        url=settings.kubernetes_url,
        namespace=settings.kubernetes_namespace,
        token_file=settings.kubernetes_secrets / "token",
        ca_file=_there(settings.kubernetes_secrets / "ca.crt"),
    )
    client = KubeClient(cluster)
    pod = None if settings.kubernetes_pod is None else own_pod(client, settings.kubernetes_pod)
    is_closed = settings.kubernetes_network == "closed"
    callers = _callers(settings, pod) if is_closed else ()
    pods = Pods(
        runner=settings.name,
        data=str(settings.data_dir),
        mark=proc.mark(settings.data_dir),
        claim=settings.kubernetes_claim,
        limits=limits,
        owner=None if pod is None else owner_of(pod),
        pull_secret=settings.kubernetes_pull_secret,
        is_closed=is_closed,
        hardware=fingerprint.told(settings.hardware),
        resolvers=tuple(one for one in settings.kubernetes_resolvers.split(",") if one),
        callers=callers,
        is_for_anybody=settings.kubernetes_callers == ANYBODY,
    )
    return KubernetesLauncher(client, pods)


def _callers(settings: RunnerSettings, pod: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return who may reach engines that are closed. Raises LaunchFailed when it is not said, or not this runner."""
    told = settings.kubernetes_callers
    if told is None:
        raise LaunchFailed(
            f"who may reach the engines of pods is not said, and nobody is let in unasked: set {_CALLERS} to the pods "
            "of runner and gateway, as NAMESPACE/LABEL=VALUE, or to their networks, with commas between; or to "
            f"{ANYBODY}, which opens every route of an engine to whatever can reach the cluster's pods"
        )
    if told == ANYBODY:
        return ()
    callers = tuple(told.split(","))
    if pod is not None and not admits(callers, pod):
        own = sorted(f"{key}={value}" for key, value in (pod["metadata"].get("labels") or {}).items())
        raise LaunchFailed(
            f"{_CALLERS} shuts out this runner itself, which is {settings.kubernetes_namespace}/"
            f"{settings.kubernetes_pod} with {', '.join(own) or 'no label'}: it would reach no engine"
        )
    return callers


def _is_sealed(url: str) -> bool:
    """Tell whether nobody on the way can read what goes to an address: TLS, or this machine itself."""
    told = urlsplit(url)
    try:
        return told.scheme == "https" or ip_address(told.hostname or "").is_loopback
    except ValueError:
        return False


def _there(path: Path) -> Path | None:
    return path if path.exists() else None
