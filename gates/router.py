"""Traffic as the rest of the product sees it: arms, splits, and what a router must be able to do. No I/O.

A split is *desired* when it is written down, *applied* when the router has acknowledged it, and *observed* when
counted requests agree with it. The three are different facts and are never inferred from one another.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Protocol, runtime_checkable

WHOLE_BP: Final = 10_000
"""All traffic of a target, in basis points."""

STABLE: Final = "stable"
CANDIDATE: Final = "candidate"
ARMS: Final = (STABLE, CANDIDATE)

FALLBACK: Final = "+"
"""Between two cluster names: the cluster that sends the first one's share to the second while it cannot be reached."""

_TARGET = re.compile(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?@[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?")
_CLUSTER = re.compile(r"[A-Za-z0-9@./_-]{1,200}")
_ADDRESS = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,3}){3}|\[[0-9a-f:]+\]):([0-9]{1,5})")
_REPLICA = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def cluster_name(target: str, bundle: str, replica: str) -> str:
    """Name the router's cluster for one replica of a bundle on a target.

    A name is never pointed at another address: a new replica has a new name.

    Args:
        target: `name@environment`.
        bundle: bundle digest, `sha256:<64 hex>`; its first 12 digits go into the name.
        replica: identity of the running engine, unique for ever.

    Raises:
        ValueError: a part is malformed.
    """
    if not _TARGET.fullmatch(target):
        raise ValueError(f"not a target: {target!r}")
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", bundle):
        raise ValueError(f"not a bundle digest: {bundle!r}")
    if not _REPLICA.fullmatch(replica):
        raise ValueError(f"not a replica: {replica!r}")
    return f"{target}/{bundle[7:19]}/{replica}"


@dataclass(frozen=True, slots=True)
class Arm:
    """One side of a split: a replica and its share.

    Args:
        name: `stable` or `candidate`.
        cluster: see `cluster_name`.
        address: where the engine listens, `ip:port`.
        weight_bp: share in basis points, 0–10,000. An arm of weight 0 is kept ready and gets nothing.

    Raises:
        ValueError: a field is malformed.
    """

    name: str
    cluster: str
    address: str
    weight_bp: int

    def __post_init__(self) -> None:
        if self.name not in ARMS:
            raise ValueError(f"an arm is stable or candidate, not {self.name!r}")
        if not _CLUSTER.fullmatch(self.cluster):
            raise ValueError(f"not a cluster name: {self.cluster!r}")
        found = _ADDRESS.fullmatch(self.address)
        if found is None or not 0 < int(found[2]) < 65_536:
            raise ValueError(f"not an ip:port address: {self.address!r}")
        if not 0 <= self.weight_bp <= WHOLE_BP:
            raise ValueError(f"weight_bp {self.weight_bp} is outside 0–{WHOLE_BP}")

    def serves(self, bundle: str) -> bool:
        """Tell whether the replica is one of a bundle, by its cluster's name. A target's name may hold any digits."""
        return self.cluster.split("/")[1:2] == [bundle[7:19]]


@dataclass(frozen=True, slots=True)
class Split:
    """Who serves a target, and with what share.

    Args:
        target: `name@environment`.
        revision: grows with every split of the target, from 1; shown to clients as `x-release-rev`.
        arms: at most one of each name, weights summing to 10,000; empty when nothing may be served, and the
            target then answers 503.

    Raises:
        ValueError: weights do not sum, an arm stands twice, or two arms share a cluster or an address.
    """

    target: str
    revision: int
    arms: tuple[Arm, ...] = ()

    def __post_init__(self) -> None:
        if not _TARGET.fullmatch(self.target):
            raise ValueError(f"not a target: {self.target!r}")
        if self.revision < 1:
            raise ValueError(f"revision {self.revision} is below 1")
        total = sum(arm.weight_bp for arm in self.arms)
        if self.arms and total != WHOLE_BP:
            raise ValueError(f"weights sum to {total}, not {WHOLE_BP}")
        for what in ("name", "cluster", "address"):
            values = [getattr(arm, what) for arm in self.arms]
            if len(set(values)) != len(values):
                raise ValueError(f"two arms have the same {what}")

    def arm(self, name: str) -> Arm | None:
        """Return the arm of that name, or None when the split has none."""
        return next((arm for arm in self.arms if arm.name == name), None)

    def weight_bp(self, name: str) -> int:
        """Return an arm's share in basis points; 0 when the split has no such arm."""
        arm = self.arm(name)
        return arm.weight_bp if arm else 0

    def assigned(self, cluster: str | None) -> Arm | None:
        """Return the arm that a logged cluster stands for, with or without a fallback behind it."""
        if cluster is None:
            return None
        plain = cluster.partition(FALLBACK)[0]
        return next((arm for arm in self.arms if arm.cluster == plain), None)


@dataclass(frozen=True, slots=True)
class Applied:
    """A router's acknowledgement of a split.

    Args:
        split: what is in force.
        version: the router's own version of the document in force.
        acknowledged_seconds: from the change being visible to the router to its acknowledgement.
        probed_seconds: from the same instant to the first answer that carried the new revision.
    """

    split: Split
    version: str
    acknowledged_seconds: float
    probed_seconds: float


@dataclass(frozen=True, slots=True)
class Observed:
    """Requests counted by the arm they were assigned to.

    Args:
        target: `name@environment`.
        revision: requests of this revision of the split only.
        requests: ended requests by arm name.
        until: where to go on counting; opaque.
    """

    target: str
    revision: int
    requests: Mapping[str, int]
    until: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "requests", MappingProxyType(dict(self.requests)))


@runtime_checkable
class Router(Protocol):
    """What moves traffic: Envoy, a Gateway API route, KServe."""

    def apply(self, split: Split) -> Applied:
        """Put a split in force and return when the router has acknowledged it. Repeating it changes nothing."""
        ...

    def observe(self, target: str, since: str) -> Observed:
        """Count the target's ended requests under its applied revision since a position; `""` is the start."""
        ...
