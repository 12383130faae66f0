"""The table of parts: what `sluicegate up` runs, in the order of their start."""

import http.client
import json
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from registry.settings import BROKER_TOLD, is_broker
from workers.embedded import gateway, postgres, valkey
from workers.embedded.layout import DataRefused, Layout
from workers.embedded.part import Part
from workers.embedded.ports import HOST, Ports

PREFIX: Final = "SLUICEGATE_"
RUNNER: Final = "SLUICEGATE_RUNNER__"
RUNNER_NAME: Final = "embedded"
ADMIN_TOKEN: Final = "admin.token"  # noqa: S105 - a file's name
RUNNER_TOKEN: Final = "runner.token"  # noqa: S105 - as above
BROKER_PASSWORD: Final = "broker.password"  # noqa: S105 - as above
TOKEN_PREFIX: Final = "slg_"  # noqa: S105 - how a token begins
_PASSED_ON: Final = ("PATH", "HOME", "TZ", "LD_LIBRARY_PATH")
"""What a program that is not ours gets of this process's environment."""
_ONE_THREAD: Final = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Statistics of a few thousand numbers: more threads would only take processors away from the engines."""
_CELERY: Final = ("--loglevel", "INFO", "--without-gossip", "--without-mingle", "--without-heartbeat")


@dataclass(frozen=True)
class Options:
    """What the person who starts the stack has chosen."""

    runner_class: str = "cpu"
    project: str = "default"
    is_with_runner: bool = True
    drain_seconds: float = 30.0
    broker: str | None = None
    """Address of a broker that somebody else runs; none for a Valkey of the stack's own."""


@dataclass(frozen=True)
class Stack:
    """One stack: where its data lies, which ports it has, what it is asked to be."""

    layout: Layout
    ports: Ports
    options: Options

    @property
    def url(self) -> str:
        """Address of the API."""
        return f"http://{HOST}:{self.ports.api}"

    @property
    def gateway_url(self) -> str:
        """Address of the gateway."""
        return f"http://{HOST}:{self.ports.gateway}"

    @property
    def broker_url(self) -> str:
        """Address of the broker, with its password."""
        return self.options.broker or valkey.url(self.ports.broker, self.layout.secret(BROKER_PASSWORD))

    @property
    def admin_token(self) -> str:
        """Token of the project's administrator."""
        return self.layout.secret(ADMIN_TOKEN, prefix=TOKEN_PREFIX)

    def service_environment(self) -> dict[str, str]:
        """Return what the API and the control workers get. Settings that are not ours to choose are passed on."""
        layout = self.layout
        passed_on = {
            name: value
            for name, value in os.environ.items()
            if name.startswith(PREFIX) and not name.startswith(RUNNER) and name not in _OF_THE_CLIENT
        }
        return (
            python_environment(layout)
            | passed_on
            | {
                "SLUICEGATE_ENVIRONMENT": "development",
                "SLUICEGATE_DATABASE_URL": postgres.url(layout, role=postgres.APPLICATION),
                "SLUICEGATE_BROKER_URL": self.broker_url,
                "SLUICEGATE_STORAGE_DIR": str(layout.blobs),
                "SLUICEGATE_SIGNING_KEY": str(layout.signing_key),
                "SLUICEGATE_PUBLIC_URL": self.url,
                f"SLUICEGATE_GATEWAYS__{gateway.NAME}__DIRECTORY": str(layout.gateway),
                f"SLUICEGATE_GATEWAYS__{gateway.NAME}__URL": self.gateway_url,
            }
        )

    def runner_environment(self) -> dict[str, str]:
        """Return what the runner gets: neither the database nor the signing key."""
        layout = self.layout
        passed_on = {name: value for name, value in os.environ.items() if name.startswith(RUNNER)}
        if self.options.broker is not None and "SLUICEGATE_BROKER_CA" in os.environ:
            passed_on[f"{RUNNER}BROKER_CA"] = os.environ["SLUICEGATE_BROKER_CA"]
        return (
            python_environment(layout)
            | passed_on
            | {
                f"{RUNNER}NAME": RUNNER_NAME,
                f"{RUNNER}RUNNER_CLASS": self.options.runner_class,
                f"{RUNNER}API_URL": self.url,
                f"{RUNNER}TOKEN": layout.secret(RUNNER_TOKEN, prefix=TOKEN_PREFIX),
                f"{RUNNER}BROKER_URL": self.broker_url,
                f"{RUNNER}DATA_DIR": str(layout.runner),
                f"{RUNNER}STORE_DIR": str(layout.blobs),
            }
        )


_OF_THE_CLIENT: Final = frozenset({"SLUICEGATE_URL", "SLUICEGATE_TOKEN"})


