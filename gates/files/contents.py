"""Decides which files of a directory or repository a bundle takes, by their names and for one engine.

Import is selective: what the engine reads, in one format and one quantization; all else is left out and listed with
the reason. What sound repositories carry besides raises nothing. Refused is what would be loaded in place of the
declared weights or could run: pickled weights where there are no others or where the engine is told to take them,
archives and programs. Code is left out unless the bundle accepts it by name.

Sources: `weight_utils.py` and `loader` of vLLM and SGLang for what they read from a directory, `llama-model-loader.cpp`
of llama.cpp, and the file lists of published repositories.
"""

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Final

from gates.files.listing import LeftOut
from gates.files.names import refuse_name
from gates.files.refusal import FileRefused
from schemas.bundle import Role

ROLES: Final[tuple[tuple[str, Role], ...]] = (
    (r"(?i)(.*[-_.])?mmproj([-_.].*)?\.gguf", Role.PROCESSOR),
    (r".*\.gguf", Role.WEIGHTS),
    (r"adapter_model\.safetensors|adapter_config\.json", Role.ADAPTER),
    (r".*\.safetensors", Role.WEIGHTS),
    (r".*\.safetensors\.index(\.[a-z0-9]+)?\.json", Role.WEIGHTS_INDEX),
    (r"config\.json|params\.json", Role.CONFIG),
    (r"modules\.json|sentence_\w+_config\.json|config_sentence_transformers\.json", Role.CONFIG),
    (r"generation_config\.json", Role.GENERATION_CONFIG),
    (r"tokenizer(_config)?\.json|special_tokens_map\.json|added_tokens\.json|tekken\.json", Role.TOKENIZER),
    (
        r"vocab\.(json|txt)|merges\.txt|tokenizer\.model(\.v[0-9]+(m[0-9]+)?)?|(\w+\.)?tiktoken(\.model)?",
        Role.TOKENIZER,
    ),
    (r"(sentencepiece|spiece|spm)(\.bpe)?\.model", Role.TOKENIZER),
    (r"((image_|video_|audio_)?pre)?processor_config\.json", Role.PROCESSOR),
    (r".*\.jinja|chat_template\.json", Role.TEMPLATE),
    (r"(quantize|quantization|quant|hf_quant)_config\.json", Role.QUANTIZATION),
    (r"(?i)(licen[sc]e|copying|notice|use_policy)([._-].*)?", Role.LICENCE),
    (r"(?i)readme([._-].*)?|.*\.md", Role.DOCUMENTATION),
)
_PICKLED = re.compile(r"(?i).*\.(bin|pt|pth|ckpt|pkl|pickle|joblib|dill|mar|nemo|pdparams|pt2|ptl)")
_FOREIGN_WEIGHTS = re.compile(
    r"(?i).*\.(h5|hdf5|keras|msgpack|onnx|onnx_data|tflite|ot|npy|npz|mlmodel|engine|plan|weights|ggml|ggjt|imatrix|pb|xml)"
)
_ARCHIVE = re.compile(
    r"(?i).*\.(zip|tar|tgz|tbz2?|txz|gz|bz2|xz|zst|lz4|7z|rar|whl|egg|pyz|jar|cab|iso|dmg|deb|rpm|apk)"
)
_PROGRAM = re.compile(
    r"(?i).*\.(so(\.[0-9]+)*|dll|dylib|exe|com|msi|pyd|a|o|wasm|llamafile|scr|class|cubin|ptx|hsaco|metallib)"
)
_CODE = re.compile(
    r"(?i).*\.(py|pyi|pyc|pyo|pyw|pyx|ipynb|sh|bash|zsh|bat|cmd|ps1|js|mjs|ts|rb|pl|php|lua|c|cc|cpp|cu|h|hpp|rs|go|java|r|jl)"
)
_MEDIA = re.compile(
    r"(?i).*\.(png|jpe?g|gif|svg|webp|bmp|ico|tiff?|pdf|mp[34]|m4a|wav|flac|ogg|mov|webm|avi|html?|css|ttf)"
)
_OF_TRAINING = re.compile(r"(training_args|optimizer|scheduler|scaler|rng_state(_[0-9]+)?)\.(bin|pt|pth)")
"""Pickled by a trainer beside the weights, and read by no engine."""
_ADAPTER_PICKLED = re.compile(r"adapter_model\.(bin|pt|pth)")
_ADAPTER_PACKED = re.compile(r"adapters/[^/]+/[^/]+\.gguf")
"""Where an adapter in GGUF lies in a bundle: by its own name it could be a model."""
_IMPORTANCE = re.compile(r"(?i)imatrix.*\.gguf|.*[._-]imatrix\.gguf")
_CONSOLIDATED = re.compile(r"consolidated[._-].*")
_VARIANT = re.compile(r"(?P<stem>.+?)\.(fp16|bf16|fp32|fp8|int8|int4|ema|non_ema)(-[0-9]{5}-of-[0-9]{5})?\.safetensors")
_SHARD = re.compile(r"(?P<stem>.+?)[.-][0-9]{5}-of-[0-9]{5}(?P<end>\.[a-z]+)")
_MOST_CHOICES: Final = 4
"""Of several models, how many a person is shown the option for; all are named."""
_PROJECTORS = ("f16", "fp16", "bf16", "q8_0", "f32", "fp32")

