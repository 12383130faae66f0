"""Which launcher a runner uses, as its settings say, with what each of them takes."""

import os
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from registry.settings import RunnerSettings
from workers import fingerprint
from workers.launchers import proc
from workers.launchers.base import Launcher, LaunchFailed, Limits
from workers.launchers.container import ContainerLauncher
from workers.launchers.container_command import Containers
from workers.launchers.kube_client import Cluster, KubeClient
from workers.launchers.kube_objects import Pods
from workers.launchers.kubernetes import KubernetesLauncher, owner_of
from workers.launchers.process import ProcessLauncher

NOBODY = 65534


def launcher_of(settings: RunnerSettings) -> Launcher:
    """Return the launcher that a runner's settings name.

    Raises:
        LaunchFailed: the settings lack what it needs, or the cluster does not know the runner's own pod.
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
    owner = None if settings.kubernetes_pod is None else owner_of(client, settings.kubernetes_pod)
    pods = Pods(
        runner=settings.name,
        data=str(settings.data_dir),
        mark=proc.mark(settings.data_dir),
        claim=settings.kubernetes_claim,
        limits=limits,
        owner=owner,
        pull_secret=settings.kubernetes_pull_secret,
        is_closed=settings.kubernetes_network == "closed",
        hardware=fingerprint.told(settings.hardware),
        resolvers=tuple(one for one in settings.kubernetes_resolvers.split(",") if one),
        callers=tuple(settings.kubernetes_callers.split(",") if settings.kubernetes_callers else ()),
    )
    return KubernetesLauncher(client, pods)


def _is_sealed(url: str) -> bool:
    """Tell whether nobody on the way can read what goes to an address: TLS, or this machine itself."""
    told = urlsplit(url)
    try:
        return told.scheme == "https" or ip_address(told.hostname or "").is_loopback
    except ValueError:
        return False


def _there(path: Path) -> Path | None:
    return path if path.exists() else None
