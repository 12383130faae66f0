"""The composition that is checked: the model's files, its adapters and draft, and what was declared with them.

Each file is read once, when the first check asks for it, and what it tells is shared by all checks.
"""

import re
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from gates.files.contents import Reader, is_packed_adapter
from gates.files.header import Array, Header
from gates.files.refusal import FileRefused, opened
from gates.files.strict_json import load_object
from gates.files.weights import header as read_header
from gates.static import gguf_words, tekken, word_files
from gates.static.chosen import choose
from gates.static.declared import Adapter, Arguments, Declared, declared_by
from gates.static.flaw import Flaw, flaw
from gates.static.listing import Entry, Listing, list_directory, list_named, sentence
from gates.static.names import InLayer, embedding, in_layers
from gates.static.probes import Renderings, render
from gates.static.quantized import QUANTIZATION_FILES, Quantization, quantization_of
from gates.static.required import Needed, needed
from gates.static.rules import Rules
from gates.static.shape import Shape, shape_of
from gates.static.spellings import spelled_out
from gates.static.tensors import Weights, gguf_headers
from gates.static.words import Tokenizer
from schemas.bundle import Bundle, Role

DRAFT = "draft"
"""Folder that a source of a draft model brings its files to."""
_WITHOUT_TURNS = frozenset({"completions", "embeddings", "logprobs", "deterministic"})
_POOLED = frozenset({"embeddings", "deterministic"})
_POOLING = ("--is-embedding", "--embedding", "--embeddings", "--reranking", "--rerank")
_POOLING_TASKS = frozenset({"embed", "embedding", "classify", "score", "reward"})
"""Features for which no template is rendered."""
_OWN_HEADS = frozenset({"eagle", "eagle3", "medusa", "mtp", "mlp_speculator", "deepseek_mtp"})
MAX_TEXT_BYTES = 8 * 1024 * 1024
MOST_TEMPLATES = 12
"""Further templates that are tried, each in a process of its own; published models have two."""
_SHARD = re.compile(r"(?P<stem>.+)-[0-9]{5}-of-(?P<count>[0-9]{5}\.gguf)")

_OBJECTS = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.json",
    "params.json",
    tekken.FILE,
    "adapter_config.json",
    "hf_quant_config.json",
    "quantize_config.json",
    "quantization_config.json",
    "quant_config.json",
)


