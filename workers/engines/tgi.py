"""How to launch Hugging Face's text-generation-inference, from images.

Archived upstream in March 2026: for estates that keep it running, not for anything new.

Source: the source of `data/tgi.toml`. Not run here: golden command lines only.
"""

from schemas.bundle import Bundle
from workers.engines import folder, named
from workers.engines.arguments import Table, Told
from workers.engines.base import Command, Driver, Launch, from_images_alone

NAME = "tgi"
_METHODS = frozenset(
    {"none", "awq", "compressed-tensors", "eetq", "exl2", "gptq", "marlin", "bitsandbytes", "fp8"}
    | {"bitsandbytes-nf4", "bitsandbytes-fp4"}
)
_FAILURES = (
    (r"[Aa]ddress already in use", "port_in_use"),
    (r"OutOfMemoryError|CUDA out of memory|Not enough memory to handle", "out_of_memory"),
    (r"no kernel image is available", "missing_kernel"),
    (r"size mismatch for|shape mismatch", "shape_mismatch"),
    (r"SafetensorError|Error while deserializing header|weight .* does not exist", "weights_unreadable"),
    (r"TemplateSyntaxError|template error", "template_unreadable"),
    (r"error: unexpected argument|error: invalid value|ArgumentValidation", "bad_argument"),
    (r"Shard process was signaled|ShardCannotStart|ShardFailed", "rank_lost"),
)


def _told(bundle: Bundle) -> list[Told]:
    """Return the arguments that the bundle's sections lead to."""
    runtime, quantization = bundle.runtime, bundle.quantization
    told: list[tuple[str, object, str]] = [
        ("--max-total-tokens", runtime.context_tokens, "runtime.context_tokens"),
        # At least one token of an answer has to fit.
        ("--max-input-tokens", max(1, runtime.context_tokens - 1), "runtime.context_tokens"),
        ("--max-concurrent-requests", runtime.max_sequences, "runtime.max_sequences"),
        ("--max-batch-prefill-tokens", runtime.max_batch_tokens, "runtime.max_batch_tokens"),
        ("--num-shard", bundle.topology.tensor_parallel, "topology.tensor_parallel"),
        ("--quantize", None if quantization.method == "none" else quantization.method, "quantization.method"),
        ("--kv-cache-dtype", quantization.kv_cache, "quantization.kv_cache"),
        ("--speculate", None if bundle.draft is None else bundle.draft.tokens, "draft.tokens"),
    ]
    found = [Told(name, str(value), section) for name, value, section in told if value is not None]
    if bundle.engine.remote_code is not None:
        found.append(Told("--trust-remote-code", None, "engine.remote_code"))
    return found


def _check_bundle(bundle: Bundle) -> list[str]:
    found = folder.problems(bundle, _told(bundle)) + folder.adapter_problems(bundle)
    if bundle.engine.image is None:
        found.append("tgi is started from an image here; name one by digest")
    found += folder.layout_problems(bundle, "tensor_parallel")
    if bundle.quantization.method not in _METHODS:
        found.append(f"tgi knows no quantization {bundle.quantization.method}")
    if bundle.template.origin == "file":
        found.append("tgi reads its template from tokenizer_config.json; put it there")
    named_parsers = (bundle.template.tool_parser, bundle.template.reasoning_parser)
    if any(named_parsers):
        found.append("tgi has no parsers that can be named; it makes tool calls by a grammar")
    if bundle.template.arguments:
        found.append("tgi takes no template arguments; leave template.arguments out")
    if bundle.runtime.sampling is not None:
        found.append("tgi has no sampling defaults that could be set: leave runtime.sampling out")
    if bundle.draft is not None and (bundle.draft.method != "ngram" or bundle.draft.files):
        found.append("this driver knows drafts by ngram alone with tgi")
    if bundle.engine.attention_backend is not None:
        found.append("tgi chooses its attention kernels by itself; leave engine.attention_backend out")
    return found


def _command(bundle: Bundle, launch: Launch) -> Command:
    name = bundle.serving.served_name
    words = ["text-generation-launcher", "--model-id", name, "--hostname", launch.host, "--port", str(launch.port)]
    if bundle.adapters:
        folders = {one.name: folder.adapter_folder(one) for one in bundle.adapters}
        words += ["--lora-adapters", ",".join(f"{one}={launch.root}/{at}" for one, at in folders.items())]
    words += ["--json-output", *Table.load(NAME).complete(bundle.engine.arguments, _told(bundle))]
    # By itself it tells its makers of each start.
    variables = {**folder.OFFLINE, "USAGE_STATS": "off", **(bundle.engine.variables or {})}
    if bundle.runtime.prefix_caching is not None:
        # The first name is that of 2.3.
        value = "1" if bundle.runtime.prefix_caching else "0"
        variables |= {"USE_PREFIX_CACHING": value, "PREFIX_CACHING": value}
    return Command(argv=named.in_folder(name, launch.root, words), variables=variables)


TGI = Driver(
    name=NAME,
    command=_command,
    check_arguments=Table.load(NAME).check,
    check_bundle=_check_bundle,
    identity=from_images_alone(NAME),
    failure_patterns=_FAILURES,
    takes_port=True,
)
