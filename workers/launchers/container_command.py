"""The command lines that a container engine is given, as data: what one replica may see, reach and use.

The words are those that podman and docker have in common. Where they differ, in how accelerators are handed over,
the setting says which: `cdi` names devices (`nvidia.com/gpu=…`, podman, and docker since 25), `runtime` has docker's
`--gpus`.
"""

import csv
import io
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from schemas.bundle import Bundle
from workers.engines.base import Command
from workers.launchers import passage, passages
from workers.launchers.base import CACHES, NO_ACCELERATOR, OOM_PREFERENCE, USER, Limits, Order
from workers.launchers.become import NO_CORE
from workers.launchers.logs import KEEPING

ROOT = Path("/bundle")
"""Where the bundle's files are inside."""
HOME = "/tmp"  # noqa: S108 - a file system of the container's own, in memory
PORT = 8000
"""Where the engine listens inside; outside, the container engine chooses a port of the loopback address."""
ALONE = "none"
"""The network that has a loopback and nothing else: no port of it can be published, so a socket leads in."""
PASSAGE = "/sluicegate/passage.py"
REACH = "/sluicegate/reach"
LABEL = "sluicegate"
GIBIBYTE = 2**30
PIDS = 4096
STOP_SECONDS = 60
"""What running requests get when somebody else than its runner asks a container to end, such as a shutdown."""
_NAME = re.compile(r"[^a-zA-Z0-9_.-]")
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "ALL_PROXY", "NO_PROXY")
NO_PROXIES = {name: "" for word in _PROXIES for name in (word, word.lower())}
"""Variables that podman takes over from the runner and docker from its own settings, with what a proxy is told there.

An engine has nobody to ask through one, and a proxy's address may hold a password. What is given wins over both.
Source: podman-run(1), `--http-proxy`; Docker CLI, "Proxy configuration".
"""


@dataclass(frozen=True)
class Containers:
    """How this runner's containers are made.

    `user` is UID:GID inside. `mark` lies in the data folder and is known to nobody else. `seccomp` is a profile's file;
    without one the container engine's own applies, never none. `network` names a network on which the port is
    published; `none` is none at all, and then the image has a `python3` that passes on what comes through a socket.
    `root` is where the bundle's files are inside.
    """

    runner: str
    folder: Path
    user: str
    mark: str = ""
    limits: Limits = field(default_factory=Limits)
    gpus: Literal["cdi", "runtime"] = "cdi"
    seccomp: Path | None = None
    network: str = ALONE
    pulls: bool = True
    root: Path = ROOT


def name(order: Order, workdir: Path) -> str:
    """Return the container's name, which one job has under one token only: a second one of it cannot be made."""
    return f"sluicegate-{_NAME.sub('-', workdir.name)}-{order.fencing_token}"


def labels(containers: Containers, order: Order, workdir: Path) -> dict[str, str]:
    """Return the labels by which a container is provably ours, and whose it is."""
    return {
        f"{LABEL}.runner": containers.runner,
        f"{LABEL}.data": str(containers.folder),
        **({f"{LABEL}.mark": containers.mark} if containers.mark else {}),
        f"{LABEL}.folder": str(workdir),
        f"{LABEL}.job": order.job,
        f"{LABEL}.token": str(order.fencing_token),
        f"{LABEL}.bundle": order.bundle.digest,
    }


def run(containers: Containers, command: Command, order: Order, workdir: Path) -> list[str]:
    """Return the words after the program's name that start one replica.

    Args:
        containers: how this runner makes them.
        command: what the driver wants run inside.
        order: the replica; its bundle names an image by digest.
        workdir: the replica's folder on this machine, which only marks it.
    """
    image = order.bundle.engine.image
    if image is None:
        raise ValueError("the bundle names no image")
    program, *arguments = within(command, is_alone=containers.network == ALONE)
    return [
        *("run", "--detach", "--pull=never", f"--name={name(order, workdir)}"),
        *(f"--label={key}={value}" for key, value in labels(containers, order, workdir).items()),
        *_confinement(containers),
        *_resources(containers, order.bundle),
        *_devices(containers, order),
        *_network(containers, workdir),
        _mount(order.files.absolute(), containers.root, "readonly"),
        f"--stop-timeout={STOP_SECONDS}",
        # An image may name a signal that no driver knows as a wish to end, and a command that is run in it for ever.
        *("--stop-signal=SIGTERM", "--no-healthcheck"),
        *_log(),
        *(f"--env={key}={value}" for key, value in variables(containers, command, order).items()),
        f"--entrypoint={program}",
        image,
        *arguments,
    ]