class Part:
    """One model, adapter or draft: the files that lie directly in one folder."""

    def __init__(self, folder: str, entries: Mapping[str, Entry], *, shown: str | None = None) -> None:
        self.folder = folder if shown is None else shown
        here = [entry for entry in entries.values() if entry.folder == folder]
        if shown is not None:  # a folder beside the others, whose files are told by where they were named
            here = [replace(entry, path=f"{shown}/{entry.name}") for entry in here]
        self.entries = {entry.name: entry for entry in here}
        self._objects: dict[str, dict[str, Any]] = {}
        self.flaws: list[Flaw] = []

    def path(self, name: str) -> str:
        """Return a file's path in the composition."""
        return f"{self.folder}/{name}" if self.folder else name

    def has(self, *names: str) -> bool:
        """Say whether one of these files is there."""
        return any(name in self.entries for name in names)

    def object(self, name: str) -> dict[str, Any]:
        """Return a JSON file's object; empty when there is none, or none that can be read (then a flaw says so)."""
        if name not in self._objects:
            self._objects[name] = self._read_object(name)
        return self._objects[name]

    def _read_object(self, name: str) -> dict[str, Any]:
        entry = self.entries.get(name)
        if entry is None or entry.is_stub:
            return {}
        try:
            return load_object(entry.place, entry.path)
        except FileRefused as refused:
            where = refused.pointer or (None if refused.offset is None else f"byte {refused.offset}")
            self.flaws.append(
                flaw(
                    "config-unparseable",
                    f"{entry.path} {refused}.",
                    file=entry.path,
                    pointer=where,
                    found={"reason": refused.code, "offset": refused.offset, "value": refused.found},
                    expected=refused.expected or "an object in JSON",
                    advice=sentence(refused.advice),
                )
            )
        return {}

    def text(self, name: str) -> str | None:
        """Return a text file; None when there is none, or it is no text (then a flaw says so)."""
        entry = self.entries.get(name)
        if entry is None or entry.is_stub:
            return None
        try:
            with opened(entry.place) as (file, _):
                raw = file.read(MAX_TEXT_BYTES + 1)
            if len(raw) > MAX_TEXT_BYTES:
                raise ValueError(f"is larger than {MAX_TEXT_BYTES} bytes")
            if raw.startswith(BOM_UTF8):
                raise ValueError("begins with a byte order mark, which engines write before each prompt")
            return raw.decode()
        except UnicodeDecodeError as error:
            reason = f"is not UTF-8 at byte {error.start}"
        except ValueError as error:  # a file that is refused, too
            reason = str(error)
        self.flaws.append(
            flaw(
                "config-unparseable",
                f"{self.path(name)} {reason}.",
                file=self.path(name),
                found=reason,
                expected=f"a text in UTF-8 of at most {MAX_TEXT_BYTES} bytes",
            )
        )
        return None

    def read_all(self) -> None:
        """Read every file that is an object, so that `flaws` has each one that cannot be."""
        for name in _OBJECTS if self.has("tokenizer.json") else (*_OBJECTS, word_files.VOCABULARY):
            self.object(name)
        self.weights.read_all()

    @property
    def config(self) -> dict[str, Any]:
        """`config.json`."""
        return self.object("config.json")

    @cached_property
    def shape(self) -> Shape:
        """What the configuration says about the language model's sizes."""
        return shape_of(self.config)

    @cached_property
    def weights(self) -> Weights:
        """The tensor files and their index."""
        # Mistral's own copy has an index too, and engines read the other one where there are both.
        indexes = [name for name in sorted(self.entries) if name.lower().endswith(".safetensors.index.json")]
        index_name = next((name for name in indexes if not name.startswith("consolidated")), next(iter(indexes), None))
        index = {} if index_name is None else self.object(index_name)
        return Weights(self.folder, self.entries, index_name, index)

    @cached_property
    def layered(self) -> list[InLayer]:
        """The tensors of the language model's layers."""
        return in_layers(self.weights.effective)

    @cached_property
    def needed(self) -> list[Needed]:
        """What the architecture needs besides its head, where its family's names are known."""
        return list(needed(self.shape, self.layered, embedding(self.weights.effective)))

    @cached_property
    def gguf_files(self) -> dict[str, Header]:
        """Headers of the GGUF files that can be read, by name."""
        return gguf_headers(self.entries, self.flaws)

    @property
    def gguf(self) -> Header | None:
        """The header of the first GGUF file, which has the metadata; None when there is none."""
        return next(iter(self.gguf_files.values()), None)

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """What tokenizer.json says, a GGUF file that has tokens, or the older files that stand for it; None without."""
        if (inside := self._gguf_tokenizer()) is not None:
            return inside
        names = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
        config, special_map, added_file = (self.object(name) for name in names)
        if self.has("tokenizer.json"):
            document = self.object("tokenizer.json")
            whole = Tokenizer(document, config, special_map, added_file, numbers_itself=True)
            return whole if document else None
        if self.tekken is not None:
            return self.tekken
        pieces = self.entries.get(word_files.PIECES)
        place = None if pieces is None or pieces.is_stub else pieces.place
        return word_files.tokenizer_of(self.object(word_files.VOCABULARY), place, config, special_map, added_file)

    @cached_property
    def tekken(self) -> Tokenizer | None:
        """Mistral's own tokenizer; None without one that its library loads."""
        document = self.object(tekken.FILE)
        return tekken.tokenizer_of(document, self.object("tokenizer_config.json")) if document else None

    @property
    def tokenizer_file(self) -> str:
        """Path of the file that names the tokens, or of tokenizer.json where none does."""
        names = (*self.gguf_files, "tokenizer.json", tekken.FILE, word_files.VOCABULARY, word_files.PIECES)
        return self.path(next((name for name in names if name in self.entries), "tokenizer.json"))

    def _gguf_tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer of the first GGUF file, whose header is read again for its tokens."""
        header, name = self.gguf, next(iter(self.gguf_files), "")
        tokens = None if header is None else header.metadata.get(gguf_words.TOKENS)
        if not isinstance(tokens, Array) or not 0 < tokens.count <= gguf_words.MOST_TOKENS:
            return None
        entry = self.entries[name]
        try:
            return gguf_words.tokenizer_of(read_header(entry.place, entry.path, keep=gguf_words.KEPT))
        except FileRefused:
            return None  # it changed since it was read, which is told by itself

    @cached_property
    def templates(self) -> list[tuple[str, str]]:
        """Every default chat template with its file, the one that wins first."""
        found = []
        if (text := self.text("chat_template.jinja")) is not None:
            found.append((text, self.path("chat_template.jinja")))
        beside = self.object("chat_template.json").get("chat_template")
        if one := beside if isinstance(beside, str) else _by_name(beside).get(DEFAULT_TEMPLATE):
            found.append((one, self.path("chat_template.json")))
        if isinstance(of_processor := self.object("processor_config.json").get("chat_template"), str) and of_processor:
            found.append((of_processor, self.path("processor_config.json")))
        told = self.object("tokenizer_config.json").get("chat_template")
        told = told if isinstance(told, str) else _by_name(told).get(DEFAULT_TEMPLATE)
        if told:
            found.append((told, self.path("tokenizer_config.json")))
        inside = None if self.gguf is None else self.gguf.metadata.get("tokenizer.chat_template")
        if isinstance(inside, str) and inside:
            found.append((inside, self.path(next(iter(self.gguf_files)))))
        return found

    def named_templates(self, entries: Mapping[str, Entry]) -> dict[str, tuple[str, str]]:
        """Return the further templates, name → text and file, by the first of the places that holds any.

        Args:
            entries: all files, of which those in `additional_chat_templates` are read.

        Source: `PreTrainedTokenizerBase.from_pretrained` and `get_chat_template` of transformers; llama.cpp reads
        `tokenizer.chat_template.NAME` of a header.
        """
        inside = Part(self.path("additional_chat_templates"), entries)
        beside = {
            name.removesuffix(".jinja"): (text, inside.path(name))
            for name in sorted(inside.entries)
            if name.endswith(".jinja") and (text := inside.text(name)) is not None
        }
        self.flaws += inside.flaws
        header = {} if self.gguf is None else self.gguf.metadata
        prefix, first = "tokenizer.chat_template.", next(iter(self.gguf_files), "")
        sources: list[dict[str, tuple[str, str]]] = [beside]
        for file in ("chat_template.json", "tokenizer_config.json"):
            told = _by_name(self.object(file).get("chat_template"))
            sources.append({name: (text, self.path(file)) for name, text in told.items()})
        sources.append(
            {
                key.removeprefix(prefix): (text, self.path(first))
                for key, text in header.items()
                if key.startswith(prefix) and isinstance(text, str)
            }
        )
        found = next((one for one in sources if one), {})
        return {name: one for name, one in found.items() if name != DEFAULT_TEMPLATE}


DEFAULT_TEMPLATE, TOOL_TEMPLATE = "default", "tool_use"
"""Names of templates that engines take by themselves: without tools, and with them."""


def _by_name(told: object) -> dict[str, str]:
    """Return templates by name, from a list of objects or from an object."""
    pairs = told.items() if isinstance(told, dict) else []
    if isinstance(told, list):
        pairs = [(one.get("name"), one.get("template")) for one in told if isinstance(one, dict)]
    return {name: text for name, text in pairs if isinstance(name, str) and isinstance(text, str) and text}


@dataclass(frozen=True)
class Composition:
    """Everything that the checks look at."""

    listing: Listing
    declared: Declared
    model: Part
    adapters: tuple[tuple[Adapter, Part], ...] = ()
    draft: Part | None = None
    roles: Mapping[str, Role] | None = None
    """Of a registered bundle's files. Each of them lies where the engine reads, so that none is left out."""

    chosen: tuple[str, str, str] | None = None
    """Name, text and file of a further template that is looked at as if it were in force."""

    several: tuple[str, ...] = ()
    """Models of a directory of which nobody chose one, by their first files: the first of all is looked at."""

    @property
    def parts(self) -> Iterator[Part]:
        """The model, its adapters and its draft."""
        yield self.model
        for _, part in self.adapters:
            yield part
        if self.draft is not None:
            yield self.draft

    def is_head(self, part: Part) -> bool:
        """Say whether a part is a head that drafts from the target's own states, with tensors of its own kind."""
        by_method = part is self.draft and (self.declared.draft_method or "").lower() in _OWN_HEADS
        return by_method or part.shape.is_head

    @property
    def speaks(self) -> bool:
        """Whether the chat template may be used: chat, or what comes with it, is declared, or nothing is."""
        features = self.declared.features
        return (
            not features or not (features - {"streaming"} if features & _WITHOUT_TURNS else features) <= _WITHOUT_TURNS
        )

    @property
    def pools(self) -> bool:
        """Whether answers are vectors or scores and nothing is generated, by what is declared, launched, or the class.

        Source: `--runner` and the older `--task` of vLLM, `--is-embedding` of SGLang, and llama.cpp's own.
        """
        features, words, shape = self.declared.features, self.declared.arguments, self.model.shape
        is_launched = words.get("--runner") == "pooling" or words.get("--task") in _POOLING_TASKS
        return (
            (features is not None and bool(features) and features <= _POOLED)
            or is_launched
            or words.has(*_POOLING)
            or (bool(shape.architecture) and not shape.is_generator)
        )

    @property
    def template(self) -> tuple[str, str] | None:
        """The chat template in force and its file: the declared one, or else the one that wins by its place."""
        if self.chosen is not None:
            return self.chosen[1], self.chosen[2]
        named = self.declared.template_file or self.declared.arguments.get("--chat-template", "--chat-template-file")
        if named is not None:
            if self.declared.template_file is None:  # a path on the engine's machine
                named = self.model.path(named.rpartition("/")[2])
            inside = named.rpartition("/")
            text = Part(inside[0], self.listing.entries).text(inside[2])
            return None if text is None else (text, named)
        return next(iter(self.model.templates), None)

    @cached_property
    def others(self) -> "dict[str, Composition]":
        """The composition with each further template in force, by its name; none where one is declared."""
        if self.chosen is not None or self.declared.template_file is not None:
            return {}
        if self.declared.arguments.has("--chat-template", "--chat-template-file"):
            return {}
        found = self.model.named_templates(self.listing.entries)
        first = sorted(found.items(), key=lambda one: (one[0] != TOOL_TEMPLATE, one[0]))[:MOST_TEMPLATES]
        return {name: replace(self, chosen=(name, text, file)) for name, (text, file) in sorted(first)}

    @cached_property
    def engine(self) -> str | None:
        """The engine's name; for GGUF it is llama.cpp when nobody said another, else None."""
        return self.declared.engine or ("llamacpp" if self.model.gguf is not None else None)

    @cached_property
    def rules(self) -> Rules:
        """What the engine does in its version."""
        return Rules(self.declared, self.engine)

    @cached_property
    def renderings(self) -> Renderings | None:
        """What the template in force makes of each probe; None without a template."""
        if self.template is None:
            return None
        source, file = self.template
        with_tools = self.chosen is not None and self.chosen[0] == TOOL_TEMPLATE
        return render(source, file, self._variables(), with_tools=with_tools)

    def _variables(self) -> dict[str, Any]:
        words = self.model.tokenizer
        told = self.model.object("tokenizer_config.json")
        names = ("bos_token", "eos_token", "unk_token", "pad_token")
        found: dict[str, Any] = {}
        for name in names:
            value = told.get(name)
            text = (
                words.named(name) if words is not None else value.get("content") if isinstance(value, dict) else value
            )
            if isinstance(text, str):
                found[name] = text
        # A template that writes BOS shall be seen to write it, also where only the tokenizer's own processor names one.
        if "bos_token" not in found and words is not None and words.prefix:
            found["bos_token"] = words.texts.get(words.prefix[0], "")
        asked = self.declared.arguments.json("--default-chat-template-kwargs", "--chat-template-kwargs") or {}
        return {**dict.fromkeys(names, ""), **found, **asked, **self.declared.template_arguments}

    @cached_property
    def quantization(self) -> Quantization | None:
        """How the model says that it is quantized; None when it says nothing."""
        return quantization_of(self.model.config, {name: self.model.object(name) for name in QUANTIZATION_FILES})


