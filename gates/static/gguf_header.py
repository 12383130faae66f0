"""Checks of a GGUF header against itself and its tensors: what llama.cpp would refuse, or read beyond the end of.

Source: llama-model-loader.cpp, llama-model.cpp and llama-vocab.cpp of llama.cpp.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final

from gates.files.header import Array, Header, Tensor
from gates.static import gguf_tensors, misshapen
from gates.static.composition import Part
from gates.static.flaw import MAX_ITEMS, Flaw, flaw, listed
from gates.static.misshapen import Misshapen
from gates.static.shape import MOST, MOST_OF_ALL
from schemas.short import agreeing, many

_SIZES: Final = {"block_count": MOST["layers"], "context_length": MOST_OF_ALL, "embedding_length": MOST_OF_ALL}
"""Keys of an architecture that llama.cpp asks of every model, and more than which none has."""
_OF_BLOCK: Final = re.compile(r"blk\.([0-9]{1,6})\.(.+)")
_SEARCHED: Final = frozenset({"deci"})
"""Architectures that were searched for block by block: each may lack what others have."""
_MOST_FORMS: Final = 32
_FLOATS: Final = ("rope.freq_base", "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")


def check(part: Part, header: Header, tensors: Mapping[str, Tensor]) -> Iterator[Flaw]:
    """Check the header of the first file of a model, and what all files hold."""
    path = part.path(next(iter(part.gguf_files)))
    architecture = header.metadata.get("general.architecture")
    yield from _keys(architecture, header, path)
    yield from _odd_blocks(str(architecture), tensors, path)
    yield from _shapes(str(architecture), header, tensors, path)
    yield from _lists(header, path)
    yield from _split(part, header, path)


def _odd_blocks(architecture: str, tensors: Mapping[str, Tensor], path: str) -> Iterator[Flaw]:
    """Find the few blocks that lack what the many have alike, for architectures whose tensors are not known by name."""
    if architecture in gguf_tensors.BLOCK or architecture in _SEARCHED:
        return
    blocks: dict[int, set[str]] = {}
    for name in tensors:
        if (match := _OF_BLOCK.fullmatch(name)) is not None:
            blocks.setdefault(int(match[1]), set()).add(match[2])
    counts = Counter(frozenset(rests) for rests in blocks.values())
    if len(counts) > _MOST_FORMS:
        return
    for whole, others in counts.items():
        for number, rests in sorted(blocks.items()):
            if rests < whole and others >= 2 * counts[frozenset(rests)]:
                lost = sorted(f"blk.{number}.{one}" for one in whole - rests)
                yield flaw(
                    "tensor-missing",
                    f"Block {number} lacks {many(len(lost), 'tensor')} that "
                    f"{many(others, 'other block', 'has', 'have')}: {listed(lost)}.",
                    file=path,
                    found={"layer": number, "missing": lost[:MAX_ITEMS], "count": len(lost)},
                    expected={"missing": [], "count": 0},
                    advice=gguf_tensors.ADVICE,
                )


def _keys(architecture: object, header: Header, path: str) -> Iterator[Flaw]:
    if not architecture:
        yield _wrong(path, "general.architecture", "says no architecture", architecture, "a text")
        return
    known = architecture in gguf_tensors.BLOCK
    for name, most in _SIZES.items():
        key = f"{architecture}.{name}"
        value = header.metadata.get(key)
        if value is None and not known:
            continue
        if type(value) is not int or not 0 < value <= most:
            said = "lacks" if value is None else "says"
            shown = "" if value is None else f" {value if isinstance(value, int | float | str) else 'a list'!r}"
            found = value if isinstance(value, int | float | str) else None
            yield _wrong(path, key, f"{said} {key}{shown}", found, f"a whole number from 1 to {most}")
    for name in _FLOATS:
        key = f"{architecture}.{name}"
        value = header.metadata.get(key)
        if isinstance(value, float) and not (math.isfinite(value) and value > 0):
            yield _wrong(path, key, f"says {key} {value}", str(value), "a number above 0")


def _wrong(path: str, key: str, said: str, found: object, expected: str) -> Flaw:
    message = f"{path} {said}, and llama.cpp needs {expected}."
    return flaw("header-invalid", message, file=path, pointer=key, found=found, expected=expected)


def _shapes(architecture: str, header: Header, tensors: Mapping[str, Tensor], path: str) -> Iterator[Flaw]:
    told = gguf_tensors.misshapen(architecture, header.metadata, tensors)
    wrong = [Misshapen(name, path, found, expected) for name, found, expected in told]
    # Fewer rows than tokens are told as tokens without a row.
    wrong = [one for one in wrong if not (one.lacks_rows and one.found < one.expected)]
    start = f"{architecture}."
    sizes = {
        key.removeprefix(start): value
        for key, value in header.metadata.items()
        if key.startswith(start) and type(value) is int
    }
    yield from misshapen.flaws(wrong, "the header", sizes=sizes, advice=gguf_tensors.ADVICE)


def _lists(header: Header, path: str) -> Iterator[Flaw]:
    """Find lists about tokens that are not as long as there are tokens: llama.cpp would read beyond their end."""
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    for name in ("token_type", "scores"):
        told = header.metadata.get(f"tokenizer.ggml.{name}")
        if isinstance(tokens, Array) and isinstance(told, Array) and told.count != tokens.count:
            yield flaw(
                "header-invalid",
                f"{path} has {many(tokens.count, 'token')}, and {name} has {many(told.count, 'entry')}.",
                file=path,
                pointer=f"tokenizer.ggml.{name}",
                found=told.count,
                expected=tokens.count,
                advice="Convert the model again.",
            )


def _split(part: Part, header: Header, path: str) -> Iterator[Flaw]:
    """Find a part of a model whose other parts are not there, whatever its name is."""
    count = header.metadata.get("split.count")
    if type(count) is not int or count < 2 or part.weights.numbering():
        return  # one, or numbered by their names, of which any that is missing is told by itself
    there = sorted({one.metadata.get("split.no", 0) for one in part.gguf_files.values()}, key=str)
    if len(there) < count:
        yield flaw(
            "shard-missing",
            f"{path} says that it is one of {count} files, and {len(there)} {agreeing(len(there), 'is', 'are')} there.",
            file=path,
            pointer="split.count",
            found=there[:MAX_ITEMS],
            expected=count,
            advice="Fetch the missing files; llama.cpp finds them by their names, NAME-00001-of-0000N.gguf.",
        )
