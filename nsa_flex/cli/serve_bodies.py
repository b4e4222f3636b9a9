"""What requests to the server may hold: OpenAI's fields, as far as the engine honours them.

A field that would change the answer and is not honoured is refused, never ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, ValidationError

Count = Annotated[int, Field(strict=True, ge=1)]
Text = Annotated[str, Field(min_length=1)]


class _Body(BaseModel):
    """Fields of every endpoint. Those of one value are there for clients that send defaults."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    stream: StrictBool | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None


class _Sampled(_Body):
    """Fields of both endpoints that complete text."""

    max_tokens: Count | None = None
    n: Literal[1] | None = None
    presence_penalty: Literal[0] | None = None
    frequency_penalty: Literal[0] | None = None
    stream_options: dict[str, Any] | None = None


class CompletionBody(_Sampled):
    """Of /v1/completions."""

    prompt: str
    suffix: str | None = None
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    logprobs: None = None


class Message(BaseModel):
    """One message of a chat; what else it holds is the chat template's."""

    model_config = ConfigDict(extra="allow")

    role: Text
    content: str | list[dict[str, Any]] | None = None


class ChatBody(_Sampled):
    """Of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: Literal[False] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto"] | None = None
    response_format: PlainText | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class PlainText(BaseModel):
    """The one format that every answer has."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text"]


class ResponseBody(_Body):
    """Of /v1/responses."""

    input: Text | Annotated[list[dict[str, Any]], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto"] | None = None
    store: Literal[False] | None = None


def problem_of(body: Any, kind: type[BaseModel]) -> tuple[str, str | None] | None:
    """Why a body is refused, and the field it is about; None if it is taken.

    >>> problem_of({"prompt": "once", "max_tokens": 0}, CompletionBody)
    ('max_tokens: Input should be greater than or equal to 1, got 0', 'max_tokens')
    >>> problem_of({"prompt": "once", "seed": 1}, CompletionBody)
    ('seed is not supported', 'seed')
    """
    try:
        kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = [str(x) for x in first["loc"]]
        field = place[0] if place else None
        if first["type"] == "extra_forbidden":
            return f"{'.'.join(place)} is not supported", field
        text = first["msg"]
        if first["type"] != "missing":
            text += f", got {_short(first['input'])}"
        return f"{'.'.join(place)}: {text}" if place else text, field
    return None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
