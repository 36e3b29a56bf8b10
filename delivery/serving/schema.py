"""Requests of the OpenAI API as this server takes them.

Fields that OpenAI's clients send by default and that change nothing here (`user`, `store`, ...) are
accepted; an unknown field, or a known one with a value that cannot be honoured, is refused.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from delivery.serving.limits import parse_json_object
from delivery.serving.problem import Problem

MAX_STOP = 16
MAX_N = 16


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    seed: int | None = None
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] = Field(default_factory=dict)
    stop: str | Annotated[list[str], Field(max_length=MAX_STOP)] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    min_tokens: Annotated[int, Field(ge=0)] = 0
    n: Annotated[int, Field(ge=1, le=MAX_N)] = 1
    priority: Annotated[int, Field(ge=-1, le=1)] = 0
    user: str | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _null_is_the_default(cls, data: Any) -> Any:
        """OpenAI's API takes null for every optional field, and clients send it."""
        if not isinstance(data, dict):
            return data
        return {k: v for k, v in data.items() if v is not None or k not in cls.model_fields}

    @property
    def stop_strings(self) -> list[str]:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [s for s in stops if s]

    @property
    def unstated_max_tokens(self) -> int | None:
        """Output tokens at most where the request does not say; None for what the session length leaves."""
        return None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class StreamOptions(BaseModel):
    """`include_usage` adds a last chunk with the token counts."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False
    include_obfuscation: bool | None = None


class CompletionRequest(_Request):
    """POST /v1/completions. Without `max_tokens` 16 tokens are made, as OpenAI's API has it."""

    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None

    @property
    def unstated_max_tokens(self) -> int | None:
        return max(16, self.min_tokens)

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One entry per prompt: texts, or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [[int(t) for t in self.prompt if isinstance(t, int)]]
        return self.prompt  # type: ignore[return-value]

    @model_validator(mode="after")
    def _not_empty(self) -> CompletionRequest:
        if not self.prompt:
            raise ValueError("prompt is empty")
        if self.echo and self.stream:
            raise ValueError("echo cannot be combined with stream")
        if self.echo and self.logprobs is not None:
            raise ValueError("echo cannot be combined with logprobs: those of the prompt are not kept")
        return self


class ContentPart(BaseModel):
    """A piece of a message's content; only text can be read."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(extra="forbid")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    annotations: list[Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _null_says_nothing(cls, data: Any) -> Any:
        """Clients send back the messages they got, with `function_call: null` and the like."""
        return {k: v for k, v in data.items() if v is not None} if isinstance(data, dict) else data

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a message of role {self.role!r} needs content")
        return self

    def for_template(self, *, with_objects: bool = True) -> dict[str, Any]:
        """The message as chat templates read it: content as one string.

        with_objects: arguments of tool calls as objects, as most templates want them, not as JSON.
        """
        text = self.content if isinstance(self.content, str) else None
        if isinstance(self.content, list):
            text = "".join(part.text for part in self.content)
        message: dict[str, Any] = {"role": self.role, "content": text or ""}
        if self.tool_calls:
            calls = self.tool_calls
            message["tool_calls"] = [_with_object(call) for call in calls] if with_objects else calls
        if self.tool_call_id:
            message["tool_call_id"] = self.tool_call_id
        if self.name:
            message["name"] = self.name
        return message


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    """A tool call with its arguments as an object, which templates write as JSON; a string in the API.

    It stays as it is where its arguments would be no JSON object that a body may hold.
    """
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = parse_json_object((function["arguments"] or "{}").encode())
    except Problem:
        return call
    return {**call, "function": {**function, "arguments": arguments}}


class Tool(BaseModel):
    """A function that the model may call."""

    type: Literal["function"]
    function: dict[str, Any]


class ResponseFormat(BaseModel):
    """Only free text: output is not constrained to a grammar, and is not claimed to be."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text"]


class ChatRequest(_Request):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        """The tools to put into the prompt, None when there are none or they are switched off."""
        if not self.tools or self.tool_choice == "none":
            return None
        return [tool.model_dump() for tool in self.tools]

    @model_validator(mode="after")
    def _logprobs(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self
