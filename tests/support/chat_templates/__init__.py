"""Chat templates that write as the families of models that people use most, and what each family learns of an answer.

Each file says at its head which models write so, and with which habits. They are written for these tests, short, after
what is public of the models' own; none was compared with its original byte for byte.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from artel.config import TokenizerTraining
from artel.text import Message, ToolCall
from artel.tokens import Tokenizer, train_tokenizer
from artel.tokens.tokenizer.chat_template import resolve_template

FOLDER = Path(__file__).parent
THINK = ("<think>", "</think>")


def as_is(text: str) -> str:
    return text


def without_line_feeds(text: str) -> str:
    return text.lstrip("\n")


def tagged(thought: str, content: str) -> str:
    """How a thought is written where the template has no place for it: within the content."""
    return f"<think>\n{thought}\n</think>\n\n{content}"


@dataclass(frozen=True)
class Family:
    """A template, the tokens of its tokenizer, and what is learned of its answers."""

    name: str
    end: str
    """What ends an answer, the last of the conversation."""
    marks: tuple[str, ...] = ()
    """Special tokens, besides `end`."""
    begin: str | None = None
    end_token: str | None = None
    """The tokenizer's end token, where that is not `end`."""
    trim: Callable[[str], str] = as_is
    """What becomes of an answer's content."""
    ends: dict[str | None, str] = field(default_factory=dict)
    """What ends an answer that is followed by a role, where that is not `end`; None: by nothing."""
    plain: Callable[[str, bool, bool], str] = lambda content, last, answers_last: content
    """What is learned of an answer without a thought; `last` if it ends the conversation, `answers_last` if it follows
    the last question."""
    thinking: Callable[[str, str, bool], str] | None = None
    """And of one with a thought. None: it is within the content, in tags."""
    calls: Callable[[str, Sequence[ToolCall]], str] | None = None
    """And of one that calls tools after its content, with its end. None: the template writes no calls."""
    call_thought: Callable[[str, Sequence[Message]], str] | None = None
    """And of the thought before calls, by the answers without calls after them. None: as before an answer."""
    open_end: str = ""
    """What a conversation is ended with where the template only ends what is said."""
    call_id: Callable[[ToolCall, int], str] = lambda call, number: call.id
    """The id that a call is written with; `number` counts the calls of the conversation from 0."""
    describes: bool = True
    """Whether it writes descriptions of tools."""
    has_tool_use: bool = False
    """Whether the tokenizer has a template of its own for tools: NAME_tool_use.jinja."""
    learns: str = "all"
    """last: only the last answer is learned."""
    refuses: dict[str, str] = field(default_factory=dict)
    """The kinds of conversation that it cannot have, and words of the refusal."""
    differs: dict[str, str] = field(default_factory=dict)
    """The kinds of conversation that get a notice, and how they differ: `Difference.kind`."""

    @property
    def template(self) -> str:
        """As artel takes it from the tokenizer."""
        return resolve_template(self.tokenizer(), "auto") if self.has_tool_use else _file(self.name)

    @property
    def special(self) -> list[str]:
        own = [self.begin, self.end_token, self.end, *self.ends.values(), *self.marks]
        return list(dict.fromkeys(token for token in own if token))

    def tokenizer(self) -> Tokenizer:
        hf = copy.deepcopy(_letters().hf)
        hf.add_special_tokens({"additional_special_tokens": self.special})
        hf.eos_token = self.end_token or self.end
        hf.bos_token = self.begin
        hf.add_tokens(list(THINK))
        own = _file(self.name)
        hf.chat_template = {"default": own, "tool_use": _file(f"{self.name}_tool_use")} if self.has_tool_use else own
        return Tokenizer(hf, self.name)

    def learned(self, messages: Sequence[Message]) -> list[str]:
        """The texts of the turns that are learned, each up to the mark that generation stops at."""
        question = max((number for number, message in enumerate(messages) if message.role == "user"), default=-1)
        turns: list[str] = []
        called = 0
        for number, message in enumerate(messages):
            is_last = number == len(messages) - 1
            if message.role != "assistant" or (self.learns == "last" and not is_last):
                continue
            if message.tool_calls:
                assert self.calls is not None
                calls = [
                    replace(call, id=self.call_id(call, called + at)) for at, call in enumerate(message.tool_calls)
                ]
                called += len(calls)
                answers = [later for later in messages[number:] if later.role == "assistant" and not later.tool_calls]
                turns.append(self._called(message, calls, number > question, answers))
            else:
                follows = None if is_last else messages[number + 1].role
                turns.append(self._spoken(message, is_last, number > question) + self.ends.get(follows, self.end))
        turns[-1] += self.open_end
        return turns

    def _called(
        self, message: Message, calls: Sequence[ToolCall], answers_last: bool, answers: Sequence[Message]
    ) -> str:
        assert self.calls is not None
        thought, content = message.thought, message.content
        before = ""
        if thought and self.thinking is None:
            content = tagged(thought, content)
        elif thought and self.call_thought is not None:
            before = self.call_thought(thought, answers)
        elif thought and answers_last:
            assert self.thinking is not None
            before = self.thinking(thought, "", answers_last)
        return before + self.calls(self.trim(content), calls)

    def _spoken(self, message: Message, is_last: bool, answers_last: bool) -> str:
        if not message.thought:
            return self.plain(self.trim(message.content), is_last, answers_last)
        if self.thinking is None:
            return self.trim(tagged(message.thought, message.content))
        return self.thinking(message.thought, self.trim(message.content), answers_last)


