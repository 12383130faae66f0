"""Checks of the index against the files: every tensor has one place, and the place has it."""

from collections.abc import Iterator
from itertools import islice

from gates.static import names
from gates.static.composition import Composition, Part
from gates.static.flaw import MAX_ITEMS, Flaw, flaw, listed
from gates.static.tensors import CONSOLIDATED, sample
from schemas.common import check_path
from schemas.result import Severity
from schemas.short import agreeing, many

_COMPARED = 8
"""Tensors that two files hold whose values are compared."""


def check(c: Composition) -> Iterator[Flaw]:
    """Check the model's index, and its draft's."""
    for part in [c.model, *([c.draft] if c.draft is not None else [])]:
        yield from _index(part)
        yield from _numbering(part)
        yield from _sets(c, part)


def _index(part: Part) -> Iterator[Flaw]:
    weights, path = part.weights, part.weights.index_path
    if weights.weight_map is None or path is None or any(one.file == path for one in part.flaws):
        return
    told = weights.index.get("weight_map")
    if not isinstance(told, dict) or not told or len(weights.weight_map) != len(told):
        yield flaw(
            "index-invalid",
            f"{path} has no map from tensors to files.",
            file=path,
            pointer="/weight_map",
            found=type(told).__name__ if not isinstance(told, dict) else {"entries": len(told)},
            expected="an object of tensor names, each with the name of a file",
        )
        return
    for shard in sorted(set(weights.weight_map.values())):
        if "/" in shard or "\\" in shard or not shard.endswith(".safetensors") or not _is_name(shard):
            yield flaw(
                "index-invalid",
                f"{path} names {shard!a}, which is no safetensors file beside it.",
                file=path,
                pointer="/weight_map",
                found=shard,
                expected="the name of a .safetensors file beside the index",
            )
    yield from _places(part, path, weights.weight_map)
    yield from _total(part, path)
    yield from _unreachable(part, path)


def _is_name(shard: str) -> bool:
    try:
        check_path(shard)
    except ValueError:
        return False
    return True


def _places(part: Part, path: str, weight_map: dict[str, str]) -> Iterator[Flaw]:
    weights = part.weights
    absent: dict[str, list[str]] = {}
    for name, shard in weight_map.items():
        if shard not in part.entries:
            absent.setdefault(shard, []).append(name)
    for shard, missing in sorted(absent.items()):
        yield flaw(
            "shard-missing",
            f"{path} reads {many(len(missing), 'tensor')} from {shard}, which is not there.",
            file=part.path(shard),
            pointer="/weight_map",
            found={"tensors": sorted(missing)[:MAX_ITEMS], "count": len(missing)},
            expected=shard,
        )
    for name, shard in sorted(weight_map.items()):
        read = weights.shards.get(shard)
        if read is None or read.header is None or name in weights.held(shard):
            continue
        elsewhere = [other for other in weights.shards if name in weights.held(other)]
        yield flaw(
            "index-tensor-absent",
            f"{path} reads {name} from {shard}, which does not hold it.",
            file=part.path(shard),
            pointer="/weight_map/" + name.replace("~", "~0").replace("/", "~1"),
            found={"tensor": name, "shard": shard, "held_by": elsewhere},
            expected={"tensor": name, "shard": shard},
        )


def _total(part: Part, path: str) -> Iterator[Flaw]:
    weights = part.weights
    metadata = weights.index.get("metadata")
    declared = metadata.get("total_size") if isinstance(metadata, dict) else None
    if declared is None or any(shard.header is None for shard in weights.shards.values()):
        return
    named = weights.weight_map or {}
    if any(name not in weights.effective for name in named):
        return  # what is missing is told by itself
    summed = weights.effective_bytes
    if type(declared) not in (int, float) or declared != summed:
        yield flaw(
            "total-size-wrong",
            f"{path} says total_size {declared!r}, and its tensors have {many(summed, 'byte')}.",
            file=path,
            pointer="/metadata/total_size",
            found={"declared": declared, "summed": summed},
            expected=summed,
        )


def _unreachable(part: Part, path: str) -> Iterator[Flaw]:
    weights, mapped = part.weights, part.weights.weight_map or {}
    used = set(mapped.values())
    heads = set(names.HEADS[:1])
    needed = {one.name for one in part.needed} | (set() if part.shape.is_tied else heads)
    known = part.shape.family.get("tensors") is not None
    senses = any(f"{one}_config" in part.config for one in ("vision", "audio", "speech", "vit"))
    lost: dict[str, str] = {}
    others = [name for name in weights.shards if not CONSOLIDATED.fullmatch(name)]
    orphans = [name for name in others if name not in used and not name.startswith("adapter_model")]
    for shard in weights.shards:
        if shard not in used and shard not in orphans:
            continue
        for name in weights.held(shard):
            spare = part.shape.is_tied and name in heads
            wanted = shard in used or not known or name in needed or _is_sibling(name, needed)
            wanted = wanted or (senses and names.is_of_tower(name))
            if name not in mapped and wanted and not spare:
                lost.setdefault(name, shard)
    if lost:
        count = len(lost)
        architecture = part.shape.architecture or "the architecture"
        also = f"; no entry names {listed(orphans)}" if orphans else ""
        yield flaw(
            "tensors-unreachable",
            f"{many(count, 'tensor')} required by {architecture} {agreeing(count, 'is', 'are')} in files but not in "
            f"{path}: {listed(sorted(lost))}{also}.",
            file=path,
            pointer="/weight_map",
            found={"count": count, "tensors": sorted(lost)[:MAX_ITEMS], "orphans": orphans},
            expected={"tensors": len(mapped) + count},
        )
    elif orphans and not _repeated(part, orphans):
        yield flaw(
            "shard-orphan",
            f"{path} reads nothing from {listed(orphans)}.",
            file=part.path(orphans[0]),
            found=orphans,
            expected=[],
        )


