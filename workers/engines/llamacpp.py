"""How to launch llama.cpp's server, in a process of our own launcher `llamacpp_server`."""

import json
import re
from pathlib import Path

from gates.environment import environment
from schemas.bundle import Bundle, Role
from workers.engines import llamacpp_server
from workers.engines.base import Command, Driver, Launch, interpreter

_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
# Variables of an engine must not reach its loader or its interpreter: LD_PRELOAD would run the bundle's own code.
_VARIABLE_PREFIXES = ("GGML_", "OMP_", "CUDA_", "HIP_", "KMP_")
_SAMPLING = {
    "temperature": "--temp",
    "top_p": "--top-p",
    "top_k": "--top-k",
    "min_p": "--min-p",
    "repetition_penalty": "--repeat-penalty",
}
_LLAMACPP_FAILURES = (
    (r"couldn't bind HTTP server socket", "port_in_use"),
    (r"std::bad_alloc|failed to allocate|out of memory|unable to allocate", "out_of_memory"),
    (r"not within the file bounds|invalid magic|gguf_init_from|failed to load model", "weights_unreadable"),
    (r"failed to (load|apply) lora adapter", "weights_unreadable"),
    (r"chat template parsing error|cannot read the chat template", "template_unreadable"),
    (r"launcher: error:", "bad_argument"),
)


def _check_llamacpp_arguments(arguments: list[str]) -> list[str]:
    try:
        llamacpp_server.read_arguments(arguments)
    except llamacpp_server.UsageError as error:
        return [str(error)]
    return []


def _given(arguments: list[str], name: str) -> str | None:
    return arguments[arguments.index(name) + 1] if name in arguments else None


def llamacpp_arguments(bundle: Bundle) -> list[str]:
    """Return the bundle's launch arguments, completed by what its runtime and template sections say.

    So what the document declares is what the engine is told: context, slots, sampling defaults, prefix cache,
    batch budget, template arguments and reasoning parser.
    """
    arguments = llamacpp_server.spelled(bundle.engine.arguments)
    runtime, template = bundle.runtime, bundle.template
    unified = "--kv-unified" in arguments
    told: dict[str, str | None] = {
        "--parallel": str(runtime.max_sequences),
        "--ctx-size": str(runtime.context_tokens * (1 if unified else runtime.max_sequences)),
        "--batch-size": None if runtime.max_batch_tokens is None else str(runtime.max_batch_tokens),
        "--chat-template-kwargs": None if template.arguments is None else json.dumps(template.arguments),
        "--reasoning-format": template.reasoning_parser,
    }
    if runtime.sampling is not None:
        for name, value in runtime.sampling.model_dump(mode="json", exclude_none=True).items():
            told[_SAMPLING[name]] = str(value)
    for argument, text in told.items():
        if text is not None and argument not in arguments:
            arguments += [argument, text]
    cache = {"--cache-prompt", "--no-cache-prompt"}
    if runtime.prefix_caching is not None and not cache & set(arguments):
        arguments.append("--cache-prompt" if runtime.prefix_caching else "--no-cache-prompt")
    return arguments


def _llamacpp_weights(bundle: Bundle) -> str | None:
    """Return the path that llama.cpp is given: the one GGUF, or the first of a complete set of shards."""
    paths = sorted(file.path for file in bundle.weights())
    if len(paths) == 1 and paths[0].endswith(".gguf"):
        return paths[0]
    shards = [_SHARD.search(path) for path in paths]
    numbers = [(int(shard[1]), int(shard[2])) for shard in shards if shard]
    if numbers == [(place, len(paths)) for place in range(1, len(paths) + 1)]:
        return paths[0]
    return None


