"""The clusters that one Envoy is told of: added before routes name them, and gone when nothing does.

Envoy takes a document in milliseconds, or not at all while it is silent. So whoever holds the gateway's lock only looks
whether it has, and waits for it without the lock: see `workers.traffic.waiting`.
"""

import contextlib
import json
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from gates.router import Arm
from schemas.problems import Problem
from workers.traffic import envoy_config, waiting
from workers.traffic.desired import write_atomically
from workers.traffic.envoy_admin import EnvoyAdmin
from workers.traffic.problems import ArmNotHealthy, GatewayDown, NotAcknowledged, Rejected
from workers.traffic.waiting import Wait

SILENT_SECONDS: Final = 1.0
"""How long Envoy may be silent before whoever waits for it gives up, for now."""
REFUSALS: Final = ("update_rejected", "update_failure")
_STATS: Final = "cluster_manager.cds."

Arms = Iterable[tuple[Arm, Arm | None]]
"""Each arm with the one behind it, as `envoy_config.clusters` takes them."""


class Clusters:
    """`cds.json` of one gateway. All of it is under the gateway's lock, but for `await_taken`.

    Args:
        path: of the file.
        waits: folder of those who wait for something in it.
        admin: of the Envoy that reads it, to be asked without the lock.
        brief: of the same, to be asked with the lock held.
    """

    def __init__(self, path: Path, waits: Path, admin: EnvoyAdmin, brief: EnvoyAdmin) -> None:
        self.path = path
        self.waits = waits
        self._admin = admin
        self._brief = brief

    def document(self) -> dict[str, Any]:
        """Return what is in place. Raises FileNotFoundError or ValueError where nothing whole is."""
        return dict(json.loads(self.path.read_bytes()))

    def write(self, document: dict[str, Any]) -> None:
        """Put clusters in place, with those beside them that somebody waits for. They are written into `document`."""
        with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError):  # at start nothing may be whole
            self._keep_waited_for(document)
        write_atomically(self.path, as_bytes(document))

    def add(self, revision: int, arms: Arms, wait: Wait) -> bool:
        """Have Envoy told of the clusters of some arms; tell whether there was one that it had not been told of.

        What is known already stays until something is retired: somebody else may wait for a replica to be reached.
        Raises GatewayDown, and has told it nothing then.
        """
        # Added and retired again it is another version each time, so that what is acknowledged is this document.
        wanted = envoy_config.clusters(f"r{revision}.{time.monotonic_ns()}", arms)
        names, known = envoy_config.cluster_names(wanted), self.document()
        if names <= envoy_config.cluster_names(known):
            return False
        wanted["resources"] += [each for each in known["resources"] if each["name"] not in names]
        wait.refused, wait.written = _refusals(self._brief.stats(_STATS)), wanted["version_info"]
        write_atomically(self.path, as_bytes(wanted))
        return True

    def retire(self, version: str, arms: Arms) -> None:
        """Remove the clusters that no arm names and nobody waits for any more; open streams on them run on."""
        document = envoy_config.clusters(f"{version}.{time.monotonic_ns()}", arms)
        self._keep_waited_for(document)
        if envoy_config.cluster_names(document) != envoy_config.cluster_names(self.document()):
            write_atomically(self.path, as_bytes(document))

    def obstacle(self, arms: Sequence[Arm], wait: Wait, *, is_added: bool) -> Problem | None:
        """Return why Envoy could not take routes to arms now; None when it has what is in place and reaches the arms.

        Args:
            arms: those that must pass its health check.
            wait: of whoever asks, who takes notice of what is seen.
            is_added: something was put in place just now.
        """
        if is_added:
            return NotAcknowledged(f"Envoy was told of {wait.written} too late to take it")
        version = self.document()["version_info"]
        try:
            stats = self._brief.stats(_STATS)
            if stats.get("version_text") != version:
                if version == wait.written and _refusals(stats) > wait.refused:
                    return Rejected(f"Envoy refused {version}; its log says why")
                return NotAcknowledged(f"Envoy did not take {version} in time")
            wait.taken()
            healthy: Collection[str] = self._brief.healthy() if arms else ()
        except GatewayDown as problem:
            return problem
        ill = next((arm for arm in arms if arm.cluster not in healthy), None)
        if ill is None:
            return None
        return ArmNotHealthy(f"{ill.name} at {ill.address} does not pass the gateway's health check")

    def await_taken(self, wait: Wait) -> None:
        """Return when another try may do: by what Envoy says, or because the time is up. Without the lock.

        Raises GatewayDown when Envoy has been silent for a while.
        """
        pause, heard = 0.002, time.monotonic()
        while not wait.is_over():
            time.sleep(pause)
            pause = min(pause * 1.5, 0.1)
            try:
                if self._is_worth_a_try(wait):
                    return
                heard = time.monotonic()
            except GatewayDown:
                # It may be that it is started again.
                if time.monotonic() - heard >= SILENT_SECONDS:
                    raise
        wait.is_last = True

    def _is_worth_a_try(self, wait: Wait) -> bool:
        stats, document = self._admin.stats(_STATS), self.document()
        if not wait.kept <= envoy_config.cluster_names(document):
            return True  # it was silent when it was to be told of them
        if stats.get("version_text") != document["version_info"]:
            return _refusals(stats) > wait.refused
        wait.taken()
        return not wait.reached or wait.reached <= self._admin.healthy()

    def _keep_waited_for(self, document: dict[str, Any]) -> None:
        if waited := waiting.kept(self.waits) - envoy_config.cluster_names(document):
            document["resources"] += [each for each in self.document()["resources"] if each["name"] in waited]


def as_bytes(document: Mapping[str, Any]) -> bytes:
    """Return a document as it is written."""
    return json.dumps(document, indent=1).encode() + b"\n"


def _refusals(stats: Mapping[str, str | int]) -> int:
    return sum(int(stats.get(name, 0)) for name in REFUSALS)