def of_directory(
    root: Path, declared: Declared, *, beside: Path | None = None, weights: str | None = None
) -> Composition:
    """Return the composition of a directory, or of a single file of weights with those that complete it.

    Args:
        root: of the model's files, or the file.
        declared: what the files cannot tell; its folders are looked for in `root`, then in `beside`.
        beside: where the declaration lies.
        weights: which weights, where there are several: a word of their name, or a pattern.

    Raises:
        OSError: a directory cannot be read.
        FileRefused: `weights` chooses none, or several.
    """
    declared = _spelled_out(declared)
    listing = list_directory(root) if root.is_dir() else list_named(_with_shards(root))
    places = [root if root.is_dir() else root.parent, *([beside] if beside is not None else [])]
    adapters = tuple((one, _part(listing, places, one.folder)) for one in declared.adapters)
    if not adapters:
        adapters = tuple(_found_adapters(listing))
    draft = _part(listing, places, declared.draft_folder) if declared.draft_folder else None
    apart = [part.folder for part in (*(part for _, part in adapters), *([draft] if draft is not None else []))]
    reader = Reader(declared.engine or "external", declared.arguments.words, weights, declared.code)
    chosen = choose(listing.entries, reader, apart=[one for one in apart if one])
    listing = listing.without(chosen.unread, unread=chosen.aside)
    return Composition(listing, declared, Part(chosen.folder, listing.entries), adapters, draft, several=chosen.several)


