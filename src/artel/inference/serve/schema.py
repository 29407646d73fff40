"""Requests of the API and their limits: OpenAI's, with vLLM's additional sampling settings.

Unknown settings are refused, so that none is silently ignored. Settings of OpenAI without effect (`user`, `store`,
`metadata`, `service_tier`, …) are accepted. So are fields of messages and calls that clients send back unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

_MAX_ANSWERS = 8
"""Maximum answers to one request: its prompts times `n`."""
Text = Annotated[str, StringConstraints(max_length=4_000_000)]
Stop = Annotated[str, StringConstraints(min_length=1, max_length=500)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Ids = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Texts = Annotated[list[Text], Field(min_length=1, max_length=256, fail_fast=True)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class ClientObject(BaseModel):
    """A part of a request that clients copy from responses, with fields that differ between clients.

    Unknown fields are ignored, and logged once.
    """

    model_config = ConfigDict(extra="allow", protected_namespaces=())


def ignored_fields(value: Any, path: str) -> Iterator[str]:
    """Yield the paths of fields that the server ignores in ClientObjects of a body, e.g. `messages.parsed`."""
    if isinstance(value, list):
        for item in value:
            yield from ignored_fields(item, path)
    elif isinstance(value, ClientObject):
        yield from (f"{path}.{name}" for name in value.model_extra or ())
        for name in type(value).model_fields:
            yield from ignored_fields(getattr(value, name), f"{path}.{name}")


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool = False


class SamplingBody(Body):
    """Settings of both completions and chats."""

    model: str = Field(default="", description="Name of a served model (default: the first one).")
    temperature: float | None = Field(default=None, ge=0, le=100, description="0 always selects the most likely token.")
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(
        default=None, ge=-1, le=2**31, description="Number of most likely tokens to sample from; 0 or -1: all."
    )
    min_p: float | None = Field(default=None, ge=0, le=1)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, ge=0.1, le=10)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(default=None, max_length=1000)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    n: int | None = Field(default=None, ge=1, le=_MAX_ANSWERS)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None

    @property
    def answer_count(self) -> int:
        return self.n or 1


class CompletionRequest(SamplingBody):
    prompt: (
        Text
        | Annotated[list[Text], Field(min_length=1, max_length=_MAX_ANSWERS, fail_fast=True)]
        | Ids
        | Annotated[list[Ids], Field(min_length=1, max_length=_MAX_ANSWERS, fail_fast=True)]
    )
    max_tokens: int | None = Field(default=None, ge=1, le=2**31)
    logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: bool | None = Field(default=None, description="With logprobs: also return those of the prompt's tokens.")
    return_token_ids: bool | None = Field(
        default=None, description="Also return the ids of prompt and completion, with the token that ended it."
    )
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] | None = None
    skip_special_tokens: bool | None = Field(
        default=None, description="false: the text, and what `stop` is compared with, includes control tokens."
    )
    suffix: None = None
    best_of: Literal[1] | None = None

    @field_validator("prompt")
    @classmethod
    def _check_answer_count(cls, prompt: Any, info: ValidationInfo) -> Any:
        prompt_count = len(_list_prompts(prompt))
        n = info.data.get("n") or 1
        if prompt_count * n > _MAX_ANSWERS:
            reason = f"{prompt_count} prompts with n: {n} need more than {_MAX_ANSWERS} answers; use fewer prompts or n"
            raise PydanticCustomError("too_many_answers", reason)
        return prompt

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, as texts or token ids."""
        return _list_prompts(self.prompt)

    @property
    def answer_count(self) -> int:
        return len(self.prompts) * (self.n or 1)


def _list_prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> list[Any]:
    return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt


class FunctionCall(ClientObject):
    name: str
    arguments: str


class ToolCall(ClientObject):
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class TextPart(ClientObject):
    type: Literal["text"]
    text: Text


class Message(ClientObject):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning_content: Text | None = Field(
        default=None, validation_alias=AliasChoices("reasoning_content", "reasoning")
    )
    # Fields of responses, which clients send back.
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None
    id: str | None = None
    parsed: Any = None


class Function(ClientObject):
    name: Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(ClientObject):
    type: Literal["function"]
    function: Function


class FunctionName(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionName


class AllowedTools(Body):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=128)]


class AllowedToolChoice(Body):
    """Allows calls of some of `tools`. The prompt lists all of them, which keeps its prefix the same."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class JsonSchema(Body):
    model_config = ConfigDict(extra="forbid", populate_by_name=True, protected_namespaces=())

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class TextFormat(Body):
    type: Literal["text"]


class JsonFormat(Body):
    type: Literal["json_object"]


class JsonSchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: JsonSchema


class ChatRequest(SamplingBody):
    messages: Annotated[list[Message], Field(min_length=1, max_length=10_000)]
    max_tokens: int | None = Field(default=None, ge=1, le=2**31)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=2**31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    response_format: Annotated[TextFormat | JsonFormat | JsonSchemaFormat, Field(discriminator="type")] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedToolChoice | None = None
    parallel_tool_calls: bool | None = None


def _accept_only(fix: str, *without_effect: Any) -> BeforeValidator:
    """Accept only values without effect, and refuse others with `fix`."""

    def check(value: Any) -> None:
        if value not in (None, *without_effect):
            raise PydanticCustomError("unsupported", "is not supported at /v1/responses; {fix}", {"fix": fix})

    return BeforeValidator(check)


_IN_CHAT = "remove it, or use /v1/chat/completions"
_NO_MEMORY = "this server stores nothing: send the earlier messages in input"


class ResponsesPart(ClientObject):
    """A text in a message of `input`."""

    type: Literal["input_text", "output_text", "text"]
    text: Text
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class ResponsesMessage(ClientObject):
    """A message of `input`: written by the client, or an item of an earlier `output`."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[ResponsesPart], Field(fail_fast=True)]
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class ResponsesSchema(JsonSchema):
    """A schema for the answer, like a chat's `response_format` in one object."""

    type: Literal["json_schema"]


