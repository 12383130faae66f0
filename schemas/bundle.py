"""The bundle: everything that decides what is served, in one immutable document.

Each section answers one row of "what must be versioned together": files and their sources, weights, tokenizer
and processor, template and parsers, quantization with its calibration, adapters, draft model, engine, topology,
hardware constraints, runtime limits with sampling defaults, serving contract, licence. Replica count, fleet
policy and results are not in it: scaling out is no new bundle.
"""

from enum import StrEnum
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from schemas.common import (
    Closed,
    DecimalString,
    Digest,
    Document,
    Integer,
    LabelValue,
    Name,
    Positive,
    RelativePath,
    ShortText,
    Text,
    canonical_json,
    folded,
    sha256_digest,
    sorted_unique,
)

MAX_FILES = 10_000
MAX_LABELS = 32


class Role(StrEnum):
    """What a file is for."""

    WEIGHTS = "weights"
    WEIGHTS_INDEX = "weights_index"
    CONFIG = "config"
    GENERATION_CONFIG = "generation_config"
    TOKENIZER = "tokenizer"
    PROCESSOR = "processor"
    TEMPLATE = "template"
    QUANTIZATION = "quantization"
    ADAPTER = "adapter"
    DRAFT = "draft"
    CODE = "code"
    """Code that comes with the model; only what `engine.remote_code` names."""
    LICENCE = "licence"
    DOCUMENTATION = "documentation"


READ_BY_ENGINE = frozenset(Role) - {Role.LICENCE, Role.DOCUMENTATION}


class File(Closed):
    """One file of the bundle, named by its place and its bytes."""

    path: RelativePath = Field(description="Relative POSIX path under the bundle's root.")
    size: Integer = Field(description="Size in bytes.")
    sha256: Digest = Field(description="SHA-256 of the bytes.")
    role: Role = Field(description="What the file is for.")


class Source(Closed):
    """Where files came from, pinned to something that cannot move."""

    kind: Literal["directory", "huggingface", "s3", "https"] = Field(description="Kind of source.")
    location: ShortText | None = Field(
        None, description="Repository, bucket and prefix, or URL; absent for a directory."
    )
    revision: ShortText = Field(description="Commit, version id, or for a directory the digest of its file list.")


class Model(Closed):
    """The weights as a whole."""

    format: Literal["gguf", "safetensors"] = Field(description="File format of the weights.")
    architecture: ShortText = Field(description="Architecture as the files name it, such as llama or gemma3.")
    parameters: Positive | None = Field(None, description="Number of parameters, where known.")


class Tokenizer(Closed):
    """Tokenizer and, for other media, processor."""

    origin: Literal["files", "weights"] = Field(description="In files of their own, or inside the weights (GGUF).")
    special_tokens: dict[ShortText, Integer] | None = Field(None, description="Special tokens and their ids.")
    normalization: ShortText | None = Field(None, description="Unicode normalization applied before tokenizing.")
    media_limits: dict[Name, Positive] | None = Field(None, description="Processor limits, such as image pixels.")


class Template(Closed):
    """Chat template and the parsers that undo it."""

    origin: Literal["file", "weights", "tokenizer_config", "none"] = Field(description="Where the template lives.")
    file: RelativePath | None = Field(None, description="The template's file, when it is one.")
    arguments: dict[ShortText, ShortText | bool | Integer] | None = Field(None, description="Fixed template arguments.")
    tool_parser: ShortText | None = Field(None, description="The engine's tool-call parser.")
    reasoning_parser: ShortText | None = Field(None, description="The engine's reasoning parser.")

    @model_validator(mode="after")
    def _file_when_file(self) -> Self:
        if (self.origin == "file") != (self.file is not None):
            raise ValueError("file is given exactly when origin is 'file'")
        return self


class Calibration(Closed):
    """Data that quantization was calibrated with."""

    dataset: ShortText = Field(description="Name of the data set.")
    revision: ShortText = Field(description="Its immutable revision.")
    digest: Digest | None = Field(None, description="SHA-256 of the data used.")


