"""Checks of which files there are: pointers, links, names, what cannot be read, and what could run."""

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase

from gates.files import gguf_adapter
from gates.files.contents import is_pickled, role_of
from gates.static import contents
from gates.static.composition import Composition, Part
from gates.static.flaw import MAX_ITEMS, Flaw, flaw, listed
from gates.static.foreign import foreign
from schemas.bundle import Role
from schemas.result import Severity
from schemas.short import agreeing

_READS_SAFETENSORS = frozenset({"vllm", "sglang", "trtllm", "tgi", "transformers"})
"""Engines that are started with a folder of safetensors, whatever else they could read."""
_OF_MODELS = re.compile(r"(?i).*\.(safetensors|gguf|bin|pt|pth|ckpt|h5|msgpack|onnx|npz|keras|tflite)")
"""What holds a model's weights, in formats that engines read and in those of others."""
_FOR_PEOPLE = frozenset({Role.DOCUMENTATION, Role.LICENCE})
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
        is_text = _TEXTS.fullmatch(entry.name) is not None or (
            "/" not in entry.path and role_of(entry.name) in _FOR_PEOPLE
        )
        if entry.path not in told and entry.size and is_text and not entry.is_stub:
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


def _holds_weights(name: str) -> bool:
    """Say whether a file is one of weights by its name; what a model sees with is none by itself."""
    return name.endswith(".safetensors") or (name.endswith(".gguf") and role_of(name) is not Role.PROCESSOR)


def _misplaced(c: Composition, part: Part) -> Iterator[Flaw]:
    """Find an adapter that an engine takes for a part of the model, or for a reason to load another model.

    Source: vLLM's weight_utils.py, filter_duplicate_safetensors_files (without an index every file counts);
    transformers, `find_adapter_config_file` in from_pretrained, which then loads what adapter_config.json names.
    """
    own = [name for name in part.entries if name.startswith("adapter_model") and name.endswith(".safetensors")]
    others = [name for name in part.weights.used_files if name not in own]
    if own and others and (part.weights.index_name is None or c.engine == "transformers"):
        yield flaw(
            "adapter-misplaced",
            f"{own[0]} lies beside {others[0]}, and {c.engine or 'an engine'} takes it for a part of the model.",
            file=part.path(own[0]),
            found={"adapter": own, "weights": sorted(others)[:MAX_ITEMS]},
            expected={"adapter": "adapters/NAME/adapter_model.safetensors"},
        )


def _of_load_format(c: Composition, part: Part) -> Iterator[Flaw]:
    """Find a load format that reads files of other names than those that are there."""
    asked, rule = c.declared.arguments.get("--load-format"), c.rules.get("load_format_files")
    pattern = rule.get(asked) if isinstance(rule, dict) else None
    if pattern is not None and not any(fnmatchcase(name, pattern) for name in part.entries):
        held = sorted(name for name in part.entries if _holds_weights(name))
        yield flaw(
            "weights-absent",
            f"--load-format {asked} reads {pattern}, and there is no such file.",
            severity=Severity.BLOCK,
            pointer="--load-format",
            found=held[:MAX_ITEMS],
            expected=[pattern],
            advice="Leave --load-format out, or fetch the files that it reads.",
        )


def _presence(c: Composition) -> Iterator[Flaw]:
    part = c.model
    stubs = {one.file for one in c.listing.flaws}
    has_stub = any(str(path).endswith((".safetensors", ".gguf")) for path in stubs)
    has_weights = has_stub or any(_holds_weights(name) for name in part.entries)
    if not has_weights and not any(map(is_pickled, part.entries)):
        deeper = sorted(path for path in c.listing.entries if "/" in path and _OF_MODELS.fullmatch(path))
        known = {"config.json", "generation_config.json", "params.json"}
        only_config = set(part.entries) <= known and part.has("config.json") and not deeper
        lies = f"; {listed(deeper)} {agreeing(len(deeper), 'lies', 'lie')} where no engine looks" if deeper else ""
        yield flaw(
            "weights-absent",
            "Only the configuration is here, so only it was checked; a bundle needs weights."
            if only_config
            else f"There are no weights: no file of a model ends in .safetensors or .gguf{lies}.",
            severity=Severity.INFO if only_config else Severity.BLOCK,
            found=sorted([*part.entries, *deeper])[:MAX_ITEMS],
            expected=["*.gguf"] if c.engine == "llamacpp" else ["*.safetensors"],
        )
    yield from _adapter_alone(part)
    yield from _misplaced(c, part)
    if has_weights and not has_stub:
        yield from _of_load_format(c, part)
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
