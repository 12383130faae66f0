"""Serves one GGUF file with llama.cpp's own HTTP server, as a process that stops without cutting an answer.

Run as a script by the llama.cpp driver, in any Python environment that has `xllamacpp`; it imports nothing of
ours but, for adapters, what stands beside it and needs as little, so that an engine's environment can be another one
than the worker's. Arguments have llama-server's spellings and meanings; those that this file does not list are
refused, never ignored.

Exit status: 0 drained after SIGTERM, 1 the server did not start, 2 an argument is wrong, 3 stopped before all
requests had ended (deadline passed, or a second SIGTERM).

Verified with xllamacpp 2026.10.11549.
"""

import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from workers.engines.llamacpp_names import Names

EXIT_DRAINED, EXIT_NOT_STARTED, EXIT_USAGE, EXIT_CUT = 0, 1, 2, 3

# A request between its socket and its slot is in no gauge, so one idle reading proves little: ask for three.
IDLE_READINGS = 3
READING_INTERVAL_SECONDS = 0.05
INNER_HOST = "127.0.0.1"


class UsageError(ValueError):
    """An argument is unknown, repeated, lacks its value or has a value out of range."""


class Member(NamedTuple):
    """Name of one member of an enumeration of xllamacpp, resolved when the server starts."""

    enumeration: str
    member: str


class Argument(NamedTuple):
    """Where an argument goes in `CommonParams` and how its text is read; `read` None means a flag."""

    field: str
    read: Callable[[str], object] | None
    constant: object = None
    sampling_bit: str | None = None


def _integer(low: int, high: int) -> Callable[[str], object]:
    def read(text: str) -> object:
        try:
            value = int(text)
        except ValueError:
            raise ValueError("must be a whole number") from None
        if not low <= value <= high:
            raise ValueError(f"must be {low} to {high}")
        return value

    return read


def _number(low: float, high: float) -> Callable[[str], object]:
    def read(text: str) -> object:
        try:
            value = float(text)
        except ValueError:
            raise ValueError("must be a number") from None
        if not low <= value <= high:
            raise ValueError(f"must be {low} to {high}")
        return value

    return read


def _choice(enumeration: str, members: Mapping[str, str]) -> Callable[[str], object]:
    def read(text: str) -> object:
        if text not in members:
            raise ValueError(f"must be one of {', '.join(members)}")
        return Member(enumeration, members[text])

    return read


def _on(field: str) -> Argument:
    return Argument(field, None, constant=True)


def _off(field: str) -> Argument:
    return Argument(field, None, constant=False)


def _template_arguments(text: str) -> object:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("must be a JSON object")  # noqa: TRY004 - read_arguments reports every ValueError
    return {key: json.dumps(item) for key, item in value.items()}


_CACHE_TYPE = _choice(
    "ggml_type",
    {
        "f32": "GGML_TYPE_F32",
        "f16": "GGML_TYPE_F16",
        "bf16": "GGML_TYPE_BF16",
        "q8_0": "GGML_TYPE_Q8_0",
        "q4_0": "GGML_TYPE_Q4_0",
        "q4_1": "GGML_TYPE_Q4_1",
        "iq4_nl": "GGML_TYPE_IQ4_NL",
        "q5_0": "GGML_TYPE_Q5_0",
        "q5_1": "GGML_TYPE_Q5_1",
    },
)
_BIT = "COMMON_PARAMS_SAMPLING_CONFIG_"