def _file(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


@cache
def _letters() -> Tokenizer:
    texts = ["Hello! I am an assistant. How can I help you today? Привет, чем помочь? system user assistant\n\n" * 20]
    return train_tokenizer(iter(texts), TokenizerTraining(vocab=320))


def _qwen3(thought: str, content: str, answers_last: bool) -> str:
    return f"<think>\n{thought.strip(chr(10))}\n</think>\n\n{content}" if answers_last else content


def _gpt_oss(thought: str, content: str, answers_last: bool) -> str:
    final = f"<|channel|>final<|message|>{content}"
    analysis = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant"
    return analysis + final if answers_last else final


def _json(call: ToolCall) -> str:
    return json.dumps(call.arguments, ensure_ascii=False)


def _object(call: ToolCall, arguments: str = "arguments") -> str:
    return f'{{"name": "{call.name}", "{arguments}": {_json(call)}}}'


def _in_tags(end: str) -> Callable[[str, Sequence[ToolCall]], str]:
    """Calls as Hermes writes them, a line feed between all parts."""

    def written(content: str, calls: Sequence[ToolCall]) -> str:
        tagged_calls = [f"<tool_call>\n{_object(call)}\n</tool_call>" for call in calls]
        return "\n".join([*([content] if content else []), *tagged_calls]) + end

    return written


def _qwen3_5_calls(content: str, calls: Sequence[ToolCall]) -> str:
    written = "\n".join(
        f"<tool_call>\n<function={call.name}>\n"
        + "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in call.arguments.items())
        + "</function>\n</tool_call>"
        for call in calls
    )
    return (f"{content}\n\n" if content else "") + written + "<|im_end|>"


def _glm_calls(content: str, calls: Sequence[ToolCall]) -> str:
    written = "".join(
        f"\n<tool_call>{call.name}"
        + "".join(
            f"\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>" for key, value in call.arguments.items()
        )
        + "\n</tool_call>"
        for call in calls
    )
    return (content + written).lstrip("\n") + "<|observation|>"


def _deepseek_calls(content: str, calls: Sequence[ToolCall]) -> str:
    written = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{call.name}\n```json\n{_json(call)}\n```<｜tool▁call▁end｜>"
        for call in calls
    )
    return f"{content}<｜tool▁calls▁begin｜>{written}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"


def _gpt_oss_calls(content: str, calls: Sequence[ToolCall]) -> str:
    (call,) = calls
    said = f"<|channel|>analysis<|message|>{content}<|end|><|start|>assistant" if content else ""
    return f"{said} to=functions.{call.name}<|channel|>commentary json<|message|>{_json(call)}<|call|>"


def _gemma4_calls(content: str, calls: Sequence[ToolCall]) -> str:
    def value(item: object) -> str:
        return f'<|"|>{item}<|"|>' if isinstance(item, str) else json.dumps(item)

    pairs = (",".join(f"{name}:{value(item)}" for name, item in sorted(call.arguments.items())) for call in calls)
    written = "".join(f"<|tool_call>call:{call.name}{{{arguments}}}<tool_call|>"
                      for call, arguments in zip(calls, pairs, strict=True))  # fmt: skip
    return f"{written}{content}<turn|>"


