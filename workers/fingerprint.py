"""Says on which hardware a runner runs: processor, memory, kernel and accelerators, as exactly as they are told."""

import os
import platform
import re
import subprocess
from pathlib import Path

from schemas.runner import Accelerator, Fingerprint

PROC = Path("/proc")
MEBIBYTE = 1024 * 1024
QUERY = ("nvidia-smi", "--query-gpu=name,memory.total,mig.mode.current,driver_version", "--format=csv,noheader,nounits")
LISTING = ("nvidia-smi", "-L")
SUMMARY = ("nvidia-smi",)
TOOL_SECONDS = 30.0

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

_GPU = re.compile(r"^GPU \d+: ")
_MIG = re.compile(r"^\s+MIG (\S*?(?:(\d+)gb(?:[.+]\S+)?)?)\s+Device\s+\d+:")
_CUDA = re.compile(r"CUDA(?: UMD)? Version:\s*(\d+(?:\.\d+)+)")


def fingerprint() -> Fingerprint:
    """Read this machine's hardware. Takes a second where there are accelerators, no time where there are none."""
    model, flags = processor((PROC / "cpuinfo").read_text(encoding="utf-8"), platform.machine())
    query = _tool(QUERY)
    found, driver = accelerators(query, _tool(LISTING)) if query is not None else ([], None)
    return Fingerprint(
        cpu=model,
        cpu_flags=flags,
        cores=os.cpu_count() or 1,
        memory_bytes=memory((PROC / "meminfo").read_text(encoding="utf-8")),
        accelerators=found,
        driver=driver,
        cuda=cuda(_tool(SUMMARY)) if found else None,
        kernel=f"{platform.system()} {platform.release()}"[:256],
    )


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


def accelerators(query: str, listing: str | None) -> tuple[list[Accelerator], str | None]:
    """Read accelerators and driver version out of what nvidia-smi prints.

    Args:
        query: output of QUERY, one line an accelerator.
        listing: output of LISTING, which alone names MIG devices. An accelerator in MIG mode stands for its MIG
            devices, each with the memory that its profile names; one that has none offers nothing.

    Raises:
        ValueError: the output is not what this reads. Hardware that is not understood is not guessed at.
    """
    devices = _mig_devices(listing or "")
    found: list[Accelerator] = []
    drivers: set[str] = set()
    for place, line in enumerate(query.strip().splitlines()):
        parts = [part.strip() for part in line.split(",")]
        if len(parts) != 4 or not parts[1].isdigit():
            raise ValueError(f"nvidia-smi said {line[:200]!r}, which is no accelerator")
        sku, mebibytes, mode, driver = parts
        drivers.add(driver)
        if mode == "Enabled":
            profiles = devices[place] if place < len(devices) else []
            found += [Accelerator(sku=sku, memory_bytes=size, mig=profile) for profile, size in profiles]
        else:
            found.append(Accelerator(sku=sku, memory_bytes=int(mebibytes) * MEBIBYTE))
    return found, ", ".join(sorted(drivers)) or None


def _mig_devices(listing: str) -> list[list[tuple[str, int]]]:
    devices: list[list[tuple[str, int]]] = []
    for line in listing.splitlines():
        if _GPU.match(line):
            devices.append([])
        elif (mig := _MIG.match(line)) and devices:
            if mig[2] is None:
                raise ValueError(f"nvidia-smi named a MIG device without its memory: {line.strip()[:200]!r}")
            devices[-1].append((mig[1], int(mig[2]) * 1024 * MEBIBYTE))
    return devices


def cuda(summary: str | None) -> str | None:
    """Read the CUDA version that the driver supports out of nvidia-smi's first lines; None when it tells none."""
    match = _CUDA.search(summary or "")
    return match[1] if match else None


def _tool(command: tuple[str, ...]) -> str | None:
    """Return what a tool prints; None where there is no such tool or no accelerator that it could speak to."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_SECONDS, check=False)
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None
