"""What a gateway should do: one small document under a lock, and how it survives a controller that dies anywhere."""

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from gates.router import Arm, Split
from workers.traffic.problems import GatewayBusy

LOCK_SECONDS: Final = 15.0
ROLLBACK: Final = ".rollback."
"""In the version of a prepared document, between the revision it was rendered at and its target."""
EVERY_TARGET: Final = "all"
"""In place of a target: every prepared rollback at once, for the dead-man switch."""


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file by one rename(2), which is the event that Envoy's watcher acts on. Durable on return."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with beside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    beside.rename(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def locked(path: Path, *, timeout_seconds: float = LOCK_SECONDS) -> Iterator[None]:
    """Hold a lock that other processes see and that ends with this process.

    Raises:
        GatewayBusy: somebody else held it all the time.
    """
    with path.open("ab") as file:
        deadline = time.monotonic() + timeout_seconds
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise GatewayBusy(
                        f"{path.name} has been held for {timeout_seconds:g} s by another process"
                    ) from None
                time.sleep(0.02)
        yield


@dataclass(frozen=True, slots=True)
class Rollback:
    """Where a target goes back to.

    Args:
        arms: with their weights; empty for a target that had nothing before.
        silence_seconds: of the controller, after which the dead-man switch puts it in force.
    """

    arms: tuple[Arm, ...]
    silence_seconds: float


@dataclass(frozen=True, slots=True)
class Desired:
    """The splits of every target of a gateway, and where each would go back to.

    Args:
        revision: grows with every write of the gateway's documents.
        version: what `rds.json` in force must say.
        was: what it said when this was written, so that a write that was cut short is not taken for a restore.
        splits: by target.
        rollbacks: by target, where one is prepared.
        restored: targets whose present split is a rollback that was put in force.
    """

    revision: int = 0
    version: str = "r0"
    was: str = ""
    splits: Mapping[str, Split] = field(default_factory=dict)
    rollbacks: Mapping[str, Rollback] = field(default_factory=dict)
    restored: frozenset[str] = frozenset()

    def changed(self, **changes: Any) -> "Desired":
        """Return the next revision with some fields changed."""
        revision = self.revision + 1
        return replace(self, **{"revision": revision, "version": f"r{revision}", **changes})

    def shifted(self, split: Split) -> "Desired":
        """Return the next revision with one target's split replaced."""
        return self.changed(splits={**self.splits, split.target: split}, restored=self.restored - {split.target})

    def rolled_back(self, which: str) -> dict[str, Split]:
        """Return all splits with one target, or every prepared one, back where it would go."""
        chosen = self.rollbacks if which == EVERY_TARGET else {which: self.rollbacks[which]}
        back = {target: Split(target, self.next_revision(target), each.arms) for target, each in chosen.items()}
        return {**self.splits, **back}

    def every_split(self) -> list[Split]:
        """Return the present splits and the prepared ones, whose arms are the clusters that must exist."""
        return [*self.splits.values(), *(Split(target, 1, each.arms) for target, each in self.rollbacks.items())]

    def next_revision(self, target: str) -> int:
        """Return the least revision that a new split of a target may have."""
        split = self.splits.get(target)
        return 1 if split is None else split.revision + 1

    def rollback_version(self, which: str) -> str:
        """Return the version of a prepared document rendered now."""
        return f"r{self.revision}{ROLLBACK}{which}"

    def folded(self, live_version: str) -> "Desired":
        """Return this document after what was renamed into place behind it.

        A prepared rollback may have been put in force by the dead-man switch, or by a controller that died before
        it could write this down. Anything else that is in force is left to be written over.
        """
        _, marker, which = live_version.partition(ROLLBACK)
        if live_version in {self.version, self.was} or not marker:
            return self
        chosen = set(self.rollbacks) if which == EVERY_TARGET else {which} & set(self.rollbacks)
        if not chosen:
            return self
        left = {target: each for target, each in self.rollbacks.items() if target not in chosen}
        return self.changed(
            version=live_version, splits=self.rolled_back(which), rollbacks=left, restored=self.restored | chosen
        )

    def to_json(self) -> bytes:
        """Return the bytes of `gateway.json`."""
        document = {
            "schema": "sluicegate.dev/gateway/v1",
            "revision": self.revision,
            "version": self.version,
            "was": self.was,
            "targets": {
                target: {"revision": split.revision, "arms": [_arm(arm) for arm in split.arms]}
                for target, split in sorted(self.splits.items())
            },
            "rollbacks": {
                target: {"silence_seconds": each.silence_seconds, "arms": [_arm(arm) for arm in each.arms]}
                for target, each in sorted(self.rollbacks.items())
            },
            "restored": sorted(self.restored),
        }
        return json.dumps(document, indent=1).encode() + b"\n"

    @classmethod
    def from_json(cls, raw: bytes) -> "Desired":
        """Read `gateway.json`. Raises ValueError, KeyError or TypeError for what it is not."""
        document = json.loads(raw)
        return cls(
            revision=int(document["revision"]),
            version=str(document["version"]),
            was=str(document["was"]),
            splits={
                target: Split(target, each["revision"], tuple(Arm(**arm) for arm in each["arms"]))
                for target, each in document["targets"].items()
            },
            rollbacks={
                target: Rollback(tuple(Arm(**arm) for arm in each["arms"]), float(each["silence_seconds"]))
                for target, each in document["rollbacks"].items()
            },
            restored=frozenset(document["restored"]),
        )


def _arm(arm: Arm) -> dict[str, Any]:
    return {"name": arm.name, "cluster": arm.cluster, "address": arm.address, "weight_bp": arm.weight_bp}
