"""Whether a machine can run a bundle: what the bundle needs, what the machine has, and where the two do not meet.

Pure, and the same for whoever asks: before a job is made, when a runner looks for one, and to say what one waits for.
"""

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Self

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from gates.static.rules import capability
from schemas.bundle import Bundle, Role
from schemas.common import Closed, Digest, Integer, Positive, ShortText
from schemas.result import GateResult, Verdict
from schemas.runner import SPEAKS, Accelerator, Fingerprint, LauncherName

BEFORE_BOOT = frozenset({"integrity", "static", "placement"})
"""Gates that read files and start no engine: they run on any machine of the class."""
SHARE_OF_MEMORY = 0.9
"""Of a machine's memory that engines may take together."""
_ARCHITECTURE = re.compile(r"(?:sm|compute|cuda)[-_ ]?[0-9]{2,3}[a-z]?|[0-9]{1,2}\.[0-9]")
_HELD = frozenset({Role.WEIGHTS, Role.ADAPTER, Role.DRAFT})
"""Roles of files that lie in memory while an engine runs."""


class Needs(Closed):
    """What one replica of a bundle takes, as far as its document says it."""

    engine: ShortText
    version: ShortText
    image: ShortText | None = None
    environment: Digest | None = None
    accelerator: ShortText
    count: Integer
    memory_bytes: Positive | None = None
    mig: ShortText | None = None
    driver: ShortText | None = None
    cuda: ShortText | None = None
    interconnect: ShortText | None = None
    nodes: Positive
    held_bytes: Integer
    """Bytes of the files that an engine keeps in memory: less, no layout and no setting can make it take."""
    planned_bytes: Positive | None = None
    """On a processor: what a plan of its memory adds up to, with the cache of all its sequences, once there is one."""
    device_bytes: Positive | None = None
    """On accelerators: the memory that the fullest of them has to have by such a plan, with what no engine may use."""
    beside: "Needs | None" = None
    """What another replica takes that runs at the same time: that of the bundle that a drill goes back to."""

    @classmethod
    def of(cls, bundle: Bundle) -> Self:
        """Return what a bundle needs; its layout may take more devices than its hardware row counts."""
        hardware, layout, devices = bundle.hardware, bundle.topology, devices_of(bundle)
        return cls(
            engine=bundle.engine.name,
            version=bundle.engine.version,
            image=bundle.engine.image,
            environment=bundle.engine.environment,
            accelerator=hardware.accelerator,
            count=0 if hardware.accelerator == "cpu" else max(hardware.count, devices),
            memory_bytes=hardware.memory_bytes,
            mig=hardware.mig,
            driver=hardware.driver,
            cuda=hardware.cuda,
            interconnect=hardware.interconnect,
            nodes=layout.nodes,
            held_bytes=sum(file.size for file in bundle.files if file.role in _HELD),
        )

    @property
    def machine_bytes(self) -> int:
        """Bytes of the machine's own memory that it takes at least; with accelerators the weights lie there."""
        other = self.beside.machine_bytes if self.beside is not None else 0
        return other + (max(self.held_bytes, self.planned_bytes or 0) if self.count == 0 else 0)

    def __str__(self) -> str:
        alone = f"{self.hardware()}, {self.served_by()}"
        return alone if self.beside is None else f"{alone}, and beside it {self.beside}"

    def hardware(self) -> str:
        """Return the machine that it takes, in words."""
        parts = [self._devices()]
        parts += [f"driver {self.driver}"] if self.driver else []
        parts += [f"CUDA {self.cuda}"] if self.cuda else []
        parts += [f"links by {self.interconnect}"] if self.interconnect and self.count > 1 else []
        parts += [f"{self.nodes} machines"] if self.nodes > 1 else []
        return ", ".join(parts)

    def _devices(self) -> str:
        if self.count == 0:
            return "a processor" + (f" with {_size(self.memory_bytes)}" if self.memory_bytes else "")
        least = max(self.memory_bytes or 0, self.device_bytes or 0)
        each = f" of {_size(least)}" if least else ""
        return f"{self.count} × {self.accelerator}{each}" + (f" as {self.mig}" if self.mig else "")

    def served_by(self) -> str:
        """Return the engine in words, with what names it exactly."""
        return f"{self.engine} {self.version} in {self.image or self.environment}"


@dataclass(frozen=True, slots=True)
class Offer:
    """What a machine has: its hardware, its engines, the digests of their environments, and how it starts them."""

    fingerprint: Fingerprint
    engines: Collection[str]
    environments: Mapping[str, str] = field(default_factory=dict)
    launcher: LauncherName = "process"
    speaks: int = SPEAKS
    """Version of claims that its runner understands; 0 for one from before there were versions."""

    def __str__(self) -> str:
        groups: dict[str, int] = {}
        for one in self.fingerprint.accelerators:
            name = f"{one.sku}{f' as {one.mig}' if one.mig else ''} of {_size(one.memory_bytes)}"
            groups[name] = groups.get(name, 0) + 1
        cards = [f"{count} × {name}" for name, count in groups.items()]
        return (
            ", ".join(cards)
            or f"no accelerator, only a processor with {_size(self.fingerprint.memory_bytes)} of memory"
        )


