"""Features that pass alone and can fail together, and what has to be checked when they are in use together.

Whether a feature is in use is read from the bundle. What a bundle does not tell counts as in use: a check too many
costs time, and one too few costs an incident.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from gates.static.declared import Arguments
from schemas.bundle import Bundle, Feature, Role

State = bool | None
"""In use, not in use, or None: the bundle does not tell."""

_UNQUANTIZED: Final = frozenset({"none", "f32", "fp32", "float32", "f16", "fp16", "float16", "bf16", "bfloat16"})
_PLAIN_CACHE: Final = _UNQUANTIZED | {"auto"}
_COMMAND_LINES: Final = frozenset({"llamacpp", "vllm", "sglang", "transformers", "tgi"})
"""Engines that are told what to do by launch arguments."""
_SETTINGS_FILES: Final = ("--config", "--config-file", "--extra-llm-api-options", "--models-preset")
_PARALLEL_FLAGS: Final = (
    *(
        "--tensor-parallel-size",
        "-tp",
        "--tp",
        "--tp-size",
        "--tp_size",
        "--pipeline-parallel-size",
        "-pp",
        "--pp-size",
    ),
    *("--enable-expert-parallel", "--ep-size", "--expert-parallel-size", "--split-mode", "-sm", "--num-shard"),
)


_WITHOUT_CACHE = (
    "--no-enable-prefix-caching",
    "--disable-prefix-caching",
    "--disable-radix-cache",
    "--no-cache-prompt",
)
"""Arguments by which engines keep no prefix; of vLLM the second since 0.33."""


@dataclass(frozen=True, slots=True)
class Trait:
    """A feature: the parts of the bundle that decide how it works, and whether a bundle has it in use."""

    name: str
    parts: tuple[str, ...]
    used: Callable[[Bundle], State]


def _arguments(bundle: Bundle) -> Arguments:
    return Arguments(tuple(bundle.engine.arguments))


def _told(bundle: Bundle, is_used: bool | None, *flags: str) -> State:
    """Return whether a feature is in use by the document or by a flag; that it is not is known of whole command lines.

    A file of settings, and variables in place of flags, say what the document does not show.
    """
    given = _arguments(bundle)
    if is_used or given.has(*flags):
        return True
    engine = bundle.engine
    is_whole = engine.name in _COMMAND_LINES and not given.has(*_SETTINGS_FILES)
    return False if is_whole and not any(name.startswith("LLAMA_ARG_") for name in engine.variables or ()) else None


def _always(_: Bundle) -> State:
    return True


def _untold(_: Bundle) -> State:
    return None


def _quantized_weights(bundle: Bundle) -> State:
    return _told(bundle, bundle.quantization.method.lower() not in _UNQUANTIZED, "--quantization", "-q")


def _quantized_cache(bundle: Bundle) -> State:
    given = _arguments(bundle)
    told = [bundle.quantization.kv_cache, given.get("--kv-cache-dtype")]
    told += [given.get("--cache-type-k", "-ctk"), given.get("--cache-type-v", "-ctv")]
    return _told(bundle, any(one is not None and one.lower() not in _PLAIN_CACHE for one in told))


def _speculates(bundle: Bundle) -> State:
    flags = (
        *("--speculative-config", "--speculative-model", "--speculative-algorithm", "--speculative-draft-model-path"),
        *("--model-draft", "-md", "--speculate", "--spec-type"),
    )
    return _told(bundle, bundle.draft is not None, *flags)


def _structured(bundle: Bundle) -> State:
    return bool({Feature.JSON_SCHEMA, Feature.TOOLS} & {*bundle.serving.features})


def _adapts(bundle: Bundle) -> State:
    flags = ("--enable-lora", "--lora-modules", "--lora-paths", "--lora", "--lora-scaled", "--lora-adapters")
    return _told(bundle, bool(bundle.adapters), *flags)


def _prefix_cache(bundle: Bundle) -> State:
    """Engines cache prefixes unless they are told not to."""
    if bundle.runtime.prefix_caching is not None:
        return bundle.runtime.prefix_caching
    if _arguments(bundle).has(*_WITHOUT_CACHE):
        return False
    return True if _arguments(bundle).has("--enable-prefix-caching", "--cache-reuse") else None


def _graphs(bundle: Bundle) -> State:
    """Engines capture graphs on accelerators unless they are told not to."""
    if bundle.hardware.accelerator == "cpu" or _arguments(bundle).has("--enforce-eager", "--disable-cuda-graph"):
        return False
    return None


def _media(bundle: Bundle) -> State:
    has_processor = any(file.role is Role.PROCESSOR for file in bundle.files)
    # Batches and lengths vary with every request, so shapes are dynamic without any media too.
    return True if has_processor or bundle.tokenizer.media_limits else None


def _replicated(bundle: Bundle) -> State:
    flags = ("--data-parallel-size", "-dp", "--dp", "--dp-size")
    return _told(bundle, bundle.topology.data_parallel > 1, *flags)


def _sharded(bundle: Bundle) -> State:
    layout = bundle.topology
    degrees = (layout.tensor_parallel, layout.pipeline_parallel, layout.expert_parallel, layout.context_parallel)
    return _told(bundle, max(degrees) > 1, *_PARALLEL_FLAGS)


def _disaggregated(bundle: Bundle) -> State:
    flags = ("--kv-transfer-config", "--disaggregation-mode", "--disaggregation-transfer-backend")
    return _told(bundle, None, *flags)


def _chunked(bundle: Bundle) -> State:
    """Engines cut long prompts unless they are told not to."""
    return False if _arguments(bundle).has("--no-enable-chunked-prefill", "--disable-chunked-prefill") else None


def _prioritized(bundle: Bundle) -> State:
    given = _arguments(bundle)
    named = given.get("--scheduling-policy") or (bundle.runtime.flags or {}).get("scheduling_policy")
    return _told(bundle, named not in (None, "fcfs"), "--enable-priority-scheduling")


def _streams(bundle: Bundle) -> State:
    return Feature.STREAMING in bundle.serving.features


TRAITS: Final = {
    trait.name: trait
    for trait in (
        Trait("quantized weights", ("quantization", "weights"), _quantized_weights),
        Trait("attention or MoE backend", ("engine", "hardware"), _always),
        Trait("quantized KV", ("quantization",), _quantized_cache),
        Trait("maximum context", ("runtime",), _always),
        Trait("speculative decoding", ("draft",), _speculates),
        Trait("structured output", ("serving", "template"), _structured),
        Trait("LoRA", ("adapters",), _adapts),
        Trait("prefix cache", ("runtime",), _prefix_cache),
        Trait("multiple tenants", ("adapters",), _untold),
        Trait("CUDA Graphs", ("engine", "hardware"), _graphs),
        Trait("dynamic or multimodal shapes", ("tokenizer", "runtime"), _media),
        Trait("DP", ("topology",), _replicated),
        Trait("cache-aware routing", (), _untold),
        Trait("TP/PP/EP", ("topology",), _sharded),
        Trait("disaggregation", ("topology",), _disaggregated),
        Trait("chunked prefill", ("runtime",), _chunked),
        Trait("priority scheduling", ("runtime",), _prioritized),
        Trait("streaming", ("serving",), _streams),
        Trait("proxy", (), _always),
        Trait("billing", ("serving",), _always),
    )
}
"""Name → feature."""


@dataclass(frozen=True, slots=True)
class Joint:
    """Features to be checked together: what has to hold, the gates that see some of it, and what none sees."""

    features: tuple[str, ...]
    what: str
    gates: tuple[str, ...]
    unseen: str | None = None

    @property
    def name(self) -> str:
        """The features' names, joined."""
        return " + ".join(self.features)