class Quantization(Closed):
    """How weights, activations and KV cache are stored."""

    method: ShortText = Field(description="Method as the engine names it: none, q4_k_m, awq, gptq, fp8 …")
    bits: Positive | None = Field(None, description="Bits per weight.")
    group_size: Positive | None = Field(None, description="Weights that share a scale.")
    kv_cache: ShortText | None = Field(None, description="Data type of the KV cache.")
    calibration: Calibration | None = Field(None, description="Calibration lineage.")


class Adapter(Closed):
    """A LoRA or similar adapter."""

    name: Name = Field(description="Name it is served under.")
    files: Annotated[list[RelativePath], Field(min_length=1, max_length=64)] = Field(description="Its files, sorted.")
    base: Digest | None = Field(None, description="Weights component digest it was trained on.")
    rank: Positive = Field(description="Rank of the update.")
    target_modules: Annotated[list[ShortText], Field(min_length=1, max_length=256)] = Field(description="Sorted.")
    owner: ShortText | None = Field(None, description="Tenant that owns it.")

    @model_validator(mode="after")
    def _sets(self) -> Self:
        sorted_unique(self.files, "adapter files")
        sorted_unique(self.target_modules, "target_modules")
        return self


class Draft(Closed):
    """Speculative decoding."""

    method: ShortText = Field(description="draft_model, ngram, eagle, medusa …")
    files: list[RelativePath] | None = Field(None, description="The draft model's files, sorted.")
    tokens: Positive = Field(description="Tokens proposed a step.")

    @model_validator(mode="after")
    def _sets(self) -> Self:
        sorted_unique(self.files or [], "draft files")
        return self


class RemoteCode(Closed):
    """Code that comes with the model and that the engine may run: an exception, made file by file."""

    files: Annotated[list[RelativePath], Field(min_length=1, max_length=256)] = Field(
        description="Every file of the bundle with the role code, sorted."
    )
    reason: Text = Field(description="Who read the code, and why it is needed.")

    @model_validator(mode="after")
    def _sets(self) -> Self:
        sorted_unique(self.files, "remote code files")
        return self


EnvironmentName = Annotated[str, StringConstraints(pattern=r"^[A-Z][A-Z0-9_]{0,127}$")]


class Engine(Closed):
    """The program that serves, by the identity of what runs."""

    name: Literal["llamacpp", "vllm", "sglang", "trtllm", "transformers", "tgi", "external"] = Field(
        description="Which engine."
    )
    version: ShortText = Field(description="Version it reports.")
    image: Annotated[str, StringConstraints(pattern=r"^[a-z0-9./_:-]{1,255}@sha256:[0-9a-f]{64}$")] | None = Field(
        None, description="Container image by digest."
    )
    environment: Digest | None = Field(None, description="Digest over the installed distributions' records.")
    arguments: Annotated[list[Annotated[str, StringConstraints(max_length=1024)]], Field(max_length=256)] = Field(
        description="Launch arguments in order, without model path, name, host and port."
    )
    variables: dict[EnvironmentName, Annotated[str, StringConstraints(max_length=1024)]] | None = Field(
        None, description="Environment variables that the engine gets."
    )
    attention_backend: ShortText | None = Field(None, description="Attention kernels, where chosen.")
    build: dict[ShortText, ShortText] | None = Field(None, description="Build flags and graph settings.")
    remote_code: RemoteCode | None = Field(
        None, description="Code of the model that the engine may run; none if absent."
    )

    @model_validator(mode="after")
    def _identified(self) -> Self:
        if self.name == "external":
            if self.image is not None or self.environment is not None:
                raise ValueError("an external engine runs elsewhere: neither image nor environment names it")
        elif (self.image is None) == (self.environment is None):
            raise ValueError("exactly one of image and environment names the engine")
        return self


class Topology(Closed):
    """How one replica is laid over devices."""

    tensor_parallel: Positive = Field(description="TP degree.")
    pipeline_parallel: Positive = Field(description="PP degree.")
    expert_parallel: Positive = Field(description="EP degree.")
    data_parallel: Positive = Field(description="DP degree.")
    context_parallel: Positive = Field(description="Context (sequence) parallel degree.")
    nodes: Positive = Field(description="Machines one replica spans.")


