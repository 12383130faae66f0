"""Accelerators as the driver's library tells them, read through the real binding."""

import pynvml
import pytest

from schemas.runner import Accelerator
from tests.support.nvml import GIBIBYTE, Device, Library
from workers import nvml
from workers.fingerprint import fingerprint

H100 = "NVIDIA H100 80GB HBM3"


@pytest.fixture
def load(monkeypatch):
    """Have the binding load a library of the test's choice; it is given back and closed after each reading."""

    def loaded(*boards, **changes):
        library = Library(boards, **changes)
        monkeypatch.setattr(pynvml, "CDLL", lambda _: library)
        monkeypatch.setattr(pynvml, "nvmlLib", None)
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
        return library

    return loaded


def test_a_machine_without_a_driver_has_no_accelerator(load, monkeypatch):
    load(failing=pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    assert nvml.read() == nvml.Found()
    load()
    assert nvml.read() == nvml.Found()

    def missing(name):
        raise OSError(name)

    load()
    monkeypatch.setattr(pynvml, "CDLL", missing)
    assert nvml.read() == nvml.Found()


def test_a_driver_that_does_not_speak_is_an_error_and_not_a_machine_without_accelerators(load):
    load(failing=pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)
    with pytest.raises(pynvml.NVMLError, match="version mismatch"):
        nvml.read()


def test_each_board_is_read_with_its_memory_its_numa_node_and_what_cuda_calls_it(load, tmp_path):
    for address, node in (("0000:1b:00.0", "1\n"), ("0000:1c:00.0", "-1\n")):
        (tmp_path / address).mkdir()
        (tmp_path / address / "numa_node").write_text(node)
    library = load(
        Device(uuid="GPU-a", nvlink=frozenset({1})), Device(uuid="GPU-b", bus="00000000:1C:00.0", nvlink=frozenset({0}))
    )
    found = nvml.read(tmp_path)
    assert found.accelerators == (
        Accelerator(sku=H100, memory_bytes=85_520_809_984, numa=1),
        Accelerator(sku=H100, memory_bytes=85_520_809_984),
    )
    assert found.identifiers == ("GPU-a", "GPU-b")
    assert (found.driver, found.cuda, found.links) == ("550.54.15", "12.4", "nvlink between all 2")
    assert not library.is_open


def test_a_board_in_mig_mode_stands_for_its_mig_devices_and_reaches_others_over_pcie(load, tmp_path):
    slices = [
        Device(name=f"{H100} MIG 3g.40gb", memory_bytes=40 * GIBIBYTE, uuid="MIG-1"),
        None,
        Device(name=f"{H100} MIG 1g.10gb+me", memory_bytes=10 * GIBIBYTE, uuid="MIG-2"),
    ]
    far = {0: pynvml.NVML_TOPOLOGY_NODE, 1: pynvml.NVML_TOPOLOGY_NODE}
    load(Device(mig=slices, nvlink=frozenset({1}), far=far), Device(uuid="GPU-b", nvlink=frozenset({0}), far=far))
    found = nvml.read(tmp_path)
    assert [(one.mig, one.memory_bytes) for one in found.accelerators] == [
        ("3g.40gb", 40 * GIBIBYTE),
        ("1g.10gb+me", 10 * GIBIBYTE),
        (None, 85_520_809_984),
    ]
    assert found.identifiers == ("MIG-1", "MIG-2", "GPU-b")
    assert found.links == "pcie, at most one NUMA node apart"
    load(Device(mig=[]))
    assert nvml.read(tmp_path).accelerators == ()


def test_links_begin_with_the_slowest_kind_between_any_two(load, tmp_path):
    system, host = pynvml.NVML_TOPOLOGY_SYSTEM, pynvml.NVML_TOPOLOGY_HOSTBRIDGE
    load(
        Device(uuid="a", nvlink=frozenset({1}), far={1: host, 2: system}),
        Device(uuid="b", nvlink=frozenset({0}), far={2: system}),
        Device(uuid="c"),
    )
    assert nvml.read(tmp_path).links == "pcie, at most several NUMA nodes apart; nvlink between 0-1"


def test_a_board_that_knows_no_mig_is_one_accelerator_without_links(load):
    load(Device(name="NVIDIA L4", memory_bytes=24_152_899_584), driver="535.183.01", cuda=12020)
    found = fingerprint()
    assert [(one.sku, one.mig) for one in found.accelerators] == [("NVIDIA L4", None)]
    assert (found.driver, found.cuda, found.links) == ("535.183.01", "12.2", None)