def _is_sibling(name: str, needed: set[str]) -> bool:
    """Say whether a tensor belongs to a module that is needed, such as its bias or its scales."""
    stem = name.rpartition(".")[0]
    return f"{stem}.weight" in needed


def _repeated(part: Part, orphans: list[str]) -> bool:
    return all(
        part.weights.held(name) and set(part.weights.held(name)) <= set(part.weights.effective) for name in orphans
    )


def _numbering(part: Part) -> Iterator[Flaw]:
    """Without an index the files' own names are all that says how many there must be."""
    if part.weights.index_name is not None:
        return
    for (stem, rest, count), there in sorted(part.weights.numbering().items()):
        first = 0 if 0 in there else 1
        lost = count - len(there)
        missing = list(islice((one for one in range(first, count + first) if one not in there), MAX_ITEMS))
        if missing:
            ending = (
                "gguf"
                if any(name.startswith(stem) and name.endswith(".gguf") for name in part.entries)
                else "safetensors"
            )
            wanted = [f"{stem}-{number:05}-of-{count:05}{rest}.{ending}" for number in missing]
            yield flaw(
                "shard-missing",
                f"{lost} of {many(count, 'file')} {agreeing(lost, 'is', 'are')} not there: {listed(wanted)}.",
                file=part.path(wanted[0]),
                found=sorted(there)[:MAX_ITEMS],
                expected=wanted,
            )


def _sets(c: Composition, part: Part) -> Iterator[Flaw]:
    """Find a second copy of the weights, and say which one counts."""
    weights = part.weights
    used = set(weights.used_files)
    spare = [name for name in weights.shards if name not in used and not name.startswith("adapter_model")]
    doubled = [name for name in spare if CONSOLIDATED.fullmatch(name) or _repeated(part, [name])]
    if weights.weight_map is None and len(used) > 1:
        doubled += _overlapping(part)
    if doubled:
        asked = c.declared.arguments.get("--load-format")
        unfiltered = asked is not None and asked in (c.rules.get("unfiltered_load_formats") or [])
        total = sum(shard.data_bytes for shard in weights.shards.values())
        said = f"; the load format {asked} takes every file" if unfiltered else ""
        yield flaw(
            "duplicate-weight-sets",
            f"The weights are there a second time, in {listed(doubled)}: {weights.effective_bytes} bytes count, "
            f"not {total}{said}.",
            severity=Severity.BLOCK if unfiltered else Severity.WARN,
            file=part.path(doubled[0]),
            pointer="--load-format" if unfiltered else None,
            found={
                "files": doubled,
                "effective_bytes": weights.effective_bytes,
                "bytes_in_files": total,
                "load_format": asked,
            },
            expected={"effective_bytes": weights.effective_bytes},
        )
    if weights.superseded:
        lost = sorted(weights.superseded)
        yield flaw(
            "index-decides",
            f"The index reads {many(len(lost), 'tensor')} from another file than one that also holds "
            f"{agreeing(len(lost), 'it', 'them')}: {listed(lost)}.",
            file=weights.index_path,
            found={"superseded": len(lost), "tensors": lost[:MAX_ITEMS]},
            expected={"superseded": 0},
        )


def _overlapping(part: Part) -> list[str]:
    """Return files that repeat what an earlier one holds, where no index says which counts."""
    seen: set[str] = set()
    found = []
    for name in sorted(part.weights.used_files, key=lambda one: (one != "model.safetensors", one)):
        held = set(part.weights.held(name))
        if held & seen and (held <= seen or "-of-" not in name or _differ(part, name, held & seen)):
            found.append(name)
        seen |= held
    return found


def _differ(part: Part, name: str, repeated: set[str]) -> bool:
    """Say whether a file holds another copy of a tensor than the one that counts."""
    held, effective = part.weights.held(name), part.weights.effective
    return any(
        (held[one].tensor.dtype, held[one].tensor.shape) != (effective[one].tensor.dtype, effective[one].tensor.shape)
        or sample(held[one]) != sample(effective[one])
        for one in sorted(repeated)[:_COMPARED]
    )
