"""Suites: what gates run. Immutable, named by digest."""

import itertools
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, TypeAdapter, model_validator

from schemas.common import (
    Closed,
    DecimalString,
    Document,
    Integer,
    Name,
    Positive,
    ShortText,
    Text,
    sorted_unique,
)

ITEM_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
ItemId = Annotated[str, Field(pattern=ITEM_PATTERN)]


class Message(Closed):
    """One chat message."""

    role: Literal["system", "user", "assistant"] = Field(description="Who speaks.")
    content: Annotated[str, Field(max_length=200_000)] = Field(description="What is said; may be empty.")


class Prompt(Closed):
    """One chat prompt with the output it may take."""

    id: ItemId = Field(description="Name of the prompt in reports.")
    messages: Annotated[list[Message], Field(min_length=1, max_length=64)] = Field(description="The conversation.")
    max_tokens: Annotated[Positive, Field(le=4096)] = Field(description="Output limit in tokens.")


def _unique_ids(prompts: list[Prompt]) -> None:
    sorted_unique(sorted(prompt.id for prompt in prompts), "prompt ids")


class GoldenSuite(Document):
    """Prompts whose prompt token ids and greedy output are compared with a reference."""

    SCHEMA_ID: ClassVar[str] = "sluicegate.dev/suite/golden/v1"

    schema_id: Literal["sluicegate.dev/suite/golden/v1"] = Field(alias="schema", description="Schema of this document.")
    name: Name = Field(description="Family that the suite belongs to.")
    description: Text | None = Field(None, description="For people.")
    prompts: Annotated[list[Prompt], Field(min_length=1, max_length=10_000)] = Field(description="Golden prompts.")
    top_k: Annotated[Positive, Field(le=50)] = Field(description="Alternatives recorded per output token.")
    repeats: Annotated[Positive, Field(le=20)] = Field(description="A/A repeats when a reference is recorded.")

    @model_validator(mode="after")
    def _ids(self) -> Self:
        _unique_ids(self.prompts)
        return self


class Arrival(Closed):
    """One planned request."""

    at_us: Integer = Field(description="Offset from the start of its window, in microseconds.")
    prompt: ItemId = Field(description="Which prompt is sent.")


class ArrivalProcess(Closed):
    """Where the planned arrivals were drawn from; realised gaps are tested against it."""

    distribution: Literal["gamma", "constant"] = Field(description="Distribution of the gaps.")
    rate_per_second: DecimalString = Field(description="Mean arrival rate.")
    shape: DecimalString | None = Field(None, description="Shape of the gamma; 1 is Poisson.")
    seed: Integer | None = Field(None, description="Seed of the draw.")

    @model_validator(mode="after")
    def _shape(self) -> Self:
        if self.rate_per_second <= 0:
            raise ValueError("rate_per_second must be above 0")
        if (self.distribution == "gamma") != (self.shape is not None):
            raise ValueError("shape is given exactly for a gamma distribution")
        return self


