"""Our programs as processes of their own, as `sluicegate up` starts them, on a test's database and broker."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from registry.service import Service
from tests.support.runners import CLASS, Bench

ROOT = Path(__file__).parents[2]
QUIET = ("--without-gossip", "--without-mingle", "--without-heartbeat")
RUNNER = "SLUICEGATE_RUNNER__"
CELERY = ("celery",)


def runner_environment(bench: Bench, broker_url: str, name: str = "r1") -> dict[str, str]:
    """Return what a runner of a bench gets."""
    settings = bench.settings(name)
    return {
        f"{RUNNER}NAME": settings.name,
        f"{RUNNER}RUNNER_CLASS": settings.runner_class,
        f"{RUNNER}API_URL": settings.api_url,
        f"{RUNNER}TOKEN": settings.token.get_secret_value(),
        f"{RUNNER}BROKER_URL": broker_url,
        f"{RUNNER}DATA_DIR": str(settings.data_dir),
        f"{RUNNER}STORE_DIR": str(settings.store_dir),
    }


def service_environment(service: Service, broker_url: str) -> dict[str, str]:
    """Return what control workers and the clock get."""
    settings = service.settings
    return {
        "SLUICEGATE_ENVIRONMENT": "development",
        "SLUICEGATE_DATABASE_URL": service.database.engine.url.render_as_string(hide_password=False),
        "SLUICEGATE_BROKER_URL": broker_url,
        "SLUICEGATE_STORAGE_DIR": str(settings.storage_dir),
        "SLUICEGATE_SIGNING_KEY": str(settings.signing_key),
        "SLUICEGATE_RELEASE_LEASE_SECONDS": str(settings.release_lease_seconds),
    }


@contextlib.contextmanager
def program(
    words: Sequence[str], environment: Mapping[str, str], log: Path, *, module: Sequence[str] = CELERY
) -> Iterator["subprocess.Popen[bytes]"]:
    """Run `python -m MODULE WORDS…` while the context lasts; what it says is appended to a file."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLUICEGATE_")}
    everything = {**kept, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **environment}
    command = [sys.executable, "-P", "-m", *module, *words]
    with (
        log.open("ab") as said,
        subprocess.Popen(command, env=everything, stdout=said, stderr=said, cwd=log.parent) as child,
    ):
        try:
            yield child
        finally:
            child.kill()


def runner_words() -> list[str]:
    """Return the words that start a runner of the bench's class."""
    place = ["-Q", f"runner.{CLASS}", "--pool", "threads", "--concurrency", "2"]
    return ["-A", "workers.runner", "worker", *place, *QUIET]


def control_words(name: str = "control") -> list[str]:
    """Return the words that start a control worker."""
    place = ["-Q", "control", "-n", f"{name}@test", "--pool", "threads", "--concurrency", "4"]
    return ["-A", "workers.app", "worker", *place, *QUIET]


def beat_words() -> list[str]:
    """Return the words that start the clock."""
    return ["-A", "workers.beat", "beat", "--pidfile", "", "--loglevel", "WARNING"]