class Hardware(Closed):
    """What a runner must have. Driver and CUDA are constraints here and exact in the runner's fingerprint."""

    accelerator: ShortText = Field(description="cpu, or the accelerator's SKU.")
    count: Integer = Field(description="Accelerators a replica needs; 0 for cpu.")
    memory_bytes: Positive | None = Field(None, description="Least memory per accelerator, or of the machine on cpu.")
    mig: ShortText | None = Field(None, description="MIG profile.")
    driver: ShortText | None = Field(None, description="Driver constraint, such as >=550.")
    cuda: ShortText | None = Field(None, description="CUDA constraint.")
    interconnect: ShortText | None = Field(None, description="Links needed between accelerators.")


class Sampling(Closed):
    """Sampling values that apply when a request names none."""

    temperature: DecimalString | None = Field(None, description="Softmax temperature.")
    top_p: DecimalString | None = Field(None, description="Nucleus mass.")
    top_k: Integer | None = Field(None, description="Candidates kept; 0 keeps all.")
    min_p: DecimalString | None = Field(None, description="Least share of the best candidate's probability.")
    repetition_penalty: DecimalString | None = Field(None, description="1 leaves probabilities alone.")


class Runtime(Closed):
    """Limits and defaults while serving."""

    context_tokens: Positive = Field(description="Context that one request gets, in tokens.")
    max_sequences: Positive = Field(description="Requests served at once.")
    max_batch_tokens: Positive | None = Field(None, description="Token budget of one scheduler step.")
    prefix_caching: bool | None = Field(None, description="Whether prompt prefixes are cached.")
    sampling: Sampling | None = Field(None, description="Sampling defaults.")
    flags: dict[ShortText, ShortText] | None = Field(None, description="Scheduler, cache, preemption, feature flags.")