class LoadSuite(Document):
    """A stored arrival plan and the prompts it sends. The plan is drawn once and never again."""

    SCHEMA_ID: ClassVar[str] = "sluicegate.dev/suite/load/v1"

    schema_id: Literal["sluicegate.dev/suite/load/v1"] = Field(alias="schema", description="Schema of this document.")
    name: Name = Field(description="Family that the suite belongs to.")
    description: Text | None = Field(None, description="For people.")
    prompts: Annotated[list[Prompt], Field(min_length=1, max_length=10_000)] = Field(description="Prompts to send.")
    process: ArrivalProcess = Field(description="What the plan was drawn from.")
    warmup: Annotated[list[Arrival], Field(min_length=1, max_length=10_000)] = Field(
        description="Sent first, not judged."
    )
    plan: Annotated[list[Arrival], Field(min_length=1, max_length=100_000)] = Field(
        description="The measured arrivals; follow the warm-up without a pause."
    )
    request_seconds: DecimalString = Field(description="Time after which an unfinished request has failed.")
    salt: ShortText | None = Field(
        None, description="Text put before each prompt with the request's number, against caches."
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _unique_ids(self.prompts)
        known = {prompt.id for prompt in self.prompts}
        for name, arrivals in (("warmup", self.warmup), ("plan", self.plan)):
            if any(arrival.prompt not in known for arrival in arrivals):
                raise ValueError(f"{name}: names a prompt that the suite lacks")
            if any(b.at_us < a.at_us for a, b in itertools.pairwise(arrivals)):
                raise ValueError(f"{name}: arrivals must be in order of time")
        if self.request_seconds <= 0:
            raise ValueError("request_seconds must be above 0")
        return self


class LoadSpec(Closed):
    """The short form of a load suite: what to send, how fast, and the seed from which the plan is drawn.

    No document of its own: `sluicegate suite push` draws a `LoadSuite` from it and registers that.
    """

    name: Name = Field(description="Family that the suite belongs to.")
    description: Text | None = Field(None, description="For people.")
    prompts: Annotated[list[Prompt], Field(min_length=1, max_length=10_000)] = Field(description="Prompts to send.")
    rate_per_second: DecimalString = Field(description="Mean arrival rate, above 0.")
    requests: Annotated[Positive, Field(le=100_000)] = Field(description="Measured arrivals.")
    warmup_requests: Annotated[Positive, Field(le=10_000)] = Field(description="Arrivals before them, not judged.")
    distribution: Literal["gamma", "constant"] = Field(description="Distribution of the gaps.")
    shape: DecimalString | None = Field(None, description="Shape of the gamma, 0.05 to 1000; 1 is Poisson.")
    seed: Integer = Field(description="Seed of the draw.")
    request_seconds: DecimalString = Field(description="Time after which an unfinished request has failed.")
    salt: ShortText | None = Field(None, description="Text put before each prompt, against caches.")


JsonText = Annotated[str, Field(min_length=1, max_length=65_536)]
"""JSON as text: its order is kept, since engines write properties in the order of the schema."""


class TokenBias(Closed):
    """Something added to the score of one token, for models too small to be steered by words."""

    token: Integer = Field(description="Token id.")
    bias: DecimalString = Field(description="Added to its logit; negative to avoid it.")


class StructuredItem(Closed):
    """One JSON Schema of the contract with callers, and a conversation that asks for an instance of it."""

    id: ItemId = Field(description="Name of the item in reports.")
    json_schema: JsonText = Field(description="The schema, as JSON text.")
    messages: Annotated[list[Message], Field(min_length=1, max_length=64)] = Field(
        description="The conversation; best one that tempts the model to break the schema."
    )
    max_tokens: Annotated[Positive, Field(le=4096)] = Field(description="Output limit in tokens.")
    valid: Annotated[list[JsonText], Field(min_length=1, max_length=100)] = Field(
        description="Instances written by hand that the schema must accept."
    )
    invalid: Annotated[list[JsonText], Field(min_length=1, max_length=100)] = Field(
        description="Instances written by hand that the schema must refuse."
    )
    logit_bias: Annotated[list[TokenBias], Field(max_length=256)] | None = Field(
        None, description="Sent with each request of the item. Callers do not; the result says that it was."
    )


class StructuredSuite(Document):
    """JSON Schemas that callers rely on, with prompts, and instances that prove the judges."""

    SCHEMA_ID: ClassVar[str] = "sluicegate.dev/suite/structured/v1"

    schema_id: Literal["sluicegate.dev/suite/structured/v1"] = Field(
        alias="schema", description="Schema of this document."
    )
    name: Name = Field(description="Family that the suite belongs to.")
    description: Text | None = Field(None, description="For people.")
    items: Annotated[list[StructuredItem], Field(min_length=1, max_length=1000)] = Field(description="The contract.")
    repeats: Annotated[Positive, Field(le=10_000)] = Field(
        description="Answers asked for an item: the first at temperature 0, the others at 1 with seeds of their own."
    )

    @model_validator(mode="after")
    def _ids(self) -> Self:
        sorted_unique(sorted(item.id for item in self.items), "item ids")
        return self


AnySuite = GoldenSuite | LoadSuite | StructuredSuite
Suite = Annotated[AnySuite, Field(discriminator="schema_id")]
SUITE: TypeAdapter[AnySuite] = TypeAdapter(Suite)