_LOAD_FORMAT: Final = tuple("--load-format"[:end] for end in range(len("--loa"), len("--load-format") + 1))
"""The option, and what engines take for it: the beginning of an option is as good as all of it."""

_HUB_ENGINE: Final = frozenset(Role)
_UNUSUAL: Final = frozenset({"name-characters", "name-unicode", "name-length", "name-depth"})
_WORDS: Final = frozenset({Role.LICENCE, Role.DOCUMENTATION})
"""Roles of what is for people: no component's digest has them."""
_GGUF_ENGINE: Final = frozenset(
    {Role.WEIGHTS, Role.PROCESSOR, Role.TEMPLATE, Role.ADAPTER, Role.DRAFT, Role.LICENCE, Role.DOCUMENTATION}
)
ENGINES: Final[Mapping[str, tuple[tuple[str, ...], frozenset[Role]]]] = {
    "llamacpp": (("gguf",), _GGUF_ENGINE),
    "vllm": (("safetensors", "gguf"), _HUB_ENGINE),
    "sglang": (("safetensors", "gguf"), _HUB_ENGINE),
    "transformers": (("safetensors", "gguf"), _HUB_ENGINE),
    "trtllm": (("safetensors",), _HUB_ENGINE),
    "tgi": (("safetensors",), _HUB_ENGINE),
    "external": (("safetensors", "gguf"), _HUB_ENGINE),
}
"""Engine → weight formats that it reads, the first that is there, and the roles of files that it reads besides."""


@dataclass(frozen=True, slots=True)
class Reader:
    """Who will read the files: the engine with its launch arguments, and what a person chose.

    `weights` is a pattern of paths, or a word of their names such as `q4_k_m`, and chooses among several sets of
    weights. `code` names files with code that the bundle accepts.
    """

    engine: str
    arguments: Sequence[str] = ()
    weights: str | None = None
    code: frozenset[str] = frozenset()

    def argument(self, *names: str) -> str | None:
        """Return the value of the last of these launch arguments, spelled `--name value` or `--name=value`."""
        found = None
        for place, word in enumerate(self.arguments):
            name, given, value = word.partition("=")
            if name.replace("_", "-") in names:
                found = value if given else next(iter(self.arguments[place + 1 : place + 2]), "")
        return found


@dataclass(slots=True)
class Selection:
    """What a bundle takes, with the role of each file; what it does not, and why; and what must not be there.

    `several` has the files of each model where there are several and nobody chose one, those of the top folder first.
    """

    kept: dict[str, Role] = field(default_factory=dict)
    left_out: list[LeftOut] = field(default_factory=list)
    refused: list[FileRefused] = field(default_factory=list)
    several: list[list[str]] = field(default_factory=list)


def role_of(path: str) -> Role | None:
    """Return what a file is for by its name, or None."""
    name = PurePosixPath(path).name
    return next((role for pattern, role in ROLES if re.fullmatch(pattern, name)), None)


