"""A driver's library as the NVML binding sees it: boards of a test's choice behind the real binding."""

# ruff: noqa: N802 - the functions have the names that the library exports

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pynvml

GIBIBYTE = 1024**3


@dataclass(frozen=True)
class Device:
    """A board, or one MIG device of it. Links are by the place of the other board."""

    name: str = "NVIDIA H100 80GB HBM3"
    memory_bytes: int = 85_520_809_984
    uuid: str = "GPU-0"
    bus: str = "00000000:1B:00.0"
    mig: "Sequence[Device | None] | None" = None
    """MIG devices by slot, some of them empty; None where MIG is off."""
    nvlink: frozenset[int] = frozenset()
    far: dict[int, int] = field(default_factory=dict)
    """Level of the common ancestor with another board."""


class Library:
    """What `libnvidia-ml.so.1` exports. An attribute that is not here is a function that it lacks."""

    def __init__(
        self, boards: Sequence[Device], *, driver: str = "550.54.15", cuda: int = 12040, failing: int = 0
    ) -> None:
        """Have these boards; with `failing`, refuse to begin with that error."""
        self.is_open = False
        self._boards, self._driver, self._cuda, self._failing = list(boards), driver, cuda, failing
        self._handles: list[Device] = []

    def nvmlInitWithFlags(self, _flags: int) -> int:
        self.is_open = not self._failing
        return self._failing

    def nvmlShutdown(self) -> int:
        self.is_open = False
        return 0

    def nvmlSystemGetDriverVersion(self, buffer: Any, _length: Any) -> int:
        buffer.value = self._driver.encode()
        return 0

    def nvmlSystemGetCudaDriverVersion_v2(self, version: Any) -> int:
        version._obj.value = self._cuda
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(self._boards)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:
        return self._give(handle, self._boards[index.value])

    def nvmlDeviceGetName(self, handle: Any, buffer: Any, _length: Any) -> int:
        buffer.value = self._device(handle).name.encode()
        return 0

    def nvmlDeviceGetUUID(self, handle: Any, buffer: Any, _length: Any) -> int:
        buffer.value = self._device(handle).uuid.encode()
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        memory._obj.total = self._device(handle).memory_bytes
        return 0

    def nvmlDeviceGetPciInfo_v3(self, handle: Any, info: Any) -> int:
        info._obj.busId = self._device(handle).bus.encode()
        return 0

    def nvmlDeviceGetMigMode(self, handle: Any, current: Any, pending: Any) -> int:
        device = self._device(handle)
        if "L4" in device.name:
            return int(pynvml.NVML_ERROR_NOT_SUPPORTED)
        current._obj.value = pending._obj.value = int(device.mig is not None)
        return 0

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Any, count: Any) -> int:
        count._obj.value = len(self._device(handle).mig or ())
        return 0

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, index: Any, found: Any) -> int:
        device = (self._device(handle).mig or ())[index.value]
        return int(pynvml.NVML_ERROR_NOT_FOUND) if device is None else self._give(found, device)

    def nvmlDeviceGetP2PStatus(self, one: Any, two: Any, _kind: int, status: Any) -> int:
        is_linked = self._boards.index(self._device(two)) in self._device(one).nvlink
        status._obj.value = pynvml.NVML_P2P_STATUS_OK if is_linked else pynvml.NVML_P2P_STATUS_NOT_SUPPORTED
        return 0

    def nvmlDeviceGetTopologyCommonAncestor(self, one: Any, two: Any, level: Any) -> int:
        level._obj.value = self._device(one).far[self._boards.index(self._device(two))]
        return 0

    def _give(self, handle: Any, device: Device) -> int:
        self._handles.append(device)
        ctypes.cast(handle, ctypes.POINTER(ctypes.c_void_p))[0] = len(self._handles)
        return 0

    def _device(self, handle: Any) -> Device:
        return self._handles[(ctypes.cast(handle, ctypes.c_void_p).value or 0) - 1]
