"""How to speak to text-generation-inference's OpenAI routes.

Source: huggingface/text-generation-inference `docs/openapi.json` and `router/src/server.rs` @003eaec. Not run here:
recorded answers only. Archived upstream.
"""

from collections.abc import Mapping

from gates.dialects import releases
from gates.dialects.base import Dialect, MetricNames


class Tgi(Dialect):
    """It refuses values that change nothing, and has two ways of asking for the likeliest token."""

    def generation_fields(self, body: Mapping[str, object], *, is_chat: bool) -> dict[str, object]:
        """Leave out a `top_p` of 1, which it refuses, and in completions a temperature of 0, which it refuses too.

        A conversation without temperature is sampled, one with 0 is not; a completion without one is not.
        """
        left_out = {"top_p"} if body.get("top_p") == 1.0 else set()
        if not is_chat and body.get("temperature") == 0:
            left_out |= {"temperature"}
        return {name: value for name, value in body.items() if name not in left_out}

    def schema_fields(self, name: str, schema: Mapping[str, object]) -> dict[str, object]:
        """Return the fields that ask for an answer that conforms to a JSON Schema, in its own form."""
        del name
        return {"response_format": {"type": "json_object", "value": dict(schema)}}


TGI = Tgi(
    name="tgi",
    verified_with="recorded, text-generation-inference 3.3.6",
    capabilities=frozenset(),
    metrics=MetricNames(),
    # top_k and min_p are no fields of these routes; nothing applies unless a request names it.
    sampling_fields={"temperature": "temperature", "top_p": "top_p", "seed": "seed"},
    reasoning_fields=("reasoning_content",),
    cache_field=None,
    health_path=releases.health("tgi").path,
    tokenize_field="inputs",
    facts_path="/info",
    facts_fields=("version", "model_id", "max_total_tokens", "max_concurrent_requests"),
    # A completion's stream has an empty text for what has not ended, and its own words for what has.
    finish_words={"": None, "eos_token": "stop", "stop_sequence": "stop"},
)
"""Capabilities and metrics are those of a version: `table.dialect_of`."""
