"""Further layouts that makers publish: quantized, with experts, eyes or ears, for embeddings and ranks, Mistral's form.

They lie in published_further.json as data: the configuration as it is published (those of the largest models with
fewer layers, all else in full size), each file of weights by the names, types and shapes of its tensors, and what lies
beside them. Templates are our own, in each family's form. Weights under no name are sharded as the library does it.
"""

import base64
import json
import math
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from tests.support import published
from tests.support.checkpoints import WIDTHS, T, write_json, write_safetensors
from tests.support.published import Family

FURTHER: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("published_further.json").read_text(encoding="utf-8")
)
_SCALE = struct.pack("<f", 0.01)
_COLUMNS_A_GROUP = 128


@dataclass(frozen=True)
class Layout:
    """One published layout: the codes that are said of it, what is declared, and how many tensors it has."""

    expected: frozenset[str]
    declared: dict[str, Any]
    tensors: int


def write(root: Path, name: str) -> Layout:
    """Write a layout into a folder, which is made."""
    told = FURTHER[name]
    weights = {file: list(_tensors(rows)) for file, rows in told["weights"].items()}
    family = Family(
        config=told.get("config", {}),
        tensors=partial(weights.get, "", []),  # type: ignore[arg-type]
        specials={int(number): text for number, text in told.get("specials", {}).items()},
        tokens=1000,
        template=told.get("template", ""),
        bos=told.get("bos"),
        eos=told.get("eos", ""),
        adds_bos=told.get("adds_bos", False),
        generation=told.get("generation"),
        files={path: text.encode("latin-1") for path, text in told.get("files", {}).items()},
        in_config=told.get("in_config", False),
    )
    published.write(root, family)
    for path, document in told.get("documents", {}).items():
        write_json(_made(root / path), _filled(document) if path == "tekken.json" else document)
    for file, tensors in weights.items():
        if file:
            write_safetensors(_made(root / file), sorted(tensors, key=lambda one: -WIDTHS[one.dtype]), sparse=True)
    for path, files in told.get("indexes", {}).items():
        places = {one.name: Path(file).name for file in files for one in weights[file]}
        total = sum(one.size for file in files for one in weights[file])
        write_json(root / path, {"metadata": {"total_size": total}, "weight_map": places})
    gone = [*told.get("without", []), *([] if "config" in told else ["config.json"])]
    gone += [] if weights.get("") else ["model.safetensors"]
    gone += [] if "template" in told else ["chat_template.jinja"]
    for path in gone:
        (root / path).unlink()
    counted = weights.get("") or next(iter(weights.values()))
    return Layout(frozenset(told.get("expected", [])), told.get("declared", {}), len(counted))


def _filled(tekken: dict[str, Any]) -> dict[str, Any]:
    """Return a vocabulary of Mistral's with as many tokens as it says that it has, besides its special ones."""
    count = tekken["config"]["default_vocab_size"] - tekken["config"]["default_num_special_tokens"]
    tokens = ((rank, base64.b64encode(rank.to_bytes(3, "big")).decode()) for rank in range(count))
    return tekken | {"vocab": [{"rank": rank, "token_bytes": raw, "token_str": None} for rank, raw in tokens]}


def _made(place: Path) -> Path:
    place.parent.mkdir(parents=True, exist_ok=True)
    return place


def _tensors(rows: Sequence[Sequence[Any]]) -> Iterator[T]:
    """Yield tensors from their patterns, in which each `#` stands for the numbers of one column."""
    for pattern, dtype, shape, *columns in rows:
        for numbers in product(*map(_numbers, columns)):
            left = iter(numbers)
            yield _tensor(re.sub("#", lambda _: str(next(left)), pattern), dtype, tuple(shape))  # noqa: B023


def _numbers(text: str) -> list[int]:
    spans = [(one.split("-")[0], one.split("-")[-1]) for one in text.split(",")]
    return [number for first, last in spans for number in range(int(first), int(last) + 1)]


def _tensor(name: str, dtype: str, shape: tuple[int, ...]) -> T:
    """Return a tensor with the bytes that mean something: the order of columns, and scales that are not zero."""
    data = None
    if name.endswith(".g_idx"):
        data = b"".join(struct.pack("<i", column // _COLUMNS_A_GROUP) for column in range(shape[0]))
    elif dtype == "F32" and math.prod(shape) == 1:
        data = _SCALE
    return T(name, dtype, shape, data)