# What a bundle may ask for. The sampling bit tells llama.cpp that the value was asked for, so that the
# `general.sampling.*` keys of the GGUF do not override it.
ARGUMENTS: dict[str, Argument] = {
    "--ctx-size": Argument("n_ctx", _integer(0, 2**31 - 1)),
    "--parallel": Argument("n_parallel", _integer(1, 1024)),
    "--threads": Argument("cpuparams.n_threads", _integer(1, 512)),
    "--threads-batch": Argument("cpuparams_batch.n_threads", _integer(1, 512)),
    "--threads-http": Argument("n_threads_http", _integer(1, 4096)),
    "--poll": Argument("cpuparams.poll", _integer(0, 100)),
    "--batch-size": Argument("n_batch", _integer(1, 2**20)),
    "--ubatch-size": Argument("n_ubatch", _integer(1, 2**20)),
    "--n-predict": Argument("n_predict", _integer(-1, 2**31 - 1)),
    "--n-gpu-layers": Argument("n_gpu_layers", _integer(-1, 10_000)),
    "--flash-attn": Argument(
        "flash_attn_type",
        _choice(
            "llama_flash_attn_type",
            {
                "on": "LLAMA_FLASH_ATTN_TYPE_ENABLED",
                "off": "LLAMA_FLASH_ATTN_TYPE_DISABLED",
                "auto": "LLAMA_FLASH_ATTN_TYPE_AUTO",
            },
        ),
    ),
    "--cache-type-k": Argument("cache_type_k", _CACHE_TYPE),
    "--cache-type-v": Argument("cache_type_v", _CACHE_TYPE),
    "--kv-unified": _on("kv_unified"),
    "--no-kv-unified": _off("kv_unified"),
    "--cont-batching": _on("cont_batching"),
    "--no-cont-batching": _off("cont_batching"),
    "--cache-prompt": _on("cache_prompt"),
    "--no-cache-prompt": _off("cache_prompt"),
    "--cache-ram": Argument("cache_ram_mib", _integer(-1, 2**30)),
    "--cache-reuse": Argument("n_cache_reuse", _integer(0, 2**31 - 1)),
    "--ctx-checkpoints": Argument("n_ctx_checkpoints", _integer(0, 10_000)),
    "--context-shift": _on("ctx_shift"),
    "--no-context-shift": _off("ctx_shift"),
    "--swa-full": _on("swa_full"),
    "--slot-prompt-similarity": Argument("slot_prompt_similarity", _number(0.0, 1.0)),
    "--check-tensors": _on("check_tensors"),
    "--warmup": _on("warmup"),
    "--no-warmup": _off("warmup"),
    "--metrics": _on("endpoint_metrics"),
    "--props": _on("endpoint_props"),
    "--slots": _on("endpoint_slots"),
    "--no-slots": _off("endpoint_slots"),
    "--jinja": _on("use_jinja"),
    "--no-jinja": _off("use_jinja"),
    "--chat-template-kwargs": Argument("default_template_kwargs", _template_arguments),
    "--reasoning-format": Argument(
        "reasoning_format",
        _choice(
            "common_reasoning_format",
            {
                "none": "COMMON_REASONING_FORMAT_NONE",
                "auto": "COMMON_REASONING_FORMAT_AUTO",
                "deepseek": "COMMON_REASONING_FORMAT_DEEPSEEK",
                "deepseek-legacy": "COMMON_REASONING_FORMAT_DEEPSEEK_LEGACY",
            },
        ),
    ),
    "--rope-scaling": Argument(
        "rope_scaling_type",
        _choice(
            "llama_rope_scaling_type",
            {
                "none": "LLAMA_ROPE_SCALING_TYPE_NONE",
                "linear": "LLAMA_ROPE_SCALING_TYPE_LINEAR",
                "yarn": "LLAMA_ROPE_SCALING_TYPE_YARN",
            },
        ),
    ),
    "--rope-freq-base": Argument("rope_freq_base", _number(0.0, 1e12)),
    "--rope-freq-scale": Argument("rope_freq_scale", _number(0.0, 1e6)),
    "--yarn-orig-ctx": Argument("yarn_orig_ctx", _integer(0, 2**31 - 1)),
    "--seed": Argument("sampling.seed", _integer(0, 2**32 - 1)),
    "--temp": Argument("sampling.temp", _number(0.0, 100.0), sampling_bit=_BIT + "TEMP"),
    "--top-k": Argument("sampling.top_k", _integer(0, 2**31 - 1), sampling_bit=_BIT + "TOP_K"),
    "--top-p": Argument("sampling.top_p", _number(0.0, 1.0), sampling_bit=_BIT + "TOP_P"),
    "--min-p": Argument("sampling.min_p", _number(0.0, 1.0), sampling_bit=_BIT + "MIN_P"),
    "--repeat-penalty": Argument("sampling.penalty_repeat", _number(0.0, 100.0), sampling_bit=_BIT + "PENALTY_REPEAT"),
    "--repeat-last-n": Argument(
        "sampling.penalty_last_n", _integer(-1, 2**31 - 1), sampling_bit=_BIT + "PENALTY_LAST_N"
    ),
    "--presence-penalty": Argument("sampling.penalty_present", _number(-100.0, 100.0)),
    "--frequency-penalty": Argument("sampling.penalty_freq", _number(-100.0, 100.0)),
    "--timeout": Argument("timeout_read", _integer(1, 86_400)),
    "--log-verbosity": Argument("verbosity", _integer(0, 3)),
}

