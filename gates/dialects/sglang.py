"""How to speak to SGLang's OpenAI routes.

Source: `entrypoints/openai/protocol.py` @004c82e, `entrypoints/http_server.py` @0025436 and
`entrypoints/openai/serving_tokenize.py` @0351c1f of sgl-project/sglang, and its #21463 of March 2026, by which
/get_server_info is to go and /server_info says the same. Not run here: recorded answers only.
"""

from gates.dialects import releases
from gates.dialects.base import Dialect, MetricNames

SGLANG = Dialect(
    name="sglang",
    verified_with="recorded, sglang 0.5.9",
    capabilities=frozenset(),
    metrics=MetricNames(),
    sampling_fields={
        "temperature": "temperature",
        "top_k": "top_k",
        "top_p": "top_p",
        "min_p": "min_p",
        "repeat_penalty": "repetition_penalty",
        "seed": "seed",
    },
    # 0 is refused: it has to be -1 or at least 1.
    every_candidate=-1,
    reasoning_fields=("reasoning_content",),
    # Its radix cache cannot be left out by one request.
    cache_field=None,
    health_path=releases.health("sglang").path,
    tokenize_field="prompt",
    tokenize_flags={"add_special_tokens": True},
    detokenize_field="text",
    context_pointer=("max_model_len",),
    facts_path="/server_info",
    older_facts_path="/get_server_info",
    facts_fields=("version", "model_path", "served_model_name", "context_length", "tp_size", "quantization"),
)
"""Capabilities and metrics are those of a version: `table.dialect_of`."""