def _with_shards(file: Path) -> dict[str, Path]:
    """Return a file of weights and the shards of its set, by name."""
    shard = _SHARD.fullmatch(file.name)
    beside = sorted(file.parent.iterdir()) if shard is not None else [file]
    same = [one for one in beside if shard is None or _is_of_set(one.name, shard)]
    return {one.name: one.resolve() for one in same}


def _is_of_set(name: str, shard: re.Match[str]) -> bool:
    other = _SHARD.fullmatch(name)
    return other is not None and (other["stem"], other["count"]) == (shard["stem"], shard["count"])


def of_places(
    places: Mapping[str, Path], declared: Declared, *, beside: Path | None = None, several: tuple[str, ...] = ()
) -> Composition:
    """Return the composition of files that were put together from several sources.

    Args:
        places: path of each file in the bundle → where its bytes are. Adapters and a draft that lie where sources
            bring them count beside what is declared.
        declared: what the files cannot tell.
        beside: where the declaration lies: its folders are looked for there.
        several: models that the base has, the first of which is among the files.

    Raises:
        OSError: a directory cannot be read.
    """
    declared = _spelled_out(declared)
    listing = list_named(places)
    folders = [] if beside is None else [beside]
    adapters = [(one, _part(listing, folders, one.folder)) for one in declared.adapters]
    named = {part.folder for _, part in adapters}
    adapters += [one for one in _found_adapters(listing) if one[1].folder not in named]
    draft = None
    if declared.draft_folder:
        draft = _part(listing, folders, declared.draft_folder)
    elif any(entry.folder == DRAFT for entry in listing.entries.values()):
        draft = Part(DRAFT, listing.entries)
    return Composition(listing, declared, Part("", listing.entries), tuple(adapters), draft, several=several)