# What the runner decides, never the bundle.
MANAGED: frozenset[str] = frozenset(
    {
        "--model",
        "--alias",
        "--host",
        "--port",
        "--port-file",
        "--chat-template-file",
        "--drain-seconds",
        "--die-with-parent",
        "--adapter",
    }
)

ALIASES: dict[str, str] = {
    "-c": "--ctx-size",
    "-np": "--parallel",
    "-t": "--threads",
    "-tb": "--threads-batch",
    "-b": "--batch-size",
    "-ub": "--ubatch-size",
    "-n": "--n-predict",
    "--predict": "--n-predict",
    "-ngl": "--n-gpu-layers",
    "--gpu-layers": "--n-gpu-layers",
    "-fa": "--flash-attn",
    "-ctk": "--cache-type-k",
    "-ctv": "--cache-type-v",
    "-kvu": "--kv-unified",
    "-no-kvu": "--no-kv-unified",
    "-cb": "--cont-batching",
    "-nocb": "--no-cont-batching",
    "-cram": "--cache-ram",
    "-ctxcp": "--ctx-checkpoints",
    "--swa-checkpoints": "--ctx-checkpoints",
    "-sps": "--slot-prompt-similarity",
    "-s": "--seed",
    "--temperature": "--temp",
    "-to": "--timeout",
    "-lv": "--log-verbosity",
    "--verbosity": "--log-verbosity",
}
"""llama.cpp's own shorter and older names of these arguments."""

# Pinned before the arguments are applied: nothing is fetched, nothing is fitted to the machine in silence, no
# prompt is kept in memory after its request unless the bundle asks for it, and there are threads enough (each
# open request holds one) that `/health` and `/metrics` still answer when many requests wait for a slot.
PINNED: dict[str, object] = {
    "offline": True,
    "fit_params": False,
    "ui": False,
    "endpoint_metrics": True,
    "endpoint_props": False,
    "cache_ram_mib": 0,
    "cache_idle_slots": False,
    "n_threads_http": 256,
    "use_jinja": True,
    "reuse_port": False,
}


@dataclass(frozen=True)
class Settings:
    """What one server process was told, read and checked.

    `fields` maps dotted paths of `CommonParams` to values, or to a `Member`. `drain_seconds` is the longest
    time that running requests get after SIGTERM. `parent_pid` is the process that this one must not outlive.
    `adapters` maps names to files, which are in no answer but of requests for that name.
    """

    model: Path
    alias: str
    host: str
    port: int
    port_file: Path | None
    template_file: Path | None
    drain_seconds: float
    parent_pid: int | None
    fields: Mapping[str, object]
    sampling_bits: tuple[str, ...]
    adapters: Mapping[str, Path]


def read_arguments(argv: Sequence[str]) -> tuple[dict[str, object], tuple[str, ...]]:
    """Read the arguments that a bundle may ask for into fields of `CommonParams` and sampling bits.

    Raises:
        UsageError: on the first argument that is unknown, managed, repeated, valueless or out of range.
    """
    fields: dict[str, object] = {}
    bits: list[str] = []
    rest = iter(argv)
    for word in rest:
        name = ALIASES.get(word, word)
        argument = ARGUMENTS.get(name)
        if name in MANAGED:
            raise UsageError(f"{name} is set by the runner")
        if argument is None:
            raise UsageError(f"unknown argument {name}")
        if argument.field in fields:
            raise UsageError(f"{name} repeats or contradicts an earlier argument")
        if argument.read is None:
            fields[argument.field] = argument.constant
            continue
        text = next(rest, None)
        if text is None:
            raise UsageError(f"{name} needs a value")
        try:
            fields[argument.field] = argument.read(text)
        except ValueError as error:
            raise UsageError(f"{name} {text}: {error}") from None
        if argument.sampling_bit is not None:
            bits.append(argument.sampling_bit)
    return fields, tuple(bits)


