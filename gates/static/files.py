"""Checks of which files there are: pointers, links, names, what cannot be read, and what could run."""

import re
from collections.abc import Iterator

from gates.files import gguf_adapter
from gates.files.contents import is_pickled
from gates.static import contents
from gates.static.composition import Composition, Part
from gates.static.flaw import MAX_ITEMS, Flaw, flaw, listed
from gates.static.foreign import foreign
from schemas.result import Severity

_READS_SAFETENSORS = frozenset({"vllm", "sglang", "trtllm", "tgi", "transformers"})
"""Engines that are started with a folder of safetensors, whatever else they could read."""
_TEXTS = re.compile(r"(?i).*\.(json|jinja|txt)|tokenizer\.model")


def check(c: Composition) -> Iterator[Flaw]:
    """Find files that are not what they stand for, and what is missing altogether."""
    yield from c.listing.flaws
    _ = c.others
    for part in c.parts:
        part.read_all()
        _ = part.gguf, part.templates
        yield from part.flaws
        yield from part.weights.flaws
    told = {one.file for one in c.listing.flaws} | {one.file for part in c.parts for one in part.flaws}
    for entry in c.listing.entries.values():
        if entry.path not in told and entry.size and _TEXTS.fullmatch(entry.name):
            found = foreign(entry)
            if found is not None:
                yield found
    yield from _presence(c)
    yield from contents.check(c)


def _adapter_alone(part: Part) -> Iterator[Flaw]:
    if part.gguf is not None and gguf_adapter.is_adapter(part.gguf.metadata):
        path = part.path(next(iter(part.gguf_files)))
        yield flaw(
            "weights-absent",
            f"There are no weights: {path} is an adapter without its base.",
            file=path,
            pointer=gguf_adapter.KIND,
            found="adapter",
            expected="model",
            advice="Check the base, and name this directory under adapters in the file of -f.",
        )


def _presence(c: Composition) -> Iterator[Flaw]:
    part = c.model
    stubs = {one.file for one in c.listing.flaws}
    has_stub = any(str(path).endswith((".safetensors", ".gguf")) for path in stubs)
    has_weights = has_stub or any(name.endswith((".safetensors", ".gguf")) for name in part.entries)
    if not has_weights and not any(map(is_pickled, part.entries)):
        only_config = set(part.entries) <= {"config.json", "generation_config.json", "params.json"} and part.has(
            "config.json"
        )
        yield flaw(
            "weights-absent",
            "Only the configuration is here, so only it was checked; a bundle needs weights."
            if only_config
            else "There are no weights: no file ends in .safetensors or .gguf.",
            severity=Severity.INFO if only_config else Severity.BLOCK,
            found=sorted(part.entries)[:MAX_ITEMS],
            expected=["*.gguf"] if c.engine == "llamacpp" else ["*.safetensors"],
        )
    yield from _adapter_alone(part)
    is_gguf = any(name.endswith(".gguf") for name in part.entries)
    if not part.has("config.json", "params.json") and not is_gguf:
        is_adapter = part.has("adapter_config.json")
        yield flaw(
            "config-missing",
            "This is an adapter without its base: there is no config.json."
            if is_adapter
            else "There is no config.json.",
            file=part.path("config.json"),
            found=None,
            expected="config.json",
            advice="Check the base, and name this directory under adapters in the file of -f." if is_adapter else None,
        )
    if c.several:
        yield flaw(
            "weights-several",
            f"There are {len(c.several)} models, such as {listed(c.several)}; {c.several[0]} was looked at.",
            file=c.several[0],
            found=list(c.several),
            expected="one model",
        )
    yield from _formats(c, has_weights=has_weights and not has_stub)


def _formats(c: Composition, *, has_weights: bool) -> Iterator[Flaw]:
    """Check that the weights are in one format, and in one that the engine is given.

    Args:
        c: the composition.
        has_weights: whether there are weights that can be read.
    """
    part = c.model
    is_gguf = any(name.endswith(".gguf") for name in part.entries)
    is_mixed = is_gguf and any(name.endswith(".safetensors") for name in part.entries)
    if is_mixed:
        names = sorted(name for name in part.entries if name.endswith((".gguf", ".safetensors")))
        yield flaw(
            "formats-mixed",
            "There are weights in GGUF and in safetensors.",
            file=part.path(names[0]),
            found=names,
            expected="*.safetensors or *.gguf, and not both",
        )
    if is_gguf and not is_mixed and c.engine in _READS_SAFETENSORS:
        yield flaw(
            "format-unsupported",
            f"{c.engine} is given safetensors with a config.json here, and the weights are in GGUF.",
            found="gguf",
            expected="safetensors",
        )
    if c.engine == "llamacpp" and has_weights and not is_gguf:
        yield flaw(
            "format-unsupported",
            "llama.cpp reads GGUF, and the weights are in safetensors.",
            found="safetensors",
            expected="gguf",
        )
