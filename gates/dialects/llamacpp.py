"""How to speak to llama.cpp's server.

Source: verified with xllamacpp 2026.10.11549.
"""

from gates.dialects.base import Capability, Dialect, MetricNames

LLAMACPP = Dialect(
    name="llamacpp",
    verified_with="xllamacpp 2026.10.11549",
    capabilities=frozenset(Capability) - {Capability.PROMPT_LOGPROBS, Capability.LORA_AT_RUN_TIME},
    metrics=MetricNames(
        running="llamacpp:requests_processing",
        waiting="llamacpp:requests_deferred",
        progress="llamacpp:n_decode_total",
        prompt_tokens="llamacpp:prompt_tokens_total",
        cached_tokens="llamacpp:prompt_tokens_cached_total",
        generated_tokens="llamacpp:tokens_predicted_total",
    ),
    # `repetition_penalty` would be ignored.
    sampling_fields={
        "temperature": "temperature",
        "top_k": "top_k",
        "top_p": "top_p",
        "min_p": "min_p",
        "repeat_penalty": "repeat_penalty",
        "seed": "seed",
    },
    reasoning_fields=("reasoning_content",),
    cache_field="cache_prompt",
    # Without add_special there is no BOS, without parse_special a marker is split into letters. The rendered
    # prompt carries no BOS of its own: the server takes one off that the template writes.
    tokenize_flags={"add_special": True, "parse_special": True},
    # Of one slot, and at most what the model was trained with.
    context_pointer=("meta", "n_ctx"),
    facts_path="/props",
    facts_fields=("build_info", "model_path", "total_slots", "chat_template"),
)
"""Verified with xllamacpp 2026.10.11549. Log-probability entries carry token ids, in chat and in completions; a plain
answer lists the end-of-turn token too, a stream does not."""
