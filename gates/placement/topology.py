"""Layouts of one replica over devices: how many, who shares a layer, and which layers lie where."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from gates.placement import PlacementUnknown
from gates.static.shape import Shape
from schemas.short import many

DEVICES_OF_A_NODE = 8
"""Devices behind one fast link, within which tensor parallelism stays."""
_TEXT = re.compile(r"(tp|pp|ep)=?([1-9][0-9]{0,3})")


@dataclass(frozen=True, slots=True)
class Topology:
    """A layout: devices that share each layer, pipeline stages, and devices over which experts are spread.

    Experts beyond `tensor` are spread over further groups of devices that each attend to other sequences
    (attention data parallelism), so a replica takes `max(tensor, expert) · pipeline` devices.
    """

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1

    @property
    def devices(self) -> int:
        """Devices of one replica."""
        return max(self.tensor, self.expert) * self.pipeline

    @property
    def groups(self) -> int:
        """Groups of devices that each attend to sequences of their own."""
        return max(1, self.expert // self.tensor)

    def __str__(self) -> str:
        further = f",pp={self.pipeline}" if self.pipeline > 1 else ""
        return f"tp={self.tensor}{further}" + (f",ep={self.expert}" if self.expert > 1 else "")


def parse(text: str) -> Topology:
    """Return a layout written as `tp=4`, `tp=4,pp=2` or `tp=2,ep=8`.

    Raises:
        PlacementUnknown: it is written otherwise, or says something twice.
    """
    found: dict[str, int] = {}
    for word in text.lower().split(","):
        match = _TEXT.fullmatch(word.strip())
        if match is None or match[1] in found:
            raise PlacementUnknown("topology", f"{text!r} is no layout: write tp=4, tp=4,pp=2 or tp=2,ep=8")
        found[match[1]] = int(match[2])
    return Topology(found.get("tp", 1), found.get("pp", 1), found.get("ep", 1))


def candidates(most_devices: int = DEVICES_OF_A_NODE, *, spread_experts: bool = False) -> tuple[Topology, ...]:
    """Return layouts to try: powers of two up to `most_devices`, fewest devices first, then fewest stages.

    Args:
        most_devices: of one replica.
        spread_experts: whether experts are spread whole over the devices that share a layer.
    """
    powers = [2**n for n in range(most_devices.bit_length()) if 2**n <= most_devices]
    found = [
        Topology(tensor, pipeline, tensor if spread_experts else 1)
        for tensor in powers
        for pipeline in powers
        if tensor <= DEVICES_OF_A_NODE and tensor * pipeline <= most_devices
    ]
    return tuple(sorted(found, key=lambda one: (one.devices, one.pipeline)))


def stages(layers: int, pipeline: int) -> tuple[range, ...]:
    """Return the layers of each pipeline stage.

    What is left over after an even division goes to the stages before the last, from the back: the last one holds
    the head already. Source: vLLM's `get_pp_indices`.
    """
    sizes = [layers // pipeline] * pipeline
    for number in range(layers % pipeline):
        sizes[-2 - number if pipeline > 1 else -1] += 1
    found, start = [], 0
    for size in sizes:
        found.append(range(start, start + size))
        start += size
    return tuple(found)


def obstacles(
    shape: Shape, topology: Topology, *, is_gguf: bool = False, even_experts: int | None = None
) -> Iterator[str]:
    """Yield why a layout cannot be laid out at all, whatever the memory: what is divided must divide.

    `even_experts` are experts of which each device has to have as many; None where a remainder is spread.
    """
    heads, keys, tensor = shape.heads, shape.kv_heads, topology.tensor
    if is_gguf and (tensor > 1 or topology.expert > 1):
        yield "a GGUF file's engine divides it by layers: use pp"
        return
    if heads and heads % tensor:
        yield f"{many(heads, 'attention head')} cannot be divided over {tensor} devices"
    if keys and not shape.is_mla and keys % tensor and tensor % keys:
        yield f"{many(keys, 'key-value head')} can be neither divided nor copied over {tensor} devices"
    if shape.layers and topology.pipeline > shape.layers:
        yield f"{many(shape.layers, 'layer')} cannot be divided over {topology.pipeline} stages"
    if topology.expert > 1 and not shape.experts:
        yield f"the model has no experts to spread over {topology.expert} devices"
    elif shape.experts and topology.expert > shape.experts:
        yield f"{many(shape.experts, 'expert')} cannot be spread over {topology.expert} devices"
    elif even_experts is not None and even_experts % topology.expert:
        yield f"{many(even_experts, 'expert')} cannot be divided evenly over {topology.expert} devices"
    if topology.expert % tensor and tensor % topology.expert:
        yield f"ep {topology.expert} and tp {tensor}: one must divide the other"
