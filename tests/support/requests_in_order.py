"""Says what is out of order with a request for a generation, as a server that reads its fields strictly does."""

import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr, ValidationError

CONTEXT_TOKENS = 4096
_TYPES = {"object", "array", "string", "number", "integer", "boolean", "null"}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, strict=True)


class _Part(_Strict):
    type: Literal["text"]
    text: StrictStr


class _Message(_Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: StrictStr | list[_Part]
    tool_call_id: StrictStr | None = None
    tool_calls: list[dict[str, Any]] | None = None


class _Function(_Strict):
    name: StrictStr


class _Tool(_Strict):
    type: Literal["function"]
    function: _Function


class _Format(_Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None


class _Request(_Strict):
    model: StrictStr
    max_tokens: StrictInt | None = Field(None, ge=1, le=CONTEXT_TOKENS)
    temperature: StrictFloat | StrictInt | None = Field(None, ge=0, le=2)
    top_p: StrictFloat | StrictInt | None = Field(None, gt=0, le=1)
    seed: StrictInt | None = None
    n: StrictInt | None = Field(None, ge=1, le=1)
    stop: StrictStr | list[StrictStr] | None = None
    stream: StrictBool = False
    top_logprobs: StrictInt | None = Field(None, ge=0, le=20)
    response_format: _Format | None = None
    tools: list[_Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None


class _Chat(_Request):
    messages: list[_Message] = Field(min_length=1)


class _Completion(_Request):
    prompt: StrictStr | list[StrictInt] = Field(min_length=1)


def misuse(body: Mapping[str, Any], served: str, *, is_chat: bool, accepts: frozenset[str]) -> str | None:
    """Return what is out of order with a request; None when nothing is.

    Args:
        body: its fields. Which others there may be is for the engine to say.
        served: the only model.
        is_chat: whether it is a conversation.
        accepts: names of misuses that this server does not mind: model-unknown.
    """
    try:
        read = (_Chat if is_chat else _Completion).model_validate(dict(body))
    except ValidationError as error:
        return "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
    if read.model != served and "model-unknown" not in accepts:
        return f"there is no model {read.model}"
    if isinstance(read, _Completion):
        tokens = read.prompt if isinstance(read.prompt, list) else []
        return "there is no such token" if any(not 0 <= token < 2**20 for token in tokens) else None
    if sum(len(str(one.content)) // 2 for one in read.messages if one.role == "user") > CONTEXT_TOKENS:
        return "the prompt is longer than the context"
    if any(one.role == "tool" and one.tool_call_id is None for one in read.messages):
        return "an answer of a tool that was not called"
    told = read.response_format
    return _schema((told.json_schema or {}).get("schema", {})) if told is not None else None


def _schema(schema: Mapping[str, Any]) -> str | None:
    if schema.get("type", "object") not in _TYPES:
        return f"{schema['type']} is no type"
    if "$ref" in schema:
        return f"{schema['$ref']} leads nowhere"
    try:
        re.compile(schema.get("pattern", ""))
    except re.error as error:
        return f"the pattern cannot be read: {error}"
    return None
