"""How to speak to `transformers serve`.

Source: transformers 5.19.0, `cli/serving`, and seen with it on a CPU. Fields that it does not know are refused. Streams
end without [DONE]. What sampling it has no field for goes into `generation_config`, a text of JSON.
"""

import json
from collections.abc import Mapping, Sequence

from gates.dialects import releases
from gates.dialects.base import Dialect, Message, MetricNames, Request

_IN_TEXT = {"top_k": "top_k", "min_p": "min_p", "repeat_penalty": "repetition_penalty"}


class Transformers(Dialect):
    """Says in a text of JSON what there are no fields for."""

    def generation_fields(self, body: Mapping[str, object], *, is_chat: bool) -> dict[str, object]:
        """Move values without a field of their own into `generation_config`, and ask for no usage: it always comes."""
        del is_chat
        spellings = {self.sampling_fields[name]: text for name, text in _IN_TEXT.items()}
        told = {spellings[name]: value for name, value in body.items() if name in spellings}
        fields = {name: value for name, value in body.items() if name not in {*spellings, "stream_options"}}
        if told:
            # By itself this replaces what the model's own file says of them, and of nothing else.
            told["do_sample"] = body.get("temperature") != 0
            fields["generation_config"] = json.dumps(told)
        return fields

    def greedy(
        self, model: str, messages: Sequence[Message], *, max_tokens: int, top_logprobs: int | None = None
    ) -> Request:
        """Build a plain chat request that names temperature 0 and no other sampling value."""
        request = super().greedy(model, messages, max_tokens=max_tokens, top_logprobs=top_logprobs)
        return Request(request.path, {k: v for k, v in (request.body or {}).items() if k != "generation_config"})


TRANSFORMERS = Transformers(
    name="transformers",
    verified_with="transformers 5.19.0",
    capabilities=frozenset(),
    metrics=MetricNames(),
    sampling_fields={
        "temperature": "temperature",
        "top_p": "top_p",
        "seed": "seed",
        "top_k": "_top_k",
        "min_p": "_min_p",
        "repeat_penalty": "_repetition_penalty",
    },
    reasoning_fields=("reasoning_content",),
    cache_field=None,
    health_path=releases.health("transformers").path,
    has_done=False,
)
"""Capabilities are those of a version: `table.dialect_of`. There are no metrics."""
