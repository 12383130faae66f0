"""Reads NVIDIA accelerators through NVML, the library that comes with their driver: models, memory, MIG, links.

Where there is no such library, or no driver is loaded, there is no accelerator. Whatever else it refuses is an error:
hardware that is not understood is not guessed at.

Source: NVML API Reference, NVIDIA; the binding is nvidia-ml-py.
"""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml

from schemas.runner import Accelerator

PCI = Path("/sys/bus/pci/devices")
_LEVELS = {
    pynvml.NVML_TOPOLOGY_INTERNAL: "one board",
    pynvml.NVML_TOPOLOGY_SINGLE: "one switch",
    pynvml.NVML_TOPOLOGY_MULTIPLE: "several switches",
    pynvml.NVML_TOPOLOGY_HOSTBRIDGE: "one host bridge",
    pynvml.NVML_TOPOLOGY_NODE: "one NUMA node",
    pynvml.NVML_TOPOLOGY_SYSTEM: "several NUMA nodes",
}
_ABSENT = (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded)
_NOT_HERE = (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound)


@dataclass(frozen=True, slots=True)
class Found:
    """The accelerators of this machine. `identifiers` name them to CUDA, in the same order."""

    accelerators: tuple[Accelerator, ...] = ()
    identifiers: tuple[str, ...] = ()
    driver: str | None = None
    cuda: str | None = None
    links: str | None = None


def read(pci: Path = PCI) -> Found:
    """Read what there is. An accelerator in MIG mode stands for its MIG devices; one that has none offers nothing.

    Raises:
        pynvml.NVMLError: the driver is there and does not say, such as when its library is of another version.
    """
    try:
        pynvml.nvmlInit()
    except _ABSENT:
        return Found()
    try:
        return _read(pci)
    finally:
        pynvml.nvmlShutdown()


def _read(pci: Path) -> Found:
    boards = [pynvml.nvmlDeviceGetHandleByIndex(place) for place in range(pynvml.nvmlDeviceGetCount())]
    if not boards:
        return Found()
    found = [one for board in boards for one in _devices(board, pci)]
    version = pynvml.nvmlSystemGetCudaDriverVersion_v2()
    return Found(
        accelerators=tuple(accelerator for accelerator, _ in found),
        identifiers=tuple(identifier for _, identifier in found),
        driver=pynvml.nvmlSystemGetDriverVersion(),
        cuda=f"{version // 1000}.{version % 1000 // 10}",
        links=_links(boards),
    )


def _devices(board: Any, pci: Path) -> Iterator[tuple[Accelerator, str]]:
    sku, numa = pynvml.nvmlDeviceGetName(board), _numa(board, pci)
    if not _is_divided(board):
        yield _accelerator(sku, board, None, numa), pynvml.nvmlDeviceGetUUID(board)
        return
    for place in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(board)):
        with contextlib.suppress(pynvml.NVMLError_NotFound):
            device = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(board, place)
            name = pynvml.nvmlDeviceGetName(device)
            # As `NVIDIA H100 80GB HBM3 MIG 1g.10gb`.
            profile = name.rpartition(" MIG ")[2]
            yield _accelerator(sku, device, profile, numa), pynvml.nvmlDeviceGetUUID(device)


def _accelerator(sku: str, device: Any, profile: str | None, numa: int | None) -> Accelerator:
    memory = pynvml.nvmlDeviceGetMemoryInfo(device).total
    return Accelerator(sku=sku, memory_bytes=memory, mig=profile, numa=numa)


def _is_divided(board: Any) -> bool:
    try:
        current, _ = pynvml.nvmlDeviceGetMigMode(board)
    except _NOT_HERE:
        return False
    return bool(current == pynvml.NVML_DEVICE_MIG_ENABLE)


def _numa(board: Any, pci: Path) -> int | None:
    """Return the NUMA node of a board, as the kernel says; None where it says none."""
    # NVML writes the domain with eight digits, the kernel with four.
    address = pynvml.nvmlDeviceGetPciInfo(board).busId.lower()[-12:]
    try:
        node = int((pci / address / "numa_node").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _links(boards: Sequence[Any]) -> str | None:
    """Return how boards are linked, beginning with the slowest kind between any two; None for fewer than two.

    Boards in MIG mode count too: their devices reach each other over PCIe only.
    """
    pairs = list(itertools.combinations(range(len(boards)), 2))
    if not pairs:
        return None
    linked = [pair for pair in pairs if _has_nvlink(boards[pair[0]], boards[pair[1]])]
    if len(linked) == len(pairs):
        return f"nvlink between all {len(boards)}"
    levels = [pynvml.nvmlDeviceGetTopologyCommonAncestor(boards[one], boards[two]) for one, two in pairs]
    text = f"pcie, at most {_LEVELS.get(max(levels), 'unknown')} apart"
    if linked:
        text += "; nvlink between " + ", ".join(f"{one}-{two}" for one, two in linked)
    return text if len(text) <= 256 else text[:253] + "..."


def _has_nvlink(one: Any, two: Any) -> bool:
    try:
        status = pynvml.nvmlDeviceGetP2PStatus(one, two, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
    except _NOT_HERE:
        return False
    return bool(status == pynvml.NVML_P2P_STATUS_OK) and not (_is_divided(one) or _is_divided(two))