def is_aside(path: str) -> bool:
    """Tell whether a name that no bundle may hold is that of a picture or a paper, which a bundle leaves out anyway.

    Publishers name such files in their own words and scripts. What an engine, a loader or a shell could take for more
    is not among them, and neither is a name that deceives.
    """
    refused, name = refuse_name(path), PurePosixPath(path).name
    if refused is None or refused.code not in _UNUSUAL or role_of(path) not in (None, *_WORDS):
        return False
    kinds = (_PICKLED, _FOREIGN_WEIGHTS, _ARCHIVE, _PROGRAM, _CODE)
    return not name.endswith(".json") and not any(one.fullmatch(name) for one in kinds)


def is_packed_adapter(path: str) -> bool:
    """Tell whether a file is an adapter in GGUF by where it lies in a bundle."""
    return _ADAPTER_PACKED.fullmatch(path) is not None


def is_pickled(path: str) -> bool:
    """Tell by its name whether a file holds pickled weights; what a trainer keeps of itself does not."""
    name = PurePosixPath(path).name
    return _PICKLED.fullmatch(name) is not None and _OF_TRAINING.fullmatch(name) is None


def select(paths: Iterable[str], reader: Reader, roles: Mapping[str, Role] | None = None) -> Selection:
    """Choose among files by their names.

    Args:
        paths: of all files.
        reader: the engine that will read them.
        roles: path → role, for files that their name does not tell; these are always taken.

    Returns:
        A selection that names every path exactly once in `kept` or `left_out`, or in `refused`.
    """
    return _Choice(sorted(paths), reader, dict(roles or {})).run()


