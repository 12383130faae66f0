"""How to launch SGLang.

Source: the source of `data/sglang.toml`; sgl-project/sglang#11304 for --sampling-defaults. Not run here: golden command
lines only.
"""

from gates.environment import engine_environment, engine_prefix
from gates.static.rules import is_within
from schemas.bundle import Bundle
from workers.engines import folder
from workers.engines.arguments import Table, Told
from workers.engines.base import Command, Driver, Launch, guard
from workers.engines.nodes import nodes_problems

NAME = "sglang"
_NAMES_DEFAULTS = ">=0.5.4"
"""Versions that have --sampling-defaults. Older ones take 0.7 as a chat's temperature when a request names none."""
_ALGORITHMS = {"eagle": "EAGLE", "eagle3": "EAGLE3", "nextn": "NEXTN", "draft_model": "STANDALONE", "ngram": "NGRAM"}
_FAILURES = (
    (r"[Aa]ddress already in use|Errno 98", "port_in_use"),
    (r"OutOfMemoryError|CUDA out of memory|Not enough memory\. Please try to increase", "out_of_memory"),
    (r"SafetensorError|Error while deserializing header|Cannot find any model weights", "weights_unreadable"),
    (r"TemplateSyntaxError|TemplateError", "template_unreadable"),
    (r"launch_server\.py: error:|unrecognized arguments|error: argument", "bad_argument"),
)


def _told(bundle: Bundle) -> list[Told]:
    """Return the arguments that the bundle's sections lead to; those of no effect are left out."""
    runtime, topology, quantization, template = bundle.runtime, bundle.topology, bundle.quantization, bundle.template
    told: list[tuple[str, object, str]] = [
        ("--context-length", runtime.context_tokens, "runtime.context_tokens"),
        ("--max-running-requests", runtime.max_sequences, "runtime.max_sequences"),
        ("--chunked-prefill-size", runtime.max_batch_tokens, "runtime.max_batch_tokens"),
        ("--tp-size", topology.tensor_parallel, "topology.tensor_parallel"),
        ("--pp-size", topology.pipeline_parallel, "topology.pipeline_parallel"),
        ("--dp-size", topology.data_parallel, "topology.data_parallel"),
        ("--ep-size", topology.expert_parallel, "topology.expert_parallel"),
        ("--quantization", None if quantization.method == "none" else quantization.method, "quantization.method"),
        ("--kv-cache-dtype", quantization.kv_cache, "quantization.kv_cache"),
        ("--attention-backend", bundle.engine.attention_backend, "engine.attention_backend"),
        ("--tool-call-parser", template.tool_parser, "template.tool_parser"),
        ("--reasoning-parser", template.reasoning_parser, "template.reasoning_parser"),
    ]
    if bundle.adapters:
        told.append(("--max-lora-rank", max(one.rank for one in bundle.adapters), "adapters"))
    if bundle.draft is not None:
        told.append(("--speculative-algorithm", _ALGORITHMS.get(bundle.draft.method), "draft.method"))
        told.append(("--speculative-num-draft-tokens", bundle.draft.tokens, "draft.tokens"))
    if is_within(bundle.engine.version, _NAMES_DEFAULTS):
        # Said either way: by itself the engine takes whatever generation_config.json holds, in silence.
        has_file = folder.has_generation_config(bundle)
        told.append(("--sampling-defaults", "model" if has_file else "openai", "the role generation_config of files"))
    found = [Told(name, str(value), section) for name, value, section in told if value is not None]
    if runtime.prefix_caching is False:
        found.append(Told("--disable-radix-cache", None, "runtime.prefix_caching"))
    if bundle.engine.remote_code is not None:
        found.append(Told("--trust-remote-code", None, "engine.remote_code"))
    return found


def _check_bundle(bundle: Bundle) -> list[str]:
    found = folder.problems(bundle, _told(bundle))
    found += folder.adapter_problems(bundle) + folder.sampling_problems(bundle)
    layout = ("tensor_parallel", "pipeline_parallel", "data_parallel", "expert_parallel", "nodes")
    found += [*folder.layout_problems(bundle, *layout), *nodes_problems(bundle)]
    if bundle.template.arguments:
        found.append("sglang takes template arguments from requests only; leave template.arguments out")
    if bundle.runtime.sampling is not None and not is_within(bundle.engine.version, _NAMES_DEFAULTS):
        found.append(f"sglang takes sampling defaults from a file in versions {_NAMES_DEFAULTS}")
    if bundle.draft is not None:
        if bundle.draft.method not in _ALGORITHMS:
            found.append(f"sglang knows no draft method {bundle.draft.method}")
        elif (bundle.draft.method == "ngram") == (folder.draft_folder(bundle) is not None):
            found.append(f"a draft by {bundle.draft.method} and the draft's files do not go together")
    return found


def _command(bundle: Bundle, launch: Launch) -> Command:
    words = ["--model-path", str(launch.root), "--served-model-name", bundle.serving.served_name]
    words += ["--host", launch.host, "--port", str(launch.port), "--enable-metrics", "--enable-cache-report"]
    if bundle.template.file is not None:
        words += ["--chat-template", str(launch.root / bundle.template.file)]
    if bundle.adapters:
        folders = {one.name: folder.adapter_folder(one) for one in bundle.adapters}
        words += ["--enable-lora", "--lora-paths", *(f"{name}={launch.root}/{at}" for name, at in folders.items())]
    draft = folder.draft_folder(bundle)
    if draft is not None:
        words += ["--speculative-draft-model-path", str(launch.root / draft)]
    words += Table.load(NAME).complete(bundle.engine.arguments, _told(bundle))
    python = ["python3"]  # an image's own, which ends with its container
    if bundle.engine.image is None:
        # -I: neither PYTHON* variables nor the working directory decide what is imported.
        python = [*guard(launch), str(engine_prefix(NAME) / "bin" / "python"), "-I"]
    return Command(
        argv=(*python, "-m", "sglang.launch_server", *words),
        variables={**folder.OFFLINE, **(bundle.engine.variables or {})},
    )


SGLANG = Driver(
    name=NAME,
    command=_command,
    check_arguments=Table.load(NAME).check,
    check_bundle=_check_bundle,
    identity=lambda: engine_environment(NAME),
    failure_patterns=_FAILURES,
    progress_patterns=(r"Loading safetensors checkpoint shards: +(?P<percent>\d+)%",),
    rank_pattern=r"^sglang::",
    takes_port=True,
)