def foreign_broker() -> str | None:
    """Return the broker that the stack is to use, as this process's environment says; none for one of its own.

    Raises:
        DataRefused: it is of another kind. The address is not said: a password may be in it.
    """
    told = os.environ.get("SLUICEGATE_BROKER_URL") or None
    if told is not None and not is_broker(told):
        text = f"SLUICEGATE_BROKER_URL is not usable: {BROKER_TOLD}; unset it for a Valkey of the stack's own"
        raise DataRefused(text, status=2)
    return told


def program_environment(layout: Layout) -> dict[str, str]:
    """Return the environment of a program that is not ours."""
    known = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    return known | {"LANG": "C.UTF-8", "LC_ALL": "C.UTF-8", "XDG_RUNTIME_DIR": str(layout.run)}


def python_environment(layout: Layout) -> dict[str, str]:
    """Return the environment of one of our own processes, without any setting."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    # The packages that this process runs, also where they are not installed but found by PYTHONPATH.
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(dict.fromkeys([root, *filter(None, kept.get("PYTHONPATH", "").split(os.pathsep))]))
    mine = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "XDG_RUNTIME_DIR": str(layout.run)}
    return _ONE_THREAD | kept | mine


def python(*arguments: str) -> tuple[str, ...]:
    """Return a command line of this interpreter that finds no module in the working directory."""
    return (sys.executable, "-P", *arguments)


def table(stack: Stack, gateway_part: Part) -> list[Part]:
    """Return every part of a stack.

    Stopping begins with what acts (beat, control worker, runner), so that nobody judges a stack that goes away; the
    live engines serve on without their runner. Then the gateway drains, and what the others stand on ends last.
    """
    layout = stack.layout
    service = stack.service_environment()
    owner = service | {"SLUICEGATE_DATABASE_URL": postgres.url(layout)}
    foreign = program_environment(layout)
    secrets = layout.secrets
    prepare = python(
        *("-m", "workers.embedded.prepare", postgres.APPLICATION, stack.options.project),
        *(str(secrets / ADMIN_TOKEN), str(secrets / RUNNER_TOKEN)),
    )
    brokers = []
    if stack.options.broker is None:
        password = layout.secret(BROKER_PASSWORD)
        brokers.append(valkey.part(layout, foreign, port=stack.ports.broker, password=password))
    base = ("postgres", *(part.name for part in brokers), "prepare")
    found = [
        postgres.part(layout, foreign),
        *brokers,
        Part("prepare", prepare, layout.run, owner, after=("postgres",), is_step=True),
        gateway_part,
        Part(
            name="api",
            argv=python("-m", "registry.api", "--host", HOST, "--port", str(stack.ports.api)),
            workdir=layout.run,
            environment=service,
            after=base,
            ready=lambda: answers(stack.ports.api, "/readyz"),
            stop_rank=3,
            stop_seconds=15.0,
        ),
        _worker("control", "workers.app", layout.run, service, queue="control", after=base),
        _beat(layout.run, service, after=base),
    ]
    if stack.options.is_with_runner:
        queue = f"runner.{stack.options.runner_class}"
        environment = stack.runner_environment()
        runner = _worker("runner", "workers.runner", layout.run, environment, queue=queue, after=base)
        # It ends the engines of gates and tells the service, which is waited for.
        runner = replace(runner, ready=lambda: is_registered(stack), stop_seconds=45.0)
        found.append(runner)
    return found


def _worker(
    name: str,
    application: str,
    workdir: Path,
    environment: dict[str, str],
    *,
    queue: str,
    after: tuple[str, ...],
) -> Part:
    place = ("-Q", queue, "-n", f"{name}@sluicegate", "--pool", "threads", "--concurrency", "4")
    return Part(
        name=name,
        argv=python("-m", "celery", "-A", application, "worker", *place, *_CELERY),
        workdir=workdir,
        environment=environment,
        after=after,
        ready_text=f"{name}@sluicegate ready.",
        stop_seconds=20.0,
    )


def _beat(workdir: Path, environment: dict[str, str], *, after: tuple[str, ...]) -> Part:
    quiet = ("--pidfile", "", "--loglevel", "WARNING")  # else it writes a line a second
    return Part(
        name="beat",
        argv=python("-m", "celery", "-A", "workers.beat", "beat", *quiet),
        workdir=workdir,
        environment=environment,
        after=after,
        ready_text="LocalTime ->",  # of the banner, once the application is loaded
    )


def answers(port: int, path: str) -> bool:
    """Tell whether a server on loopback answers 200 within half a second. Raises OSError when nobody listens."""
    return _get(port, path)[0] == 200


def is_registered(stack: Stack) -> bool:
    """Tell whether the service knows our runner as alive. Raises OSError when the service does not answer."""
    status, body = _get(stack.ports.api, "/v1/runners", authorization=f"Bearer {stack.admin_token}")
    if status != 200:
        return False
    items = json.loads(body)["items"]
    return any(each["name"] == RUNNER_NAME and each["is_alive"] for each in items)


def _get(port: int, path: str, **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(HOST, port, timeout=0.5)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    except http.client.HTTPException:
        return 0, b""
    finally:
        connection.close()
