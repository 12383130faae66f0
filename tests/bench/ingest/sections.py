"""What is measured, and the files that it is measured on."""

import hashlib
import json
import os
import random
import resource
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gates.directory import read_directory
from gates.files.contents import Reader
from gates.static.composition import of_directory
from gates.static.declared import read_declared
from gates.static.examine import examine
from registry.cli.memory import HashMemory
from registry.storage.local import LocalBlobs
from tests.support import published
from tests.support.families import FAMILIES
from tests.support.headers import safetensors

THREADS = 4
"""More than processors: one waits for the disk while another hashes."""
_BLOCK = 1 << 24
Told = dict[str, float]


def write_files(folder: Path, count: int, size: int) -> None:
    """Write so many shards of random bytes, with an index and a configuration, and bring them to disk."""
    folder.mkdir()
    block, each, index = random.Random(1).randbytes(_BLOCK), size // count, {}
    for number in range(1, count + 1):
        name, tensor = f"model-{number:05}-of-{count:05}.safetensors", f"layer.{number}.weight"
        head = safetensors({tensor: {"dtype": "U8", "shape": [each - 4096], "data_offsets": [0, each - 4096]}})
        index[tensor] = name
        with (folder / name).open("wb") as file:
            file.write(head)
            left = each - 4096
            while left:
                left -= file.write(block[: min(left, _BLOCK)])
            os.fsync(file.fileno())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')


def shards(folder: Path) -> list[str]:
    """Return the weights of a folder."""
    return sorted(str(path) for path in folder.glob("*.safetensors"))


def write_many(folder: Path, count: int) -> None:
    """Write a model of so many small shards."""
    write_files(folder, count, count * 16384)


def write_layout(folder: Path) -> None:
    """Write a published layout of about 1,000 tensors in 30 shards, as files with holes."""
    published.SHARD_BYTES = 3_200_000_000
    published.write(folder, FAMILIES["mixtral-8x7b-instruct"])


def _timed(call: Callable[[], object]) -> Told:
    started = time.perf_counter()
    call()
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def hashed(source: Path, _: Path) -> Told:
    """Read a directory as `bundle create` does, without a memory of it."""
    return _timed(lambda: read_directory(source, Reader("vllm")))


def ingested(source: Path, target: Path) -> Told:
    """Take every file into a store: hashed, copied or shared, and on disk."""
    store, files = LocalBlobs(target), [Path(path) for path in shards(source)]
    digests = {}
    for path in files:  # known beforehand, as when a bundle names them
        with path.open("rb") as file:
            digests[path] = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"

    def take(path: Path) -> None:
        store.take(path, digests[path], limit=path.stat().st_size)

    def run() -> None:
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(take, files))

    return _timed(run)


def again(source: Path, folder: Path) -> Told:
    """Read a directory of which everything is remembered, once it was read."""
    with HashMemory(folder / "hashes.sqlite") as memory:
        read_directory(source, Reader("vllm"), memory=memory)

    def run() -> None:
        with HashMemory(folder / "hashes.sqlite") as memory:
            found = read_directory(source, Reader("vllm"), memory=memory)
        if any(file.was_read for file in found.files):
            raise RuntimeError("a file was read that had not changed")

    return _timed(run)


def static(layout: Path) -> Told:
    """Run the static gate's checks over a directory."""
    return _timed(lambda: examine(of_directory(layout, read_declared({}))))


SECTIONS: dict[str, Callable[..., Told]] = {"hash": hashed, "ingest": ingested, "again": again, "static": static}
