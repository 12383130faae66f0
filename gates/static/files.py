"""Checks of which files there are: pointers, links, names, what cannot be read, and what could run."""

import re
from collections.abc import Iterator

from gates.files import magic, remote_code
from gates.static.composition import Composition
from gates.static.flaw import Flaw, flaw
from gates.static.listing import Entry
from schemas.result import Severity

_PICKLES = re.compile(r"(?i).*\.(bin|pt|pth|pkl|pickle|ckpt|joblib|npy|npz|h5|keras)")
_CODE = re.compile(r"(?i).*\.(py|pyc|so|dll|dylib|sh|exe|bat)")
_ARCHIVES = re.compile(r"(?i).*\.(zip|tar|tgz|gz|bz2|xz|zst|7z|whl|rar)")
_TEXTS = re.compile(r"(?i).*\.(json|jinja|txt)")
_HARMLESS_BIN = frozenset({"training_args.bin", "optimizer.bin", "scheduler.bin", "rng_state.bin"})


def check(c: Composition) -> Iterator[Flaw]:
    """Find files that are not what they stand for, and what is missing altogether."""
    yield from c.listing.flaws
    for part in c.parts:
        part.read_all()
        _ = part.gguf
        yield from part.flaws
        yield from part.weights.flaws
    told = {one.file for one in c.listing.flaws} | {one.file for part in c.parts for one in part.flaws}
    for entry in c.listing.entries.values():
        if entry.path not in told and entry.size and _TEXTS.fullmatch(entry.name):
            yield from _foreign(entry)
    yield from _presence(c)
    yield from _pickles(c)
    yield from _code(c)


def _foreign(entry: Entry) -> Iterator[Flaw]:
    with entry.place.open("rb") as file:
        found = magic.nature(file.read(magic.HEAD_BYTES))
    if found is not None:
        yield flaw("file-foreign", f"{entry.path} is {found.said}.", file=entry.path, found=found.said)


def _presence(c: Composition) -> Iterator[Flaw]:
    part = c.model
    stubs = {one.file for one in c.listing.flaws}
    has_stub = any(str(path).endswith((".safetensors", ".gguf")) for path in stubs)
    has_weights = has_stub or any(name.endswith((".safetensors", ".gguf")) for name in part.entries)
    if not has_weights and not any(_PICKLES.fullmatch(name) for name in part.entries):
        only_config = set(part.entries) <= {"config.json", "generation_config.json", "params.json"} and part.has(
            "config.json"
        )
        yield flaw(
            "weights-absent",
            "Only the configuration is here, so only it was checked; a bundle needs weights."
            if only_config
            else "There are no weights: no file ends in .safetensors or .gguf.",
            severity=Severity.INFO if only_config else Severity.BLOCK,
        )
    is_gguf = any(name.endswith(".gguf") for name in part.entries)
    if not part.has("config.json", "params.json") and not is_gguf:
        yield flaw("config-missing", "There is no config.json.", file=part.path("config.json"))
    if is_gguf and any(name.endswith(".safetensors") for name in part.entries):
        names = sorted(name for name in part.entries if name.endswith((".gguf", ".safetensors")))
        yield flaw("formats-mixed", "There are weights in GGUF and in safetensors.", found=names)
    if is_gguf and c.engine in {"vllm", "sglang", "trtllm", "tgi", "transformers"} and not part.has("config.json"):
        yield flaw(
            "format-unsupported",
            f"{c.engine} needs safetensors with a config.json, and the weights are in GGUF.",
            severity=Severity.WARN,
            found="gguf",
            expected="safetensors",
        )
    if c.engine == "llamacpp" and has_weights and not is_gguf and not has_stub:
        yield flaw(
            "format-unsupported",
            "llama.cpp reads GGUF, and the weights are in safetensors.",
            found="safetensors",
            expected="gguf",
        )


def _pickles(c: Composition) -> Iterator[Flaw]:
    for part in c.parts:
        names = sorted(name for name in part.entries if _PICKLES.fullmatch(name) and name not in _HARMLESS_BIN)
        if not names:
            continue
        safe = any(name.endswith((".safetensors", ".gguf")) for name in part.entries)
        wanted = c.declared.arguments.get("--load-format") in {"pt", "npcache"}
        path = part.path(names[0])
        if safe and not wanted:
            yield flaw(
                "pickle-weights",
                f"{len(names)} pickled files such as {path} lie beside the weights; a bundle leaves them out.",
                severity=Severity.INFO,
                file=path,
                found=names,
            )
        else:
            reason = "the launch arguments ask for them" if safe else "there are no others"
            message = f"{len(names)} pickled files such as {path} would be loaded as weights: {reason}."
            yield flaw("pickle-weights", message, file=path, found=names)


def _code(c: Composition) -> Iterator[Flaw]:
    told = {
        part.path(name): remote_code.told(part.object(name))
        for part in c.parts
        for name in ("config.json", "tokenizer_config.json", "adapter_config.json", "processor_config.json")
        if part.has(name)
    }
    trusted = remote_code.trusts(c.declared.arguments.words, c.declared.variables)
    refused = list(
        remote_code.refuse_code(told, model_type=c.model.shape.model_type, is_trusted=trusted, accepted=c.declared.code)
    )
    for one in refused:
        yield flaw(
            "remote-code",
            f"{one.file or 'The launch'} {one.message}.",
            file=one.file or None,
            pointer=one.pointer or (None if one.file else "--trust-remote-code"),
            found=one.found,
            expected=one.expected,
        )
    code = sorted(path for path in c.listing.entries if _CODE.fullmatch(path) and path not in c.declared.code)
    if code and not refused:
        message = f"{len(code)} files of code such as {code[0]} lie here; no engine runs them."
        yield flaw("code-left-out", message, file=code[0], found=code)
    for path in sorted(c.listing.entries):
        if _ARCHIVES.fullmatch(path):
            yield flaw("archive", f"{path} is an archive; nobody has looked into it.", file=path)