class _Choice:
    def __init__(self, paths: list[str], reader: Reader, roles: dict[str, Role]) -> None:
        self.paths, self.reader, self.roles = paths, reader, roles
        # An engine that there is not is refused with the bundle; its files are then those of any other.
        self.formats, self.reads = ENGINES.get(reader.engine, ENGINES["external"])
        self.selection = Selection()
        self.candidates: dict[str, list[str]] = {"gguf": [], "safetensors": []}
        self.projectors: list[str] = []
        self.indexes: list[str] = []
        self.pickled: list[str] = []

    def run(self) -> Selection:
        missing = sorted(set(self.roles) - set(self.paths))
        self.selection.refused += [
            FileRefused("role-without-file", "has a role, but is not in the directory", file=path) for path in missing
        ]
        for path in self.paths:
            self._sort(path)
        self._choose_weights()
        self._choose_projector()
        self._choose_adapters()
        return self.selection

    # ---------------------------------------------------------------------------------------- one file at a time

    def _sort(self, path: str) -> None:
        name = PurePosixPath(path).name
        given = self.roles.get(path)
        if given is None and role_of(path) in _WORDS and is_aside(path):
            self._leave(path, "unusual-name", "has a name that not every system allows, and no engine reads it")
        elif _ARCHIVE.fullmatch(name) or _PROGRAM.fullmatch(name):
            kind = "an archive" if _ARCHIVE.fullmatch(name) else "a program"
            self._refuse(kind.split()[1], path, f"is {kind}, which no bundle holds", found=name)
        elif _PICKLED.fullmatch(name):
            self._sort_pickled(path, name, given)
        elif path in self.reader.code:
            self._keep(path, Role.CODE)
        elif given is not None:
            self._sort_given(path, name, given)
        elif _CODE.fullmatch(name):
            self._leave(path, "code", "code, which no engine needs from a bundle")
        elif _FOREIGN_WEIGHTS.fullmatch(name) or _IMPORTANCE.fullmatch(name):
            self._leave(path, "other-format", "weights or graphs of other programs")
        else:
            self._sort_readable(path, name, role_of(path))

    def _sort_given(self, path: str, name: str, given: Role) -> None:
        if _CODE.fullmatch(name):  # of whatever role: code that is let in may import it
            said = f"has the role {given}, but is code, and engine.remote_code does not name it"
            advice = "name it under engine.remote_code, after somebody has read it"
            self._refuse("remote-code", path, said, found=given, expected=Role.CODE, advice=advice)
        elif _FOREIGN_WEIGHTS.fullmatch(name):
            said = f"has the role {given}, but is weights or a graph of another program"
            self._refuse("weights-foreign", path, said, found=name, expected="what the engine reads")
        elif given in _WORDS and (own := self._read_as(name)) is not None:
            # Its bytes would decide what is served, and what names that would not change with them.
            said = f"has the role {given}, and {self.reader.engine} reads it as {own}"
            advice = f"give it the role {own}, or leave it out with --exclude"
            self._refuse("role-hides", path, said, found=given, expected=own, advice=advice)
        elif given is Role.WEIGHTS and PurePosixPath(name).suffix.removeprefix(".") not in self.formats:
            readable = " or ".join(f".{kind}" for kind in self.formats)
            said = f"has the role weights, and {self.reader.engine} does not read it"
            self._refuse("weights-unreadable", path, said, found=name, expected=readable)
        else:
            self._keep(path, given)

    def _read_as(self, name: str) -> Role | None:
        """Return the role in which the engine reads a file of this name, if it is no text for people."""
        role = role_of(name)
        is_config = role is Role.TEMPLATE and name.endswith(".json")
        return role if role in self.reads - _WORDS and (not is_config or Role.CONFIG in self.reads) else None

    def _sort_pickled(self, path: str, name: str, given: Role | None) -> None:
        if given is not None:
            said = f"has the role {given}, but is pickled: it can run code when it is loaded"
            self._refuse("pickle-weights", path, said, advice="convert it to safetensors")
        elif _ADAPTER_PICKLED.fullmatch(name) and _beside(path, "adapter_model.safetensors") not in self.paths:
            said = "is an adapter that can run code when it is loaded, and there is no other form of it"
            self._refuse("pickle-weights", path, said, advice="convert it to adapter_model.safetensors")
        elif _OF_TRAINING.fullmatch(name):
            self._leave(path, "of-training", "what a trainer keeps of itself")
        else:
            self.pickled.append(path)
            self._leave(path, "pickled", "pickled, so that it can run code when it is loaded")

    def _sort_readable(self, path: str, name: str, role: Role | None) -> None:
        folder = PurePosixPath(path).parent.name
        if role is None:
            reason = "media" if _MEDIA.fullmatch(name) else "of no kind that engines read"
            self._leave(path, "media" if reason == "media" else "unknown", reason)
        elif role is Role.WEIGHTS and is_packed_adapter(path):
            self._keep(path, Role.ADAPTER)
        elif role is Role.WEIGHTS and name.endswith(".gguf"):
            self.candidates["gguf"].append(path)
        elif role is Role.PROCESSOR and name.endswith(".gguf"):
            self.projectors.append(path)
        elif role is Role.ADAPTER:
            self._keep(path, role)
        elif "/" in path and not _is_read_in_folder(folder, name):
            self._leave(path, "elsewhere", "in a folder that the engine does not read")
        elif role is Role.WEIGHTS:
            self.candidates["safetensors"].append(path)
        elif role is Role.WEIGHTS_INDEX:
            self.indexes.append(path)
        elif role not in self.reads or (
            role is Role.TEMPLATE and name.endswith(".json") and Role.CONFIG not in self.reads
        ):
            self._leave(path, "unread", f"{self.reader.engine} does not read it")
        else:
            self._keep(path, role)

    # ------------------------------------------------------------------------------------------- one set of weights

    def _choose_weights(self) -> None:
        load_format = (self.reader.argument(*_LOAD_FORMAT) or "auto").casefold()
        if load_format in {"pt", "bin", "npcache"}:
            said = f"the engine is told to load pickled weights (--load-format {load_format})"
            self._refuse("pickle-weights", "", said, expected="--load-format safetensors")
        is_mistral = "mistral" in (load_format, self.reader.argument("--config-format"))
        sets = {
            "gguf": _gguf_sets(self.candidates["gguf"]),
            "safetensors": _safetensors_sets(self.candidates["safetensors"], self.indexes, is_mistral=is_mistral),
        }
        kind, taken = self._chosen(sets) or (None, [])
        for path in taken:
            self._keep(path, Role.WEIGHTS_INDEX if path in self.indexes else Role.WEIGHTS)
        for other, paths in (*self.candidates.items(), ("safetensors", self.indexes)):
            for path in paths:
                if path not in taken:
                    self._leave_weights(path, other, kind)

    def _leave_weights(self, path: str, kind: str, chosen: str | None) -> None:
        if kind != chosen:
            self._leave(path, "other-format", "weights in a format that is not taken")
        elif kind == "gguf":
            self._leave(path, "other-quantization", "another quantization of the weights")
        else:
            self._leave(path, "duplicate-weights", "weights beside those that are taken")

    def _chosen(self, sets: Mapping[str, Mapping[str, list[str]]]) -> tuple[str, list[str]] | None:
        """Return format and files of the one set of weights that is taken; refuse where there is none, or no one."""
        if Role.WEIGHTS in {*self.selection.kept.values(), *self.roles.values()}:
            return None  # a person named them by their role
        pattern = self.reader.weights
        matching = {kind: _matching(pattern, groups) for kind, groups in sets.items()}
        for kind in self.formats:
            found = matching[kind]
            if len(found) == 1:
                return kind, next(iter(found.values()))
            if found:
                self.selection.several = sorted(found.values(), key=lambda group: (group[0].count("/"), group[0]))
                names = [group[0] for group in self.selection.several]
                said = f"holds several models: {', '.join(names)}"
                choices = " or ".join(f"--weights {name}" for name in names[:_MOST_CHOICES])
                rest = f" or another of the {len(names)}" if len(names) > _MOST_CHOICES else ""
                advice = f"choose one with {choices}{rest}, by a word of its name such as q4_k_m, or with --exclude"
                found_names = ", ".join(names)
                self._refuse("weights-ambiguous", "", said, found=found_names, expected="one model", advice=advice)
                return None
        self._refuse_missing(sets, pattern)
        return None

    def _refuse_missing(self, sets: Mapping[str, Mapping[str, list[str]]], pattern: str | None) -> None:
        readable = " or ".join(f".{kind}" for kind in self.formats)
        there = [group[0] for groups in sets.values() for group in groups.values()]
        if there and pattern is not None and any(sets[kind] for kind in self.formats):
            said, code = f"holds no weights that {pattern} chooses", "weights-unmatched"
            advice = "choose another with --weights"
        elif there:
            said, code = f"holds weights that {self.reader.engine} does not read", "weights-unreadable"
            advice = f"convert them to {readable}, or name an engine that reads them"
        elif self.pickled:
            said, code = "holds no weights but pickled ones, which can run code when they are loaded", "pickle-weights"
            there, advice = self.pickled, "convert them to safetensors"
        else:
            said, code = "holds no weights", "weights-missing"
            advice = f"a bundle for {self.reader.engine} needs a {readable} file"
        found = ", ".join(there[:8]) or None
        self._refuse(code, "", said, found=found, expected=readable, advice=advice)

    def _choose_projector(self) -> None:
        """Take one of several precisions of the projector for other media, as a person would: half precision first."""
        matching = [path for path in self.projectors if self.reader.weights and _matches(self.reader.weights, [path])]
        ordered = sorted(matching or self.projectors, key=_precision)
        for path in self.projectors:
            if path == ordered[0]:
                self._keep(path, Role.PROCESSOR)
            else:
                self._leave(path, "other-quantization", f"another precision of {ordered[0]}")

    def _choose_adapters(self) -> None:
        """Of an adapter that is there in both formats, take the one that the engine reads first."""
        folders: dict[str, list[str]] = {}
        for path, role in self.selection.kept.items():
            if role is Role.ADAPTER and path not in self.roles:
                folders.setdefault(str(PurePosixPath(path).parent), []).append(path)
        for paths in folders.values():
            packed = [path for path in paths if path.endswith(".gguf")]
            plain = [path for path in paths if path not in packed]
            if any(path.endswith(".safetensors") for path in plain):
                for path in packed if self.formats[0] != "gguf" else plain if packed else ():
                    del self.selection.kept[path]
                    self._leave(path, "other-format", "an adapter in a format that is not taken")

    # ----------------------------------------------------------------------------------------------------- outcomes

    def _keep(self, path: str, role: Role) -> None:
        self.selection.kept[path] = role

    def _leave(self, path: str, code: str, reason: str) -> None:
        self.selection.left_out.append(LeftOut(path, code, reason))

    def _refuse(
        self,
        code: str,
        path: str,
        said: str,
        *,
        found: object = None,
        expected: object = None,
        advice: str | None = None,
    ) -> None:
        advice = advice or "leave it out with --exclude"
        self.selection.refused.append(FileRefused(code, said, file=path, found=found, expected=expected, advice=advice))