_ADAPTER_UNSEEN: Final = (
    "Each adapter is asked alone and held against the base; no gate asks several at once, nor for long."
)

JOINTS: Final = (
    Joint(
        ("quantized weights", "attention or MoE backend"),
        "A kernel for this format and layout of tensors is there, no fallback is taken, and accuracy and latency hold.",
        ("compatibility", "golden", "load"),
        "A fallback is seen only by how slow it is.",
    ),
    Joint(
        ("quantized KV", "maximum context"),
        "Answers far into a long context hold, the cache is as large as planned, and its layout survives reuse.",
        ("golden", "load"),
        "Lengths beyond the longest prompt of the suites.",
    ),
    Joint(
        ("speculative decoding", "structured output"),
        "Sampling stays equivalent, masks hold for proposed tokens, accepted tokens are counted, and stops stop.",
        ("golden", "structured"),
    ),
    Joint(
        ("LoRA", "prefix cache"),
        "The adapter is part of the cache's key, adapters are paged, and batches may mix them.",
        ("compatibility",),
        _ADAPTER_UNSEEN,
    ),
    Joint(
        ("prefix cache", "multiple tenants"),
        "Tenants have a salt or a cache of their own, routing keeps to it, and timing tells nobody what others asked.",
        (),
        "No gate asks as two tenants: measure the time of a prompt that only the other has sent.",
    ),
    Joint(
        ("CUDA Graphs", "dynamic or multimodal shapes"),
        "Captured shapes cover what is asked, memory for them is there, and what is not covered runs eagerly and well.",
        ("compatibility", "load"),
        "Images, audio and video: the suites are texts.",
    ),
    Joint(
        ("DP", "cache-aware routing"),
        "Load is balanced although prefixes are kept together, and a hot or lost replica is routed around.",
        (),
        "Gates ask one replica, without a router that knows caches.",
    ),
    Joint(
        ("TP/PP/EP", "disaggregation"),
        "Both ends read the same bytes alike, also where their layouts differ, and converting them is paid for.",
        ("compatibility", "golden", "load"),
        "What a transfer costs, apart from the latency that it is part of.",
    ),
    Joint(
        ("chunked prefill", "priority scheduling"),
        "No priority starves, first and following tokens are traded as agreed, and preempted requests end well.",
        ("load",),
        "Priorities: no plan of arrivals has any.",
    ),
    Joint(
        ("streaming", "proxy", "billing"),
        "Nothing is buffered, a hang-up reaches the engine, errors end a stream as errors, and prompts are counted.",
        ("compatibility", "rollback"),
        "What is billed: usage is checked, invoices are not.",
    ),
    Joint(
        ("quantized KV", "prefix cache"),
        "Reused blocks are read with the scales that they were written with.",
        ("golden", "load"),
    ),
    Joint(
        ("quantized KV", "speculative decoding"),
        "Verification reads the same rounded cache as decoding would, and as many tokens are accepted.",
        ("golden", "load"),
    ),
    Joint(
        ("quantized KV", "LoRA"),
        "Keys and values of an adapter fit scales that were made for the base.",
        ("compatibility",),
        _ADAPTER_UNSEEN,
    ),
    Joint(
        ("quantized KV", "TP/PP/EP"),
        "Scales are cut or copied together with the heads that they belong to.",
        ("compatibility", "golden"),
    ),
    Joint(
        ("prefix cache", "speculative decoding"),
        "Draft and target agree on what of a prefix is cached, and rejected tokens leave no block behind.",
        ("golden", "load"),
    ),
    Joint(
        ("prefix cache", "TP/PP/EP"),
        "All ranks agree on which blocks are reused and which are evicted.",
        ("golden", "load"),
    ),
    Joint(
        ("speculative decoding", "LoRA"),
        "The target verifies under the adapter that was asked for, although the draft knows only the base.",
        ("compatibility",),
        _ADAPTER_UNSEEN,
    ),
    Joint(
        ("speculative decoding", "TP/PP/EP"),
        "The draft's own heads and vocabulary can be laid over the target's devices.",
        ("compatibility", "golden", "load"),
    ),
    Joint(
        ("LoRA", "TP/PP/EP"),
        "An adapter's matrices are cut as the layers are that they change.",
        ("compatibility",),
        _ADAPTER_UNSEEN,
    ),
)
"""Ten combinations that are known to fail, then the pairs of the five features that share cache and layout."""

MATRIX_PARTS: Final = frozenset({"engine", "hardware", "weights", "adapters", "quantization"})
"""Parts whose change asks for every combination again: engine, driver, kernel, model, adapter, quantization."""
