"""How to launch `transformers serve`.

It serves a repository of the hub under its name, so that it is given a hub cache that holds the bundle alone.

Source: the source of `data/transformers.toml`; run with transformers 5.19.0 on a CPU.
"""

import json

from gates.environment import engine_environment, engine_prefix
from schemas.bundle import Bundle
from workers.engines import folder, named
from workers.engines.arguments import Table, Told
from workers.engines.base import Command, Driver, Launch, guard

NAME = "transformers"
_ON_LOAD = frozenset({"bnb-4bit", "bnb-8bit"})
_TEMPLATE = "chat_template.jinja"
_FAILURES = (
    (r"[Aa]ddress already in use", "port_in_use"),
    (r"OutOfMemoryError|CUDA out of memory|DefaultCPUAllocator: can't allocate memory", "out_of_memory"),
    (r"no kernel image is available", "missing_kernel"),
    (r"size mismatch for|shapes? mismatch", "shape_mismatch"),
    (r"SafetensorError|Error while deserializing header|[Ii]ncomplete metadata", "weights_unreadable"),
    (r"TemplateSyntaxError|TemplateError", "template_unreadable"),
    (r"No such option|Invalid value for|Got unexpected extra argument", "bad_argument"),
)


def _told(bundle: Bundle) -> list[Told]:
    """Return the arguments that the bundle's sections lead to."""
    told: list[Told] = []
    if bundle.quantization.method in _ON_LOAD:
        told.append(Told("--quantization", bundle.quantization.method, "quantization.method"))
    if bundle.engine.attention_backend is not None:
        told.append(Told("--attn-implementation", bundle.engine.attention_backend, "engine.attention_backend"))
    if bundle.runtime.max_batch_tokens is not None:
        told.append(Told("--cb-max-batch-tokens", str(bundle.runtime.max_batch_tokens), "runtime.max_batch_tokens"))
    if bundle.runtime.max_sequences > 1:
        # Otherwise requests are answered one after the other.
        told.append(Told("--continuous-batching", None, "runtime.max_sequences"))
    if bundle.engine.remote_code is not None:
        told.append(Told("--trust-remote-code", None, "engine.remote_code"))
    return told


def _check_bundle(bundle: Bundle) -> list[str]:
    found = folder.problems(bundle, _told(bundle)) + folder.sampling_problems(bundle)
    found += folder.layout_problems(bundle)
    template = bundle.template
    if template.file not in {None, _TEMPLATE}:
        found.append(f"transformers reads {_TEMPLATE} beside the weights, not {template.file}")
    if template.tool_parser is not None or template.reasoning_parser is not None:
        found.append("transformers serve has no parsers that can be named")
    if bundle.quantization.kv_cache is not None:
        found.append("transformers serve has no data type of the cache that could be set")
    if bundle.runtime.prefix_caching:
        found.append("transformers serve caches no prefixes")
    if bundle.adapters:
        found.append("transformers serve loads no adapters")
    if bundle.draft is not None:
        found.append("transformers serve loads no draft model")
    return found


def _command(bundle: Bundle, launch: Launch) -> Command:
    name = bundle.serving.served_name
    words = ["serve", name, "--host", launch.host, "--port", str(launch.port)]
    if bundle.template.arguments:
        words += ["--chat-template-kwargs", json.dumps(bundle.template.arguments)]
    words += Table.load(NAME).complete(bundle.engine.arguments, _told(bundle))
    variables = {**folder.OFFLINE, **(bundle.engine.variables or {})}
    if bundle.engine.image is not None:
        return Command(argv=named.in_cache(name, launch.root, ["transformers", *words]), variables=variables)
    python = str(engine_prefix(NAME) / "bin" / "python")
    run = [*guard(launch), python, "-I", "-m", "transformers.cli.transformers", *words]
    return Command(argv=named.in_cache(name, launch.root, run), variables=variables)


TRANSFORMERS = Driver(
    name=NAME,
    command=_command,
    check_arguments=Table.load(NAME).check,
    check_bundle=_check_bundle,
    identity=lambda: engine_environment(NAME),
    failure_patterns=_FAILURES,
    takes_port=True,
)