def _beside(path: str, name: str) -> str:
    return (PurePosixPath(path).parent / name).as_posix()


def _is_read_in_folder(folder: str, name: str) -> bool:
    pooling = re.fullmatch(r"[0-9]+_[A-Za-z]+", folder) is not None and name == "config.json"
    return pooling or (folder == "additional_chat_templates" and name.endswith(".jinja"))


def _matching(pattern: str | None, groups: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Return the sets of files that a person's words choose: the one that has a file of that very path, if any."""
    if pattern is None:
        return dict(groups)
    exactly = {stem: group for stem, group in groups.items() if pattern in group}
    return exactly or {stem: group for stem, group in groups.items() if _matches(pattern, group)}


def _matches(pattern: str, group: Iterable[str]) -> bool:
    wanted = pattern.casefold()
    word = re.compile(rf"(?<![a-z0-9]){re.escape(wanted)}(?![a-z0-9_])")
    return any(
        fnmatch.fnmatchcase(path.casefold(), wanted)
        or fnmatch.fnmatchcase(PurePosixPath(path).name.casefold(), wanted)
        or word.search(path.casefold()) is not None
        for path in group
    )


def _precision(path: str) -> tuple[int, str]:
    words = re.split(r"[^a-z0-9_]+", path.casefold())
    return next((place for place, word in enumerate(_PROJECTORS) if word in words), len(_PROJECTORS)), path


def _gguf_sets(paths: Iterable[str]) -> dict[str, list[str]]:
    """Return the sets of shards, by folder and the name without its number."""
    sets: dict[str, list[str]] = {}
    for path in paths:
        shard = _SHARD.fullmatch(path)
        sets.setdefault(shard["stem"] if shard else path, []).append(path)
    return sets


def _safetensors_sets(paths: Sequence[str], indexes: Sequence[str], *, is_mistral: bool) -> dict[str, list[str]]:
    """Return the sets of files that an engine would load as one model.

    Where there is an index it decides, since shards may have any name: all files but other copies are one set, and the
    index is checked against them later. Mistral's own copy, `consolidated`, counts when the engine is told to read it,
    or when there is no other. Without an index the files called `model` are the model.
    """
    copies = {path for path in [*paths, *indexes] if _CONSOLIDATED.fullmatch(path)}
    consolidated = [path for path in paths if path in copies]
    own = [path for path in paths if path not in copies and not is_variant(path, paths)]
    if consolidated and (is_mistral or not own):
        return {"consolidated": sorted(copies)}
    index = [path for path in indexes if path not in copies and path.endswith(".safetensors.index.json")]
    if own and index:
        return {"index": [*own, *index]}
    sets: dict[str, list[str]] = {}
    for path in own:
        shard = _SHARD.fullmatch(path)
        stem = shard["stem"] if shard else PurePosixPath(path).stem
        sets.setdefault(stem, []).append(path)
    return {"model": sets["model"]} if "model" in sets else sets


def is_variant(path: str, paths: Iterable[str]) -> bool:
    """Tell whether a file is another precision of one that is there, such as `model.fp16.safetensors`."""
    variant = _VARIANT.fullmatch(path)
    if variant is None:
        return False
    stem = re.escape(variant["stem"])
    return any(re.fullmatch(rf"{stem}(-[0-9]{{5}}-of-[0-9]{{5}})?\.safetensors", other) for other in paths)