def _check_llamacpp_declared(bundle: Bundle) -> list[str]:
    """Find launch arguments that contradict the runtime section."""
    arguments, runtime = llamacpp_server.spelled(bundle.engine.arguments), bundle.runtime
    problems = []
    slots = int(_given(arguments, "--parallel") or runtime.max_sequences)
    if slots != runtime.max_sequences:
        problems.append(f"--parallel {slots} contradicts runtime.max_sequences {runtime.max_sequences}")
    size = _given(arguments, "--ctx-size")
    unified = "--kv-unified" in arguments
    if size is not None and int(size) // (1 if unified else slots) != runtime.context_tokens:
        problems.append(
            f"--ctx-size {size} with {slots} slots contradicts runtime.context_tokens {runtime.context_tokens}"
        )
    batch = int(_given(arguments, "--batch-size") or runtime.max_batch_tokens or slots)
    if batch < slots:  # a failed assertion while loading
        problems.append(f"a batch of {batch} tokens is smaller than {slots} slots")
    if runtime.prefix_caching is not None:
        opposite = "--no-cache-prompt" if runtime.prefix_caching else "--cache-prompt"
        if opposite in arguments:
            problems.append(f"{opposite} contradicts runtime.prefix_caching")
    sampling = runtime.sampling.model_dump(mode="json", exclude_none=True) if runtime.sampling else {}
    for name, value in sampling.items():
        text = _given(arguments, _SAMPLING[name])
        if text is not None and float(text) != float(value):
            problems.append(f"{_SAMPLING[name]} {text} contradicts runtime.sampling.{name} {value}")
    return problems


def _check_llamacpp_adapters(bundle: Bundle) -> list[str]:
    adapters = bundle.adapters or []
    problems = [
        f"adapter {one.name} is not one .gguf file; convert it with convert_lora_to_gguf.py"
        for one in adapters
        if len(one.files) != 1 or not one.files[0].endswith(".gguf")
    ]
    named = {path for one in adapters for path in one.files}
    unnamed = [file.path for file in bundle.files if file.role is Role.ADAPTER and file.path not in named]
    return problems + [f"{path} has the role adapter, and no adapter names it" for path in unnamed]


def _check_llamacpp_bundle(bundle: Bundle) -> list[str]:
    problems = _check_llamacpp_arguments(bundle.engine.arguments)
    if not problems:
        problems = _check_llamacpp_declared(bundle) or _check_llamacpp_arguments(llamacpp_arguments(bundle))
    if bundle.model.format != "gguf":
        problems.append(f"llama.cpp reads gguf, not {bundle.model.format}")
    elif _llamacpp_weights(bundle) is None:
        problems.append("the weights are neither one .gguf file nor a complete set of -00001-of-0000N.gguf shards")
    problems += _check_llamacpp_adapters(bundle)
    if bundle.draft is not None:
        problems.append("this driver does not load a draft model")
    if bundle.template.tool_parser is not None:
        problems.append("llama.cpp derives its tool parser from the chat template; none can be named")
    topology = bundle.topology.model_dump()
    problems += [f"llama.cpp on one machine has {name} 1, not {n}" for name, n in topology.items() if n != 1]
    problems += [
        f"variable {name} is not one that an engine may be given"
        for name in bundle.engine.variables or {}
        if not name.startswith(_VARIABLE_PREFIXES)
    ]
    return problems


def _llamacpp_command(bundle: Bundle, launch: Launch) -> Command:
    weights = _llamacpp_weights(bundle)
    if weights is None:
        raise ValueError("check_bundle was not asked")
    managed = {
        "--model": str(launch.root / weights),
        "--alias": bundle.serving.served_name,
        "--host": launch.host,
        "--port": str(launch.port),
        "--port-file": str(launch.port_file),
        "--drain-seconds": f"{launch.drain_seconds:g}",
    }
    if bundle.template.file is not None:
        managed["--chat-template-file"] = str(launch.root / bundle.template.file)
    if launch.parent_pid is not None:
        managed["--die-with-parent"] = str(launch.parent_pid)
    # -I: neither the worker's PYTHON* variables nor the working directory decide what is imported. An image has its own
    # Python and in it this distribution, whose launcher is then the one that the image's digest names.
    script = str(Path(llamacpp_server.__file__).resolve())
    server = (script,) if bundle.engine.image is None else ("-m", llamacpp_server.__name__)
    words = [word for pair in managed.items() for word in pair]
    for one in bundle.adapters or []:
        words += ["--adapter", f"{one.name}={launch.root / one.files[0]}"]
    return Command(
        argv=(interpreter(bundle), "-I", *server, *words, *llamacpp_arguments(bundle)),
        port_file=launch.port_file,
        # A failed assertion must end the process at once, not first attach a debugger to it for a back trace.
        variables={"GGML_NO_BACKTRACE": "1", **(bundle.engine.variables or {})},
    )


LLAMACPP = Driver(
    name="llamacpp",
    command=_llamacpp_command,
    check_arguments=_check_llamacpp_arguments,
    check_bundle=_check_llamacpp_bundle,
    identity=lambda: environment("xllamacpp"),
    failure_patterns=_LLAMACPP_FAILURES,
)