def of_bundle(bundle: Bundle, root: Path) -> Composition:
    """Return the composition that a bundle names, where the engine reads it."""
    return of_files(bundle, {file.path: root / file.path for file in bundle.files})


def of_files(bundle: Bundle, places: Mapping[str, Path]) -> Composition:
    """Return the composition that a bundle names.

    Args:
        bundle: its document.
        places: path of each of its files → where its bytes are.
    """
    declared = _spelled_out(declared_by(bundle))
    listing = list_named(places)
    folders = sorted({file.path.rpartition("/")[0] for file in bundle.weights()}, key=lambda one: (one.count("/"), one))
    adapters = tuple((one, Part(one.folder, _named_only(listing, one))) for one in declared.adapters)
    draft = Part(declared.draft_folder, listing.entries) if declared.draft_folder is not None else None
    roles = {file.path: file.role for file in bundle.files}
    return Composition(listing, declared, Part(folders[0], _without_packed(listing, roles)), adapters, draft, roles)


def _spelled_out(declared: Declared) -> Declared:
    words = spelled_out(declared.engine, declared.version, declared.arguments.words)
    return replace(declared, arguments=Arguments(words))


def _part(listing: Listing, places: list[Path], folder: str) -> Part:
    inside = folder.strip("/").removeprefix("./")
    if any(entry.folder == inside for entry in listing.entries.values()):
        return Part(inside, listing.entries)
    for place in places:
        outside = place / folder
        if outside.is_dir():
            found = list_directory(outside)
            shown = folder.rstrip("/")
            part = Part("", found.entries, shown=shown)
            part.flaws += [replace(one, file=f"{shown}/{one.file}") for one in found.flaws]
            return part
    raise FileNotFoundError(2, "there is no such directory", folder)


