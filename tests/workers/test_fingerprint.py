import os

import pytest

from schemas.runner import Accelerator
from workers import fingerprint

GIBIBYTE = 1024**3

EPYC = """processor\t: 0
vendor_id\t: AuthenticAMD
model name\t: AMD EPYC 9654 96-Core Processor
flags\t\t: fpu vme sse4_2 movbe popcnt avx f16c fma avx2 bmi2 avx512f avx512_bf16 nopl

processor\t: 1
model name\t: another that must not be read
flags\t\t: amx_tile
"""
GRAVITON = (
    "processor\t: 0\nBogoMIPS\t: 2100.00\nFeatures\t: fp asimd evtstrm asimddp sve bf16 i8mm\nCPU part\t: 0xd40\n"
)

H200 = "NVIDIA H200, 143771, Disabled, 550.127.05\nNVIDIA H200, 143771, Disabled, 550.127.05\n"
L4 = "NVIDIA L4, 23034, [N/A], 535.183.01\n"
A100_MIG = "NVIDIA A100-SXM4-80GB, 81920, Enabled, 535.104.05\nNVIDIA A100-SXM4-80GB, 81920, Disabled, 535.104.05\n"
A100_LISTING = """GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77)
  MIG 3g.40gb     Device  0: (UUID: MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f)
  MIG 1g.10gb+me  Device  1: (UUID: MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb)
GPU 1: NVIDIA A100-SXM4-80GB (UUID: GPU-1b5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77)
"""
SUMMARY = """+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 550.127.05             Driver Version: 550.127.05     CUDA Version: 12.4     |
|-----------------------------------------+------------------------+----------------------+
"""


def test_the_processor_is_named_with_the_flags_that_change_kernels_sorted():
    model, flags = fingerprint.processor(EPYC, "x86_64")
    assert model == "AMD EPYC 9654 96-Core Processor"
    assert flags == "avx avx2 avx512_bf16 avx512f bmi2 f16c fma sse4_2"


def test_a_processor_without_a_name_is_its_architecture():
    assert fingerprint.processor(GRAVITON, "aarch64") == ("aarch64", "asimd asimddp bf16 i8mm sve")
    assert fingerprint.processor("", "riscv64") == ("riscv64", "none")


def test_memory_is_told_in_bytes_or_not_at_all():
    assert fingerprint.memory("MemTotal:       16384 kB\nMemFree: 1 kB\n") == 16384 * 1024
    with pytest.raises(ValueError, match="MemTotal"):
        fingerprint.memory("MemFree: 1 kB\n")


@pytest.mark.parametrize(
    ("query", "sku", "mebibytes", "count", "driver"),
    [(H200, "NVIDIA H200", 143771, 2, "550.127.05"), (L4, "NVIDIA L4", 23034, 1, "535.183.01")],
)
def test_accelerators_are_read_as_the_driver_reports_them(query, sku, mebibytes, count, driver):
    found, version = fingerprint.accelerators(query, None)
    assert found == [Accelerator(sku=sku, memory_bytes=mebibytes * 1024**2)] * count
    assert version == driver


def test_an_accelerator_in_mig_mode_stands_for_its_mig_devices():
    found, _ = fingerprint.accelerators(A100_MIG, A100_LISTING)
    assert [(one.mig, one.memory_bytes) for one in found] == [
        ("3g.40gb", 40 * GIBIBYTE),
        ("1g.10gb+me", 10 * GIBIBYTE),
        (None, 80 * GIBIBYTE),
    ]


def test_mig_mode_without_a_mig_device_offers_nothing():
    found, _ = fingerprint.accelerators(A100_MIG.splitlines()[0], None)
    assert found == []


@pytest.mark.parametrize("line", ["No devices were found", "NVIDIA H200, [N/A], Disabled, 550.1", "NVIDIA H200, 1"])
def test_output_that_is_not_understood_is_refused(line):
    with pytest.raises(ValueError, match="no accelerator"):
        fingerprint.accelerators(line, None)


def test_the_cuda_version_is_the_one_that_the_driver_names():
    assert fingerprint.cuda(SUMMARY) == "12.4"
    assert fingerprint.cuda("no such thing") is None
    assert fingerprint.cuda(None) is None


def test_this_machine_has_a_fingerprint():
    found = fingerprint.fingerprint()
    assert found.cores == os.cpu_count()
    assert found.memory_bytes > 64 * 1024**2
    assert found.kernel.startswith("Linux ")
    assert found == fingerprint.fingerprint()
