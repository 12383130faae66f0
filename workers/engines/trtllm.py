"""How to launch `trtllm-serve`, from images.

Source: the source of `data/trtllm.toml`; NVIDIA/TensorRT-LLM#11711 for --served_model_name, which the notes of 1.3.0rc7
name first; #5785 for return_perf_metrics; docs/source/features/sampling.md @05ce57b, by which generation_config.json
says nothing of sampling unless --generation-config is auto. Not run here: golden command lines only.
"""

import json

from gates.static.rules import is_within
from schemas.bundle import Bundle, Feature
from workers.engines import folder, named
from workers.engines.arguments import Table, Told
from workers.engines.base import Command, Driver, Launch, from_images_alone

NAME = "trtllm"
_NAMES_MODEL = ">=1.3.0rc7"
_PARSES_TOOLS = ">=1.2"
_MEMORY = "--kv_cache_free_gpu_memory_fraction"
_FAILURES = (
    (r"[Aa]ddress already in use|Failed to bind socket", "port_in_use"),
    (r"OutOfMemoryError|CUDA out of memory|[Oo]ut of memory|No available memory", "out_of_memory"),
    (r"no kernel image is available|is not supported on this architecture", "missing_kernel"),
    (r"size mismatch for|shape mismatch", "shape_mismatch"),
    (r"SafetensorError|Error while deserializing header", "weights_unreadable"),
    (r"TemplateSyntaxError|TemplateError", "template_unreadable"),
    (r"Error: No such option|Error: Invalid value for|Error: Got unexpected extra argument", "bad_argument"),
)


def _told(bundle: Bundle) -> list[Told]:
    """Return the arguments that the bundle's sections lead to."""
    runtime, topology, template = bundle.runtime, bundle.topology, bundle.template
    told: list[tuple[str, object, str]] = [
        ("--max_seq_len", runtime.context_tokens, "runtime.context_tokens"),
        ("--max_batch_size", runtime.max_sequences, "runtime.max_sequences"),
        ("--max_num_tokens", runtime.max_batch_tokens, "runtime.max_batch_tokens"),
        ("--tp_size", topology.tensor_parallel, "topology.tensor_parallel"),
        ("--pp_size", topology.pipeline_parallel, "topology.pipeline_parallel"),
        ("--ep_size", topology.expert_parallel if topology.expert_parallel > 1 else None, "topology.expert_parallel"),
        ("--tool_parser", template.tool_parser, "template.tool_parser"),
        ("--reasoning_parser", template.reasoning_parser, "template.reasoning_parser"),
    ]
    found = [Told(name, str(value), section) for name, value, section in told if value is not None]
    if bundle.engine.remote_code is not None:
        found.append(Told("--trust_remote_code", None, "engine.remote_code"))
    return found


def _check_bundle(bundle: Bundle) -> list[str]:
    found = folder.problems(bundle, _told(bundle))
    if bundle.engine.image is None:
        found.append("trtllm is started from an image here; name one by digest")
    found += folder.layout_problems(bundle, "tensor_parallel", "pipeline_parallel", "expert_parallel")
    if "/" in bundle.serving.served_name and not is_within(bundle.engine.version, _NAMES_MODEL):
        found.append(f"trtllm serves a name with a slash in versions {_NAMES_MODEL}")
    if bundle.template.tool_parser is not None and not is_within(bundle.engine.version, _PARSES_TOOLS):
        found.append(f"trtllm parses tool calls in versions {_PARSES_TOOLS}")
    if bundle.template.arguments:
        found.append("trtllm takes template arguments from requests only; leave template.arguments out")
    if bundle.runtime.sampling is not None:
        found.append("trtllm-serve has sampling defaults of its own that nothing sets; leave runtime.sampling out")
    if bundle.adapters:
        found.append("trtllm takes an adapter's path from each request, so that none can be served under a name")
    if bundle.draft is not None:
        found.append("this driver does not load a draft model with trtllm")
    return found


def _options(bundle: Bundle, backend: str) -> str:
    """Return what there is no argument for, as JSON, which is YAML too."""
    options: dict[str, object] = {"return_perf_metrics": True}
    if backend == "pytorch":
        options["enable_iter_perf_stats"] = True
    cache: dict[str, object] = {}
    if bundle.runtime.prefix_caching is not None:
        cache["enable_block_reuse"] = bundle.runtime.prefix_caching
    if bundle.quantization.kv_cache is not None:
        cache["dtype"] = bundle.quantization.kv_cache
    if cache:
        # This section replaces what an argument says of the cache, so that it has to say that again.
        share = Table.load(NAME).given(bundle.engine.arguments).get(_MEMORY)
        options["kv_cache_config"] = cache | (
            {"free_gpu_memory_fraction": float(share.value)} if share is not None and share.value else {}
        )
    if bundle.engine.attention_backend is not None:
        options["attn_backend"] = bundle.engine.attention_backend
    if {Feature.JSON_SCHEMA, Feature.TOOLS} & set(bundle.serving.features):
        options["guided_decoding_backend"] = "xgrammar"
    return json.dumps(options, sort_keys=True)


def _command(bundle: Bundle, launch: Launch) -> Command:
    name, arguments = bundle.serving.served_name, bundle.engine.arguments
    given = Table.load(NAME).given(arguments).get("--backend")
    words = ["trtllm-serve", "serve", name, "--host", launch.host, "--port", str(launch.port)]
    if is_within(bundle.engine.version, _NAMES_MODEL):
        words += ["--served_model_name", name]
    if bundle.template.file is not None:
        words += ["--chat_template", str(launch.root / bundle.template.file)]
    words += ["--extra_llm_api_options", named.OPTIONS]
    # Said either way: which of them is the default has changed.
    words += [] if given is not None else ["--backend", "pytorch"]
    words += Table.load(NAME).complete(arguments, _told(bundle))
    backend = given.value if given is not None and given.value else "pytorch"
    return Command(
        argv=named.in_folder(name, launch.root, words, options=_options(bundle, backend)),
        variables={**folder.OFFLINE, **(bundle.engine.variables or {})},
    )


TRTLLM = Driver(
    name=NAME,
    command=_command,
    check_arguments=Table.load(NAME).check,
    check_bundle=_check_bundle,
    identity=from_images_alone(NAME),
    failure_patterns=_FAILURES,
    takes_port=True,
)