class Feature(StrEnum):
    """What callers may rely on."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    STREAMING = "streaming"
    TOOLS = "tools"
    JSON_SCHEMA = "json_schema"
    LOGPROBS = "logprobs"
    REASONING = "reasoning"
    SYSTEM_ROLE = "system_role"
    EMBEDDINGS = "embeddings"
    DETERMINISTIC = "deterministic"


class Serving(Closed):
    """The contract with callers."""

    served_name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}$")] = Field(
        description="Model name that requests carry."
    )
    features: Annotated[list[Feature], Field(min_length=1)] = Field(description="Declared features, sorted.")
    usage: Literal["all_tokens"] = Field(description="Usage counts every prompt and completion token.")
    cancellation: Literal["on_disconnect", "none"] = Field(description="What ends a generation early.")

    @model_validator(mode="after")
    def _sets(self) -> Self:
        sorted_unique(self.features, "features")
        return self


class Licence(Closed):
    """Terms of the weights."""

    identifier: ShortText = Field(description="SPDX identifier or LicenseRef-….")
    file: RelativePath | None = Field(None, description="Its text, when it is among the files.")


COMPONENTS: dict[str, tuple[frozenset[Role], tuple[str, ...]]] = {
    "weights": (frozenset({Role.WEIGHTS, Role.WEIGHTS_INDEX, Role.CONFIG}), ("model",)),
    "tokenizer": (frozenset({Role.TOKENIZER, Role.PROCESSOR}), ("tokenizer",)),
    "template": (frozenset({Role.TEMPLATE}), ("template",)),
    "quantization": (frozenset({Role.QUANTIZATION}), ("quantization",)),
    "adapters": (frozenset({Role.ADAPTER}), ("adapters",)),
    "draft": (frozenset({Role.DRAFT}), ("draft",)),
    "engine": (frozenset({Role.CODE}), ("engine",)),
    "topology": (frozenset(), ("topology",)),
    "hardware": (frozenset(), ("hardware",)),
    "runtime": (frozenset({Role.GENERATION_CONFIG}), ("runtime",)),
    "serving": (frozenset(), ("serving",)),
}
"""Component name → roles of its files, and sections of the document. Together they cover all that is served."""


class Bundle(Document):
    """Everything that decides what is served. Named by `digest`."""

    SCHEMA_ID: ClassVar[str] = "sluicegate.dev/bundle/v1"

    schema_id: Literal["sluicegate.dev/bundle/v1"] = Field(alias="schema", description="Schema of this document.")
    name: Name = Field(description="Family that the bundle belongs to.")
    description: Text | None = Field(None, description="For people.")
    labels: Annotated[dict[Name, LabelValue], Field(min_length=1, max_length=MAX_LABELS)] | None = Field(
        None, description="What it is found by, such as team: search. Nothing that is served depends on them."
    )
    sources: Annotated[list[Source], Field(min_length=1, max_length=64)] = Field(description="Where files came from.")
    files: Annotated[list[File], Field(min_length=1, max_length=MAX_FILES)] = Field(description="Sorted by path.")
    model: Model = Field(description="The weights as a whole.")
    tokenizer: Tokenizer = Field(description="Tokenizer and processor.")
    template: Template = Field(description="Chat template and parsers.")
    quantization: Quantization = Field(description="Storage of weights and cache.")
    adapters: Annotated[list[Adapter], Field(max_length=256)] | None = Field(None, description="Sorted by name.")
    draft: Draft | None = Field(None, description="Speculative decoding.")
    engine: Engine = Field(description="The program that serves.")
    topology: Topology = Field(description="Layout of one replica.")
    hardware: Hardware = Field(description="What a runner must have.")
    runtime: Runtime = Field(description="Limits and sampling defaults.")
    serving: Serving = Field(description="Contract with callers.")
    licence: Licence = Field(description="Terms of the weights.")

    @model_validator(mode="after")
    def _whole(self) -> Self:
        paths = [file.path for file in self.files]
        sorted_unique(paths, "files")
        folded_paths = {folded(path) for path in paths}
        if len(folded_paths) != len(paths):
            raise ValueError("files: two paths differ only in case or Unicode form")
        for path in paths:
            parents = path.split("/")[:-1]
            if any(folded("/".join(parents[: depth + 1])) in folded_paths for depth in range(len(parents))):
                raise ValueError(f"files: a parent folder of {path} is also a file")
        self._check_references()
        return self

    def _check_references(self) -> None:
        roles = {file.path: file.role for file in self.files}
        # Whoever runs an external engine may not give its weights away.
        if Role.WEIGHTS not in roles.values() and self.engine.name != "external":
            raise ValueError("files: none has the role weights")
        sorted_unique((adapter.name for adapter in self.adapters or []), "adapters")
        named = [
            ("template.file", self.template.file, Role.TEMPLATE),
            ("licence.file", self.licence.file, Role.LICENCE),
        ]
        named += [("adapters.files", path, Role.ADAPTER) for a in self.adapters or [] for path in a.files]
        named += [("draft.files", path, Role.DRAFT) for path in (self.draft.files if self.draft else None) or []]
        accepted = self.engine.remote_code.files if self.engine.remote_code else []
        named += [("engine.remote_code.files", path, Role.CODE) for path in accepted]
        for field, path, role in named:
            if path is not None and roles.get(path) != role:
                raise ValueError(f"{field}: {path} is not among the files with role {role}")
        for path, role in roles.items():
            if role is Role.CODE and path not in accepted:
                raise ValueError(f"files: {path} is code that engine.remote_code does not name")

    def weights(self) -> list[File]:
        """Return the weight files, by path."""
        return [file for file in self.files if file.role is Role.WEIGHTS]

    def components(self) -> dict[str, str]:
        """Return the digest of each component: its sections and the path, size and hash of its files."""
        body = self.model_dump(mode="json", by_alias=True, exclude_none=True)
        digests = {}
        for component, (roles, sections) in COMPONENTS.items():
            part = {section: body.get(section) for section in sections}
            files = [entry for file, entry in zip(self.files, body["files"], strict=True) if file.role in roles]
            digests[component] = sha256_digest(canonical_json({"files": files, **part}))
        return digests

    @property
    def serving_digest(self) -> str:
        """Digest over what the engine reads and how it is run, whatever its sources, name or documentation."""
        return sha256_digest(canonical_json(self.components()))