def spelled(argv: Sequence[str]) -> list[str]:
    """Return a command line with every argument under its whole name; values stay as they are."""
    found: list[str] = []
    rest = iter(argv)
    for word in rest:
        found.append(ALIASES.get(word, word))
        argument = ARGUMENTS.get(found[-1])
        if argument is not None and argument.read is not None:
            found += islice(rest, 1)
    return found


def read_settings(argv: Sequence[str]) -> Settings:
    """Read a whole command line, managed arguments and those of the bundle, in any order.

    Raises:
        UsageError: as `read_arguments`, or when --model or --alias is missing.
    """
    managed: dict[str, str] = {}
    adapters: dict[str, Path] = {}
    others: list[str] = []
    rest = iter(argv)
    for name in rest:
        if name not in MANAGED:
            others.append(name)
            continue
        value = next(rest, None)
        if value is None:
            raise UsageError(f"{name} needs a value")
        if name == "--adapter":
            adapter, named, path = value.partition("=")
            if not adapter or not named or not path or adapter in adapters:
                raise UsageError(f"--adapter {value}: must be NAME=PATH, each name once")
            adapters[adapter] = Path(path)
            continue
        if name in managed:
            raise UsageError(f"{name} is given twice")
        managed[name] = value
    for name in ("--model", "--alias"):
        if not managed.get(name):
            raise UsageError(f"{name} is required")
    fields, bits = read_arguments(others)
    try:
        port = int(managed.get("--port", "0"))
        drain_seconds = float(managed.get("--drain-seconds", "30"))
        parent = managed.get("--die-with-parent")
        parent_pid = None if parent is None else int(parent)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if not 0 <= port <= 65535 or not 0 <= drain_seconds <= 86_400:
        raise UsageError("--port is 0 to 65535 and --drain-seconds 0 to 86400")
    port_file, template_file = managed.get("--port-file"), managed.get("--chat-template-file")
    return Settings(
        model=Path(managed["--model"]),
        alias=managed["--alias"],
        host=managed.get("--host", "127.0.0.1"),
        port=port,
        port_file=None if port_file is None else Path(port_file),
        template_file=None if template_file is None else Path(template_file),
        drain_seconds=drain_seconds,
        parent_pid=parent_pid,
        fields=fields,
        sampling_bits=bits,
        adapters=adapters,
    )


def common_params(settings: Settings) -> Any:  # xllamacpp ships no types
    """Build the engine's parameter object from the settings."""
    import xllamacpp  # here, so that the driver can read ARGUMENTS without loading 100 MB

    params = xllamacpp.CommonParams()
    for field, value in (PINNED | dict(settings.fields)).items():
        *path, name = field.split(".")
        owner = params
        for step in path:
            owner = getattr(owner, step)
        if isinstance(value, Member):
            setattr(owner, name, getattr(getattr(xllamacpp, value.enumeration), value.member))
        else:
            setattr(owner, name, value)
    if "timeout_read" in settings.fields:
        params.timeout_write = params.timeout_read
    for bit in settings.sampling_bits:
        params.sampling.user_sampling_config |= int(getattr(xllamacpp.common_params_sampling_config, bit))
    params.model.path = str(settings.model)
    params.model_alias = {settings.alias}
    # With adapters, who knows their names listens at the port that is told.
    params.hostnames = [settings.host if not settings.adapters else INNER_HOST]
    params.port = settings.port if not settings.adapters else 0
    if settings.adapters:
        # Else every answer would have all of them in it, one over the other.
        params.lora_init_without_apply = True
        params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(str(one), 0.0) for one in settings.adapters.values()]
    if settings.template_file is not None:
        params.chat_template = settings.template_file.read_text(encoding="utf-8")
    return params


