import os

import pytest

from workers import fingerprint

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


def test_this_machine_has_a_fingerprint():
    found = fingerprint.fingerprint()
    assert found.cores == os.cpu_count()
    assert found.memory_bytes > 64 * 1024**2
    assert found.kernel.startswith("Linux ")
    assert found == fingerprint.fingerprint()
