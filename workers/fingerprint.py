"""Says on which hardware a runner runs: processor, memory, kernel and accelerators, as exactly as they are told."""

import os
import platform
from pathlib import Path

from schemas.runner import Fingerprint
from workers import nvml

PROC = Path("/proc")

KERNEL_FLAGS = frozenset(
    {
        # x86: what llama.cpp, oneDNN and vLLM choose their kernels by.
        "sse4_2", "avx", "avx2", "fma", "f16c", "bmi2", "avx_vnni", "avx512f", "avx512bw", "avx512dq", "avx512vl",
        "avx512_vnni", "avx512_bf16", "avx512_fp16", "avx512vbmi", "amx_tile", "amx_int8", "amx_bf16",
        # Arm.
        "asimd", "asimddp", "asimdhp", "i8mm", "bf16", "sve", "sve2",
    }
)  # fmt: skip
"""Processor flags that change which kernels run, and so what a measurement is worth elsewhere."""


def fingerprint(found: nvml.Found | None = None) -> Fingerprint:
    """Read this machine's hardware. Takes a second where there are accelerators, no time where there are none.

    Args:
        found: the accelerators, where they were read already.
    """
    model, flags = processor((PROC / "cpuinfo").read_text(encoding="utf-8"), platform.machine())
    found = found or nvml.read()
    return Fingerprint(
        cpu=model,
        cpu_flags=flags,
        cores=os.cpu_count() or 1,
        memory_bytes=memory((PROC / "meminfo").read_text(encoding="utf-8")),
        accelerators=list(found.accelerators),
        driver=found.driver,
        cuda=found.cuda,
        links=found.links,
        kernel=f"{platform.system()} {platform.release()}"[:256],
    )


def told(path: Path | None) -> Fingerprint | None:
    """Read hardware out of a file, for a runner whose engines run elsewhere; None where no file is named.

    Raises OSError, or pydantic's ValidationError, when it cannot be read: hardware is not guessed at.
    """
    return None if path is None else Fingerprint.model_validate_json(path.read_bytes())


def processor(cpuinfo: str, machine: str) -> tuple[str, str]:
    """Read the processor's model, and its flags in KERNEL_FLAGS, sorted, out of /proc/cpuinfo.

    Args:
        cpuinfo: the file's text.
        machine: architecture, which stands for the model where the kernel names none.
    """
    fields: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    flags = sorted(KERNEL_FLAGS & set((fields.get("flags") or fields.get("Features") or "").split()))
    return (fields.get("model name") or fields.get("Model") or machine)[:256], " ".join(flags)[:256] or "none"


def memory(meminfo: str) -> int:
    """Read the main memory in bytes out of /proc/meminfo. Raises ValueError when it is not told."""
    for line in meminfo.splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    raise ValueError("/proc/meminfo does not tell MemTotal")