def devices_of(bundle: Bundle) -> int:
    """Return over how many devices a bundle's layout spreads."""
    layout = bundle.topology
    # Experts may be spread over the devices of several attention groups, which data parallelism counts already.
    group = layout.tensor_parallel * layout.context_parallel
    return max(group * layout.data_parallel, layout.expert_parallel) * layout.pipeline_parallel


def planned(needs: Needs, bundle: Bundle, result: GateResult) -> Needs:
    """Return what a bundle takes with what a result of the gate `placement` that passed says of its memory.

    On a processor every line of the fullest device's ledger, and the cache of all sequences that the bundle promises,
    on each device; on accelerators what the fullest has to have for its lines and its share of those sequences. As
    before where the result does not say it.
    """
    if result.verdict is not Verdict.PASSED:
        return needs
    said = {one.name: one.value for one in result.measurements}
    usable, room, sequence = (said.get(name) for name in ("usable", "cache_room", "sequence"))
    if usable is None or room is None or sequence is None:
        return needs
    if bundle.hardware.accelerator == "cpu":
        taken = (usable - room + sequence * bundle.runtime.max_sequences) * devices_of(bundle)
        return needs.model_copy(update={"planned_bytes": max(1, math.ceil(taken))})
    device, fitted = said.get("device"), said.get("sequences")
    if not device or not fitted or usable <= 0 or sequence <= 0:
        return needs
    # Groups of devices hold sequences of their own, so that each device has a share of them.
    share = math.ceil(bundle.runtime.max_sequences * (room // sequence) / fitted)
    least = math.ceil((usable - room + sequence * share) * device / usable)
    return needs.model_copy(update={"device_bytes": max(1, least)})


def asked(needs: Needs, among: Iterable[Offer]) -> str:
    """Return in words what machines should have, without an engine that each of them has."""
    is_whole = needs.beside is not None or any(list(_engine(needs, one)) for one in among)
    return str(needs) if is_whole else needs.hardware()


def obstacles(needs: Needs, offer: Offer) -> list[str]:
    """Return why a machine can never run what needs this, each as one sentence; none when it can.

    What cannot be read, such as a constraint on the driver that is none, is an obstacle too.
    """
    found = [*_engine(needs, offer), *_hardware(needs, offer)]
    if needs.beside is None:
        return found
    # Whether its engine is here too is the drill's to find out: that of what is accepted may be an older one.
    found += [f"for the accepted bundle beside it: {one}" for one in _hardware(needs.beside, offer)]
    if found:
        return found
    machine = offer.fingerprint
    if not offer.speaks and needs.count + needs.beside.count:
        return ["its version is older, and gives one engine the accelerators of both; bring the runner up to date"]
    if positions(needs, machine) is None:
        return [f"it has {offer}, and a drill takes what both bundles do at once"]
    if not has_memory(needs, machine, 0):
        both = _size(needs.machine_bytes)
        return [f"it has {_size(machine.memory_bytes)} of memory, and both bundles at once take {both}"]
    return []


def positions(needs: Needs, fingerprint: Fingerprint, taken: Collection[int] = ()) -> list[int] | None:
    """Return which accelerators a replica gets, by their place in the fingerprint; None when too few are free.

    Those of one NUMA node come first, so that a replica that fits in one does not span two. Behind its own are those of
    a replica beside it, which are others.
    """
    own = _own_positions(needs, fingerprint, taken)
    if own is None or needs.beside is None:
        return own
    other = positions(needs.beside, fingerprint, {*taken, *own})
    if other is None and (other := positions(needs.beside, fingerprint, taken)) is not None:
        # It fits fewer of them, so it chooses first.
        own = _own_positions(needs, fingerprint, {*taken, *other})
    return None if own is None or other is None else own + other


def _own_positions(needs: Needs, fingerprint: Fingerprint, taken: Collection[int]) -> list[int] | None:
    free = [place for place, one in enumerate(fingerprint.accelerators) if place not in taken and _is_asked(needs, one)]
    if len(free) < needs.count:
        return None
    nodes = [fingerprint.accelerators[place].numa for place in free]
    enough = {node for node in nodes if nodes.count(node) >= needs.count}
    preferred = [place for place, node in zip(free, nodes, strict=True) if node in enough]
    first = fingerprint.accelerators[preferred[0]].numa if preferred else None
    near = [place for place in preferred if fingerprint.accelerators[place].numa == first]
    return (near or free)[: needs.count]


def products(needs: Needs, fingerprint: Fingerprint) -> list[str]:
    """Return the products of a machine that a replica may run on, as their driver names them, sorted."""
    return sorted({one.sku for one in fingerprint.accelerators if _is_asked(needs, one)})


def has_memory(needs: Needs, fingerprint: Fingerprint, reserved_bytes: int) -> bool:
    """Tell whether a machine has memory left for a replica beside what others reserved, in bytes."""
    return reserved_bytes + needs.machine_bytes <= fingerprint.memory_bytes * SHARE_OF_MEMORY


def _engine(needs: Needs, offer: Offer) -> Iterable[str]:
    if needs.engine == "external":
        if "external" not in offer.engines:
            yield "it speaks to no endpoint outside"
        return
    if needs.image is not None:
        if offer.launcher == "process":
            yield f"it starts engines as processes, and the bundle names the image {needs.image}"
    elif offer.launcher != "process":
        yield f"it starts engines from images, and the bundle names the environment {needs.environment}"
    elif needs.engine not in offer.engines:
        yield f"it has {', '.join(sorted(offer.engines)) or 'no engine'}, and not {needs.engine}"
    elif (found := offer.environments.get(needs.engine)) is not None and found != needs.environment:
        yield f"its {needs.engine} is {found}, and the bundle names {needs.version} in {needs.environment}"
    if needs.nodes > 1 and offer.launcher != "kubernetes":
        yield f"it is one machine, and a replica spans {needs.nodes}"


def _hardware(needs: Needs, offer: Offer) -> Iterable[str]:
    return _accelerators(needs, offer) if needs.count else _processor(needs, offer)


def _processor(needs: Needs, offer: Offer) -> Iterable[str]:
    memory = offer.fingerprint.memory_bytes
    if needs.memory_bytes is not None and memory < needs.memory_bytes:
        yield f"it has {_size(memory)} of memory, and the bundle asks for {_size(needs.memory_bytes)}"
    elif needs.held_bytes > memory * SHARE_OF_MEMORY:
        yield f"it has {_size(memory)} of memory, and the weights alone take {_size(needs.held_bytes)}"
    elif needs.planned_bytes is not None and needs.planned_bytes > memory * SHARE_OF_MEMORY:
        yield f"it has {_size(memory)} of memory, and by its plan a replica takes {_size(needs.planned_bytes)}"


def _accelerators(needs: Needs, offer: Offer) -> Iterable[str]:
    machine = offer.fingerprint
    fitting = [one for one in machine.accelerators if _is_asked(needs, one)]
    if len(fitting) < needs.count:
        yield f"it has {offer}"
        return
    least = min(one.memory_bytes for one in fitting)
    if least * needs.count < needs.held_bytes:
        yield f"its accelerators have {_size(least)} each, and {needs.count} of them hold {_size(needs.held_bytes)}"
    for name, constraint, found in (("driver", needs.driver, machine.driver), ("CUDA", needs.cuda, machine.cuda)):
        if constraint is not None and (why := _violated(name, constraint, found)) is not None:
            yield why
    if needs.interconnect is not None and needs.count > 1 and not _is_linked(needs.interconnect, machine.links):
        yield f"its accelerators are linked by {machine.links or 'nobody knows what'}, not {needs.interconnect}"


def _is_asked(needs: Needs, one: Accelerator) -> bool:
    """Tell whether an accelerator is of the model, profile and size that is asked for."""
    if one.mig != needs.mig or one.memory_bytes < max(needs.memory_bytes or 0, needs.device_bytes or 0):
        return False
    if _ARCHITECTURE.fullmatch(needs.accelerator.lower().strip()):
        wanted = capability(needs.accelerator)
        return wanted is not None and capability(one.sku) == wanted
    asked = _words(needs.accelerator)
    return bool(asked) and asked <= _words(one.sku)


def _words(name: str) -> set[str]:
    """Return a product's name as words: the driver says `NVIDIA H100 80GB HBM3` where a bundle says `nvidia-h100`."""
    return set(re.findall(r"[a-z0-9]+", name.lower())) - {"nvidia"}


def _violated(name: str, constraint: str, found: str | None) -> str | None:
    try:
        wanted = SpecifierSet(constraint)
    except InvalidSpecifier:
        return f"the bundle's constraint on the {name}, {constraint!r}, cannot be read: write it as >=12.4"
    if found is None:
        return f"it does not say its {name}, and the bundle asks for {constraint}"
    try:
        is_met = wanted.contains(Version(found), prereleases=True)
    except InvalidVersion:
        is_met = False
    return None if is_met else f"its {name} is {found}, and the bundle asks for {constraint}"


def _is_linked(wanted: str, links: str | None) -> bool:
    """Tell whether all pairs are linked as asked; `links` begins with the slowest kind of link between any two."""
    found = (links or "").lower().split()
    asked = wanted.lower().strip()
    if asked in {"pcie", "none"}:
        return True
    return bool(found) and found[0] == ("nvlink" if asked in {"nvlink", "nvswitch"} else asked)


def _size(count: int | None) -> str:
    return f"{(count or 0) / 1e9:,.1f} GB"