class ResponsesText(Body):
    format: Annotated[TextFormat | JsonFormat | ResponsesSchema, Field(discriminator="type")] | None = None
    verbosity: Annotated[None, _accept_only("remove it", "medium")] = None

    @property
    def chat_format(self) -> JsonFormat | JsonSchemaFormat | None:
        """The equivalent `response_format` of a chat, or None for free text."""
        if isinstance(self.format, ResponsesSchema):
            return JsonSchemaFormat.model_construct(type="json_schema", json_schema=self.format)
        return self.format if isinstance(self.format, JsonFormat) else None


class ResponsesRequest(SamplingBody):
    """A request of OpenAI's Responses API, without tools and stored conversations."""

    input: Text | Annotated[list[ResponsesMessage], Field(min_length=1, max_length=10_000, fail_fast=True)]
    instructions: Text | None = None
    max_output_tokens: int | None = Field(default=None, ge=1, le=2**31)
    n: Literal[1] | None = None
    tools: Annotated[None, _accept_only(_IN_CHAT, [])] = None
    tool_choice: Annotated[None, _accept_only(_IN_CHAT, "auto", "none")] = None
    text: ResponsesText | None = None
    top_logprobs: Annotated[None, _accept_only(_IN_CHAT, 0)] = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    previous_response_id: Annotated[None, _accept_only(_NO_MEMORY)] = None
    conversation: Annotated[None, _accept_only(_NO_MEMORY)] = None
    background: Annotated[None, _accept_only("remove it", False)] = None
    include: Annotated[None, _accept_only("remove it", [])] = None
    prompt: Annotated[None, _accept_only("put the text in input and instructions")] = None
    reasoning: Annotated[None, _accept_only("remove it", {})] = None
    truncation: Annotated[None, _accept_only("remove it", "disabled")] = None

    def as_chat(self) -> ChatRequest:
        """Return the equivalent chat request."""
        messages = []
        if self.instructions is not None:
            messages.append(Message.model_construct(role="system", content=self.instructions))
        if isinstance(self.input, str):
            messages.append(Message.model_construct(role="user", content=self.input))
        else:
            messages += [
                Message.model_construct(role=item.role, content=_join_parts(item.content)) for item in self.input
            ]
        sampling = {name: getattr(self, name) for name in SamplingBody.model_fields}
        return ChatRequest.model_construct(
            messages=messages,
            max_completion_tokens=self.max_output_tokens,
            response_format=None if self.text is None else self.text.chat_format,
            **sampling,
        )


def _join_parts(content: str | list[ResponsesPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


class EmbeddingRequest(Body):
    model: str = ""
    input: Text | Texts | Ids | Annotated[list[Ids], Field(min_length=1, max_length=256, fail_fast=True)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(default=None, ge=1)
    input_type: Literal["query", "document", "search_query", "search_document"] | None = None
    user: str | None = None


class ClassifyRequest(Body):
    """Texts, or pairs of texts, to label."""

    model: str = ""
    input: (
        Text
        | Texts
        | Annotated[list[Annotated[list[Text], Field(min_length=2, max_length=2)]], Field(min_length=1, max_length=256)]
    )
    user: str | None = None


class EntitiesRequest(Body):
    model: str = ""
    input: Text | Texts
    user: str | None = None


class TextDocument(Body):
    """A document in the format of Cohere's and Jina's clients."""

    text: Text


class RerankRequest(Body):
    """Documents to rank by relevance to a query, as with Jina's, Cohere's and vLLM's servers."""

    model: str = ""
    query: Text
    documents: Annotated[list[Text | TextDocument], Field(min_length=1, max_length=256)]
    top_n: int | None = Field(default=None, ge=1)
    return_documents: bool = True
    user: str | None = None

    @property
    def texts(self) -> list[str]:
        """The texts of the documents."""
        return [document if isinstance(document, str) else document.text for document in self.documents]


class ScoreRequest(Body):
    """Pairs of texts to score, as with vLLM's server: prompts and answers, or queries and documents.

    A single `text_1` is paired with each `text_2`. A prompt may be the messages of a conversation.
    """

    model: str = ""
    text_1: Text | Texts | Annotated[list[Message], Field(min_length=1, max_length=10_000)]
    text_2: Text | Texts
    user: str | None = None


class FillMaskRequest(Body):
    model: str = ""
    input: Text | Annotated[list[Text], Field(min_length=1, max_length=64)]
    top_k: int = Field(default=5, ge=1, le=100)


class AnswerRequest(Body):
    model: str = ""
    question: Text
    context: Text