def _named_only(listing: Listing, adapter: Adapter) -> Mapping[str, Entry]:
    """Return the files that an adapter names, where they are GGUF: beside them a whole model may lie."""
    if not any(path.endswith(".gguf") for path in adapter.files):
        return listing.entries
    return {path: entry for path, entry in listing.entries.items() if path in adapter.files}


def _without_packed(listing: Listing, roles: Mapping[str, Role]) -> Mapping[str, Entry]:
    """Return the files without adapters in GGUF, which beside the weights would be taken for some."""
    return {
        path: entry
        for path, entry in listing.entries.items()
        if not (path.endswith(".gguf") and roles.get(path) is Role.ADAPTER)
    }


def _found_adapters(listing: Listing) -> Iterator[tuple[Adapter, Part]]:
    packed: set[str] = set()
    for path in sorted(listing.entries):
        folder, _, name = path.rpartition("/")
        if name == "adapter_config.json":
            yield Adapter(folder.rpartition("/")[2] or "adapter", folder), _adapter_part(folder, listing)
        elif is_packed_adapter(path) and folder not in packed:
            packed.add(folder)
            if f"{folder}/adapter_config.json" not in listing.entries:
                yield Adapter(folder.rpartition("/")[2], folder), Part(folder, listing.entries)


def _adapter_part(folder: str, listing: Listing) -> Part:
    """Return an adapter of a folder, of which only its own files count where a whole model lies there too."""
    here = {path: entry for path, entry in listing.entries.items() if entry.folder == folder}
    names = [entry.name for entry in here.values() if entry.name.endswith(".safetensors")]
    if all(name.startswith("adapter_model") for name in names):
        return Part(folder, here)
    return Part(folder, {path: entry for path, entry in here.items() if entry.name.startswith("adapter_")})