def write_port_file(path: Path, port: int) -> None:
    """Tell the port by renaming a complete file into place; the process id tells a stale file apart."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps({"pid": os.getpid(), "port": port}), encoding="utf-8")
    partial.replace(path)


def gauge(metrics: str, name: str) -> float:
    """Read one value out of a Prometheus text page. Raises ValueError when it is not there."""
    for line in metrics.splitlines():
        if line.startswith(name + " "):
            return float(line.rsplit(" ", 1)[1])
    raise ValueError(f"no metric {name}")


def busy_requests(server: Any, names: "Names | None") -> int:  # xllamacpp ships no types
    """Count the requests that are being answered or wait for a slot, and answers that are not passed on whole yet."""
    page = server.handle_metrics()
    text = page if isinstance(page, str) else page.decode()
    there = int(gauge(text, "llamacpp:requests_processing") + gauge(text, "llamacpp:requests_deferred"))
    return there + (0 if names is None else names.active)


def die_with(pid: int) -> None:
    """End this process as soon as `pid` ends.

    A pidfd rather than PR_SET_PDEATHSIG: that one fires when the *thread* that started us ends, and workers
    start engines from pool threads.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
        return
    if os.getppid() != pid:  # it ended, and its number was given away, before we looked
        os.kill(os.getpid(), signal.SIGKILL)

    def watch() -> None:
        select.select([descriptor], [], [])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="die-with-parent", daemon=True).start()


def wait_for_stop(
    server: Any,  # xllamacpp ships no types
    names: "Names | None",
    wake: int,
    drain_seconds: float,
) -> int:
    """Wait for SIGTERM or SIGINT, then until no request runs. Returns the exit status."""
    select.select([wake], [], [])
    os.read(wake, 64)
    deadline = time.monotonic() + drain_seconds
    idle = 0
    say(f"draining {busy_requests(server, names)} requests, at most {drain_seconds:g} s")
    while idle < IDLE_READINGS:
        idle = idle + 1 if busy_requests(server, names) == 0 else 0
        if time.monotonic() >= deadline and idle == 0:
            say(f"drain deadline passed with {busy_requests(server, names)} requests running")
            return EXIT_CUT
        if select.select([wake], [], [], READING_INTERVAL_SECONDS)[0]:
            say("second stop signal")
            return EXIT_CUT
    return EXIT_DRAINED


def say(text: str) -> None:
    """Write one line to the log of this process."""
    sys.stderr.write(f"launcher: {text}\n")
    sys.stderr.flush()


def front(settings: Settings) -> "Names | None":
    """Take the port for who knows adapters by name; None without adapters. Raises OSError when it is taken."""
    if not settings.adapters:
        return None
    if not __package__:  # a script: -I leaves out where this file's own packages are
        sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from workers.engines.llamacpp_names import Names  # here, since most bundles need nothing of ours

    return Names(settings.alias, tuple(settings.adapters), settings.host, settings.port)


def serve(settings: Settings) -> int:
    """Run the server until it is told to stop. Returns the exit status."""
    import xllamacpp  # see common_params

    if settings.parent_pid is not None:
        die_with(settings.parent_pid)
    try:
        params = common_params(settings)
    except (OSError, UnicodeDecodeError) as error:
        say(f"cannot read the chat template: {error}")
        return EXIT_NOT_STARTED
    started = time.monotonic()
    try:
        names = front(settings)  # the port first: a long load that nobody could reach would be for nothing
        server = xllamacpp.Server(params)
        port = int(server.listening_address.rsplit(":", 1)[1])
        if names is not None:
            names.serve(INNER_HOST, port)
            port = names.port
    except (OSError, RuntimeError) as error:
        why = "couldn't bind HTTP server socket" if isinstance(error, OSError) else "the server did not start"
        say(f"{why}: {error}")
        return EXIT_NOT_STARTED
    # Until here SIGTERM has its default action and ends a long load at once.
    wake, wake_up = os.pipe()
    os.set_blocking(wake_up, False)
    signal.set_wakeup_fd(wake_up)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    if settings.port_file is not None:
        write_port_file(settings.port_file, port)
    say(f"listening on {settings.host}:{port} after {time.monotonic() - started:.3f} s")
    status = wait_for_stop(server, names, wake, settings.drain_seconds)
    if status == EXIT_CUT:
        # Dropping the server would freeze the running streams for 30 s before cutting them.
        os._exit(status)
    if names is not None:
        names.stop()
    del server
    say("drained")
    return status


def main(argv: Sequence[str]) -> int:
    """Read the command line and serve."""
    try:
        settings = read_settings(argv)
    except UsageError as error:
        say(f"error: {error}")
        return EXIT_USAGE
    return serve(settings)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