def _mistral_calls(content: str, calls: Sequence[ToolCall]) -> str:
    return "[TOOL_CALLS][" + ", ".join(f'{_object(call)[:-1]}, "id": "{call.id}"}}' for call in calls) + "]</s>"


def _llama4_calls(content: str, calls: Sequence[ToolCall]) -> str:
    written = "".join(_object(call, "parameters") for call in calls)
    return f"<|python_start|>{content}<|python_end|>{written}<|eot|>"


_GIGACHAT3_END = "<|message_sep|>\n\n"
"""One token, with its line feeds."""


def _gigachat3_calls(content: str, calls: Sequence[ToolCall]) -> str:
    return f"{content}{_GIGACHAT3_END}function call<|role_sep|>\n{_object(calls[0])}{_GIGACHAT3_END}"


def _kimi_calls(content: str, calls: Sequence[ToolCall]) -> str:
    written = "".join(
        f"<|tool_call_begin|>{call.id}<|tool_call_argument_begin|>{_json(call)}<|tool_call_end|>" for call in calls
    )
    return f"{content}<|tool_calls_section_begin|>{written}<|tool_calls_section_end|><|im_end|>"


def _kimi_thought(thought: str, answers: Sequence[Message]) -> str:
    """Left out once an answer follows; one with a thought follows the generation prompt, before which it is kept."""
    return f"<think>{thought}</think>" if not answers or (len(answers) == 1 and answers[0].thought) else ""


_LEFT_OUT = dict.fromkeys(("spoken call", "call thoughts"), "omits what the assistant says")
_UNTHOUGHT = "what the assistant thinks"
_ONE_CALL = {"parallel": "omits or repeats tool calls"}
_ALTERNATE = {"questions": "must alternate", "answers": "must alternate", "first": "must alternate"}
_CHATML = ("<|im_start|>",)
_LLAMA_3 = ("<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|python_tag|>", "<|end_of_text|>")
_DEEPSEEK = ("<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>",
             "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁output▁begin｜>",
             "<｜tool▁output▁end｜>", "<｜tool▁outputs▁end｜>")  # fmt: skip
_MISTRAL = ("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
            "[/TOOL_RESULTS]", "[TOOL_CONTENT]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]")  # fmt: skip
_GRANITE = ("<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>")
_KIMI = ("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|tool_calls_section_begin|>",
         "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
         "<|tool_calls_section_end|>")  # fmt: skip