def _confinement(containers: Containers) -> list[str]:
    words = [
        *("--cap-drop=ALL", "--security-opt=no-new-privileges", f"--user={containers.user}", "--read-only"),
        # Kernels that are compiled at the first request are loaded from here, so it may hold programs.
        f"--tmpfs={HOME}:rw,exec,nosuid,nodev,mode=1777",
        *("--ipc=private", "--restart=no", "--init"),
    ]
    if containers.seccomp is not None:
        words.append(f"--security-opt=seccomp={containers.seccomp}")
    return words


def _resources(containers: Containers, bundle: Bundle) -> list[str]:
    limits, topology = containers.limits, bundle.topology
    ranks = topology.tensor_parallel * topology.pipeline_parallel * topology.data_parallel
    # Ranks of one machine exchange tensors through shared memory; the default of 64 MB ends them in the middle of it.
    words = [f"--shm-size={GIBIBYTE if ranks == 1 else 2 * ranks * GIBIBYTE}", f"--ulimit=core={NO_CORE}:{NO_CORE}"]
    words += [f"--pids-limit={limits.processes or PIDS}", f"--oom-score-adj={OOM_PREFERENCE}"]
    if limits.memory_bytes is not None:
        # The same for memory and swap together: an engine that swaps is slower than one that is ended.
        words += [f"--memory={limits.memory_bytes}b", f"--memory-swap={limits.memory_bytes}b"]
    if limits.files is not None:
        words.append(f"--ulimit=nofile={limits.files}:{limits.files}")
    return words


def _devices(containers: Containers, order: Order) -> list[str]:
    if not order.devices:
        return []
    if containers.gpus == "cdi":
        return [f"--device=nvidia.com/gpu={device}" for device in order.devices]
    # The value is read as CSV, so a list needs quotes of its own.
    return [f'--gpus="device={",".join(order.devices)}"']


def _visible(containers: Containers, order: Order) -> str:
    """Return what NVIDIA's own runtime is told, which may be the machine's default: an image's `all` means all of them.

    Devices that are named by CDI do not come from that runtime, so it is to give none beside.
    Source: NVIDIA Container Toolkit, "Specialized Configurations with Docker", GPU enumeration.
    """
    return ",".join(order.devices) if order.devices and containers.gpus == "runtime" else NO_ACCELERATOR


def within(command: Command, *, is_alone: bool) -> tuple[str, ...]:
    """Return the command line inside; without a network, what passes on stands before the driver's."""
    if not is_alone:
        return command.argv
    return ("python3", "-I", "-S", PASSAGE, "inside", f"{REACH}/{passages.NAME}", str(PORT), *command.argv)


def _network(containers: Containers, workdir: Path) -> list[str]:
    if containers.network != ALONE:
        return [f"--network={containers.network}", f"--publish=127.0.0.1::{PORT}/tcp"]
    return [
        # A name that resolves without any network: ranks of one machine look each other up by it.
        *(f"--network={ALONE}", "--hostname=localhost"),
        _mount(Path(passage.__file__).resolve(), PASSAGE, "readonly"),
        _mount(passages.folder(workdir.absolute()), REACH),
    ]


def _mount(source: Path, target: Path | str, *flags: str) -> str:
    """Return the word that mounts a path; it is read as CSV, in which a comma would begin another field."""
    row = io.StringIO()
    csv.writer(row, lineterminator="").writerow(["type=bind", f"source={source}", f"target={target}", *flags])
    return f"--mount={row.getvalue()}"


def _log() -> list[str]:
    """Return the words that keep what a container writes within the bounds of a process's log.

    Docker keeps all of it by default, and refuses bounds for a driver that has none. To podman this driver is its own
    with a file; it keeps one piece, and passes over the number of them.
    """
    size = f"--log-opt=max-size={KEEPING.cap_bytes}"
    return ["--log-driver=json-file", size, f"--log-opt=max-file={KEEPING.pieces + 1}"]


def variables(containers: Containers, command: Command, order: Order) -> dict[str, str]:
    """Return the environment variables that a container is given."""
    visible = _visible(containers, order)
    own = {"HOME": HOME, "TMPDIR": HOME, "LANG": "C.UTF-8", "USER": USER, "NVIDIA_VISIBLE_DEVICES": visible}
    return {**NO_PROXIES, **command.variables, **CACHES, **own}


def ours(containers: Containers, workdir: Path | None = None) -> list[str]:
    """Return the words that list the ids of a runner's containers, of one replica's folder or all, running or not."""
    wanted = {f"{LABEL}.runner": containers.runner, f"{LABEL}.data": str(containers.folder)}
    if workdir is not None:
        wanted[f"{LABEL}.folder"] = str(workdir)
    filters = [f"--filter=label={key}={value}" for key, value in wanted.items()]
    return ["ps", "--all", "--no-trunc", *filters, "--format={{.ID}}"]
