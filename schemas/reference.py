"""The reference: what an accepted bundle answered to a golden suite. Immutable; set on a target by a recorded act."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from schemas.common import Closed, DecimalString, Digest, Document, Integer, Positive, ShortText
from schemas.suite import ItemId


class TokenChoice(Closed):
    """One token with its log-probability."""

    id: Integer = Field(description="Token id.")
    text: Annotated[str, Field(max_length=4096)] = Field(description="Its text.")
    logprob: DecimalString = Field(description="Natural logarithm of its probability, rounded to 1e-6.")


class OutputToken(TokenChoice):
    """One generated token and the alternatives at its place."""

    top: Annotated[list[TokenChoice], Field(max_length=50)] = Field(description="Best alternatives, best first.")


class Recording(Closed):
    """One prompt of the suite as the accepted bundle saw and answered it."""

    prompt: ItemId = Field(description="Prompt of the suite.")
    prompt_ids: Annotated[list[Integer], Field(min_length=1)] = Field(description="Token ids after the template.")
    output: Annotated[list[OutputToken], Field(min_length=1)] = Field(description="Greedy output.")
    finish_reason: ShortText = Field(description="stop or length.")


class Noise(Closed):
    """How the accepted bundle differs from itself (A/A)."""

    repeats: Positive = Field(description="Times the suite was run.")
    diverging_prompts: Integer = Field(description="Prompts whose output tokens were not the same every time.")
    max_margin_nat: DecimalString = Field(description="Largest reference margin at a first divergence, in nats.")


class Reference(Document):
    """What an accepted bundle answered. Named by `digest`."""

    SCHEMA_ID: ClassVar[str] = "sluicegate.dev/reference/v1"

    schema_id: Literal["sluicegate.dev/reference/v1"] = Field(alias="schema", description="Schema of this document.")
    suite: Digest = Field(description="The golden suite.")
    bundle: Digest = Field(description="The bundle that answered.")
    engine: ShortText = Field(description="Engine name and version that answered.")
    hardware: ShortText = Field(description="Hardware class it ran on.")
    recordings: Annotated[list[Recording], Field(min_length=1)] = Field(description="One a prompt of the suite.")
    noise: Noise = Field(description="A/A differences.")