FAMILIES = {family.name: family for family in (
    Family("llama3", "<|eot_id|>", _LLAMA_3, begin="<|begin_of_text|>", trim=str.strip,
           calls=lambda _, calls: _object(calls[0], "parameters") + "<|eot_id|>",
           refuses=_LEFT_OUT | {"parallel": "only supports single tool-calls"}),
    Family("llama4", "<|eot|>", ("<|header_start|>", "<|header_end|>", "<|python_start|>", "<|python_end|>"),
           begin="<|begin_of_text|>", calls=_llama4_calls),
    Family("qwen2_5", "<|im_end|>", _CHATML, calls=_in_tags("<|im_end|>")),
    Family("qwen3", "<|im_end|>", _CHATML, trim=as_is, thinking=_qwen3,
           plain=lambda content, last, _: without_line_feeds(content) if last else content,
           calls=_in_tags("<|im_end|>")),
    Family("qwen3_nothink", "<|im_end|>", _CHATML,
           thinking=lambda thought, content, last: _qwen3(thought, content, last).removeprefix("<think>\n"),
           plain=lambda content, last, _: without_line_feeds(content) if last else content,
           calls=_in_tags("<|im_end|>")),
    Family("qwen3_5", "<|im_end|>", _CHATML, trim=str.strip,
           thinking=lambda thought, content, last: f"{thought.strip()}\n</think>\n\n{content}" if last else content,
           calls=_qwen3_5_calls),
    Family("gemma3", "<end_of_turn>", ("<start_of_turn>",), begin="<bos>", end_token="<eos>", trim=str.strip,
           refuses=_ALTERNATE),
    Family("gemma4", "<turn|>", ("<|turn>", "<|channel>", "<channel|>", "<|tool>", "<tool|>", "<|tool_call>",
           "<tool_call|>"), begin="<bos>", end_token="<eos>", trim=str.strip, calls=_gemma4_calls),
    Family("mistral_nemo", "</s>", _MISTRAL, begin="<s>", refuses=_ALTERNATE | _LEFT_OUT, calls=_mistral_calls),
    Family("mistral_small", "</s>", _MISTRAL, begin="<s>", refuses=_ALTERNATE | _LEFT_OUT, calls=_mistral_calls),
    Family("phi4", "<|im_end|>", ("<|im_start|>", "<|im_sep|>")),
    Family("phi4_first", "<|im_end|>", ("<|im_start|>", "<|im_sep|>"),
           refuses={"first": "does not support a conversation that begins with the assistant"}),
    Family("phi4_mini", "<|end|>", ("<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "<|/tool|>"),
           end_token="<|endoftext|>"),
    Family("glm4_5", "<|user|>", ("[gMASK]", "<sop>", "<|system|>", "<|assistant|>", "<|observation|>"),
           end_token="<|endoftext|>", trim=str.strip, ends={"assistant": ""},
           plain=lambda content, *_: content,  # after the tags of an empty thought, which are not learned
           thinking=lambda thought, content, last:
           f"\n<think>{thought.strip()}</think>\n{content}" if last else content, calls=_glm_calls),
    Family("deepseek_v3", "<｜end▁of▁sentence｜>", _DEEPSEEK, begin="<｜begin▁of▁sentence｜>",
           calls=_deepseek_calls, describes=False),
    Family("deepseek_r1", "<｜end▁of▁sentence｜>", _DEEPSEEK, begin="<｜begin▁of▁sentence｜>",
           thinking=lambda thought, content, last: f"{thought}\n</think>\n\n{content}" if last else content,
           calls=_deepseek_calls, call_thought=lambda *_: "", describes=False, refuses={"call thoughts": _UNTHOUGHT}),
    Family("gpt_oss", "<|return|>", ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>"),
           ends={"user": "", "assistant": ""}, thinking=_gpt_oss,
           plain=lambda content, *_: f"<|channel|>final<|message|>{content}", calls=_gpt_oss_calls,
           call_thought=lambda thought, answers: "" if answers else
           f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant",
           refuses=_ONE_CALL | _LEFT_OUT | {"call thoughts": "Cannot pass both content and thinking"}),
    Family("granite3", "<|end_of_text|>", _GRANITE,
           calls=lambda _, calls: f"<|tool_call|>[{', '.join(map(_object, calls))}]<|end_of_text|>", refuses=_LEFT_OUT),
    Family("granite4", "<|end_of_text|>", _GRANITE, calls=_in_tags("<|end_of_text|>")),
    Family("smollm3", "<|im_end|>", _CHATML, trim=without_line_feeds),
    Family("gigachat", "<|message_sep|>", ("<|role_sep|>",), begin="<s>", end_token="</s>", refuses=_ALTERNATE),
    Family("gigachat3", _GIGACHAT3_END, ("<|role_sep|>\n",), begin="<s>", end_token="</s>", open_end="</s>",
           calls=_gigachat3_calls, refuses=_ONE_CALL),
    Family("yandexgpt5", "</s>", ("[SEP]",), begin="<s>", learns="last",
           refuses={"system": "omits what the system says", "answers": "omits what the assistant says",
                    "thought": _UNTHOUGHT, "thoughts": _UNTHOUGHT}),
    Family("saiga_llama3", "<|eot_id|>", _LLAMA_3, begin="<|begin_of_text|>", trim=str.strip),
    Family("saiga_mistral", "</s>", begin="<s>"),
    Family("command_r", "<|END_OF_TURN_TOKEN|>", ("<|START_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>",
           "<|SYSTEM_TOKEN|>"), begin="<BOS_TOKEN>", trim=str.strip, refuses=_ALTERNATE),
    Family("olmo2", "<|endoftext|>", begin="<|endoftext|>"),
    Family("falcon3", "<|endoftext|>", ("<|user|>", "<|assistant|>", "<|system|>")),
    Family("kimi_k2", "<|im_end|>", _KIMI, calls=_kimi_calls,
           call_id=lambda call, number: f"functions.{call.name}:{number}"),
    Family("kimi_k2_thinking", "<|im_end|>", _KIMI, calls=_kimi_calls,
           call_id=lambda call, number: f"functions.{call.name}:{number}",
           thinking=lambda thought, content, last: f"<think>{thought}</think>{content}" if last else content,
           call_thought=_kimi_thought),
    Family("hermes2_pro", "<|im_end|>", _CHATML, begin="<s>", has_tool_use=True,
           calls=lambda _, calls: _in_tags("<|im_end|>")("", calls), refuses=_LEFT_OUT),
)}  # fmt: skip
