"""How to speak to `trtllm-serve`.

Source: NVIDIA/TensorRT-LLM `tensorrt_llm/serve/openai_protocol.py` @0076e93 and `tensorrt_llm/serve/openai_server.py`
@0005772. Fields that it does not know are refused. Not run here: recorded answers only.
"""

from gates.dialects import releases
from gates.dialects.base import Dialect, MetricNames

TRTLLM = Dialect(
    name="trtllm",
    verified_with="recorded, TensorRT-LLM 1.3.0",
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
    reasoning_fields=("reasoning_content",),
    cache_field=None,
    health_path=releases.health("trtllm").path,
    # /metrics is a list of JSON about iterations, not a page of Prometheus.
    metrics_path="/prometheus/metrics",
    facts_path="/version",
    facts_fields=("version",),
)
"""Capabilities and metrics are those of a version: `table.dialect_of`."""
