"""Chat templates: choosing one, rendering messages, and finding the ends of an answer.

A template is a Jinja program that turns messages into one text. transformers' renderer runs it (sandboxed, with the
tokenizer's special tokens as variables), so that a conversation is the same as in other tools.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from os.path import commonprefix
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError

from artel.errors import InputError
from artel.storage.locations import user_path
from artel.storage.regular_files import describe_file_type
from artel.tokens.tokenizer.template_limits import TRIAL_SECONDS, TemplateTimeout, check_limits, run_with_deadline
from artel.tokens.tokenizer.tokenizer import Tokenizer

# Functions and calls in the format of Hermes, which Qwen and many others use, with the wording of Qwen 2.5:
# https://github.com/NousResearch/Hermes-Function-Calling
_TOOLS = (
    "{%- macro functions() -%}"
    "{{ '# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with "
    "function signatures within <tools></tools> XML tags:\n<tools>' }}"
    "{% for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}"
    "{{ '\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
    "</tool_call>' }}"
    "{%- endmacro -%}"
    "{%- macro said(message) -%}"
    "{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '\n' if not loop.first or message['content'] and not message['content'].endswith('</think>\n\n') else '' }}"
    "{{ '<tool_call>\n{\"name\": \"' + call['function']['name'] + '\", \"arguments\": ' }}"
    "{{ call['function']['arguments'] if call['function']['arguments'] is string else "
    "call['function']['arguments'] | tojson }}"
    "{{ '}\n</tool_call>' }}"
    "{% endfor %}"
    "{%- endmacro -%}"
    "{%- macro returned(message) -%}"
    "{{ '<tool_response>\n' + (message['content'] or '') + '\n</tool_response>' }}"
    "{%- endmacro -%}"
)
# https://github.com/openai/openai-python/blob/v0.28.1/chatml.md, in the form used by most open models.
CHATML = _TOOLS + (
    "{% if tools and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\n' + functions() + '<|im_end|>' + '\n' }}"
    "{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'tool' %}{{ returned(message) }}"
    "{% elif message['role'] == 'system' and tools %}{{ message['content'] + '\n\n' + functions() }}"
    "{% else %}{{ said(message) }}{% endif %}"
    "{{ '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
# For tokenizers without a template and without ChatML's tokens (GPT-2, ruGPT): plain words, and the end token after an
# answer. There each ChatML marker would be six or more tokens.
PLAIN = _TOOLS + (
    "{% if tools and messages[0]['role'] != 'system' %}{{ 'System: ' + functions() + '\n' }}{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ 'Assistant: ' + said(message) + (eos_token or '') + '\n' }}"
    "{% elif message['role'] == 'user' %}{{ 'User: ' + message['content'] + '\n' }}"
    "{% elif message['role'] == 'tool' %}{{ 'Tool: ' + returned(message) + '\n' }}"
    "{% elif message['role'] == 'system' and tools %}"
    "{{ 'System: ' + message['content'] + '\n\n' + functions() + '\n' }}"
    "{% else %}{{ message['role'].capitalize() + ': ' + message['content'] + '\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)


class TemplateRejection(Exception):
    """A template rejects these messages (`raise_exception`), or fails on them."""


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """The ends of an answer: token ids, and texts if the template's markers are not tokens."""

    ids: frozenset[int]
    texts: tuple[str, ...] = ()


TEMPLATE_NAMES = ("auto", "chatml", "plain")
_KEY = "chat.template"
_MAX_FILE_BYTES = 2**20
"""Bytes. Templates of published models have at most 30,000."""


def resolve_template(tokenizer: Tokenizer, setting: str) -> str:
    """Return the template for the setting `chat.template`: auto, chatml, plain, or a Jinja file.

    auto is the tokenizer's template (if it has several: the one for tool use when there are tools). Without one it is
    chatml if the tokenizer has ChatML's tokens, else plain. Raise InputError if the file is missing or not Jinja.
    """
    if setting in ("chatml", "plain"):
        return CHATML if setting == "chatml" else PLAIN
    return _tokenizer_template(tokenizer) if setting == "auto" else read_template(setting)


def read_template(file: str, *, trial_seconds: int = TRIAL_SECONDS) -> str:
    """Read the Jinja template in a file. Raise InputError if it is missing or not Jinja."""
    fix = "write auto, chatml, plain, or the path of a Jinja file"
    try:
        path = user_path(file, _KEY)
        status = path.stat()
        if kind := describe_file_type(status.st_mode):
            raise InputError.at(_KEY, f"{file} is {kind}, not a regular file", fix)
        if status.st_size > _MAX_FILE_BYTES:
            what = f"{file} has {status.st_size:,} bytes, more than the {_MAX_FILE_BYTES:,} of any template"
            raise InputError.at(_KEY, what, fix)
        template = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError.at(_KEY, f"{file} cannot be read: {error.strerror}", fix) from None
    except UnicodeDecodeError as error:
        what = f"{file} is not UTF-8 (byte {error.start})"
        raise InputError.at(_KEY, what, "save it as UTF-8") from None
    _check_template(template, file, trial_seconds)
    return template


def render(
    tokenizer: Tokenizer,
    template: str,
    messages: list[dict[str, Any]],
    add_generation_prompt: bool,
    tools: list[dict[str, Any]] | None = None,
) -> str:
    """Render messages to one text, with functions that the model may call.

    Raise TemplateRejection if the template rejects them, InputError if it cannot be run.
    """
    try:
        return run_with_deadline(
            lambda: tokenizer.hf.apply_chat_template(
                messages,
                tools=tools,
                chat_template=template,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        )
    except TemplateTimeout:
        raise InputError.at("chat.template", "does not end for a conversation", "write chatml") from None
    except Exception as error:  # also Python's errors in a template: a missing key, a string plus None
        raise TemplateRejection(str(error) or type(error).__name__) from None


def inserts_date(tokenizer: Tokenizer, template: str) -> bool:
    """True if the template inserts today's date into a conversation (`strftime_now`), like those of Llama 3."""
    if "strftime_now" not in template:
        return False
    marked = "{%- macro strftime_now(form) -%}" + _QUESTION_MARK + "{%- endmacro -%}" + template
    user = {"role": "user", "content": "a"}
    for messages in ([user], [{"role": "system", "content": "a"}, user]):
        with suppress(TemplateRejection):
            if _QUESTION_MARK in render(tokenizer, marked, messages, False):
                return True
    return False


def prompt_ids(
    tokenizer: Tokenizer, template: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None
) -> list[int]:
    """Return the ids of messages and generation prompt. Raise TemplateRejection if the template rejects them.

    The text is encoded in one piece, as in training, and control tokens of the template become tokens. Control tokens
    typed in a message stay text: before rendering, a mark is inserted into each of them, and the text is split there
    and encoded separately. So their letters stay letters (with a space, if the tokenizer starts every text with one).
    If the template's markers are plain letters for the tokenizer, typed ones look the same. Answers of the model are
    encoded as generated: they may contain ordinary added tokens (<think>) but no special ones.
    """
    special = tokenizer.control_tokens
    in_template = {content for content in added_tokens(tokenizer) if content in template}
    # The mark must not occur anywhere: a private-use character, of which fonts and icons use a few.
    used_characters = {*template, *json.dumps([messages, tools], ensure_ascii=False)}
    mark = next((chr(code) for code in range(0xE000, 0xF900) if chr(code) not in used_characters), None)
    if mark is None:
        raise TemplateRejection("the messages have every private-use character of Unicode (U+E000 to U+F8FF)")

    def protect(value: Any, tokens: set[str]) -> Any:
        if isinstance(value, str):
            return _insert_marks(value, tokens, mark)
        if isinstance(value, list):
            return [protect(item, tokens) for item in value]
        if isinstance(value, dict):
            return {protect(name, tokens): protect(item, tokens) for name, item in value.items()}
        return value

    safe_messages = [
        {
            name: text
            if name == "role"
            else protect(text, {*special} if message["role"] == "assistant" else {*special, *in_template})
            for name, text in message.items()
        }
        for message in messages
    ]
    safe_tools = protect(tools, {*special, *in_template})
    pieces = render(tokenizer, template, safe_messages, True, safe_tools).split(mark)
    return tokenizer.encode_control([piece for piece in pieces if piece])


def turn_end(tokenizer: Tokenizer, template: str) -> TurnEnd:
    """Return the ends of an answer: the tokenizer's end token, and the text of the template directly after an answer.

    Renders a conversation whose contents are marks. An added token after the answer's mark ends an answer by its id
    (<|im_end|>, <|eot_id|>, <end_of_turn>). Otherwise the following text does: `<|im_end|>` in letters, or the heading
    of the next turn. The end of the conversation decides: gpt-oss ends the last answer with <|return|>, while the
    <|end|> of earlier answers also ends its thoughts. If nothing follows there, the start of the next turn ends an
    answer (GLM's <|user|>). A token after which an answer may continue with a call is not an end: GigaChat 3 writes
    <|message_sep|> there, and ends an answer with the end token.
    """
    added = added_tokens(tokenizer)
    ids, texts = {tokenizer.end_id}, []
    for tail in _texts_after_answer(tokenizer, template):
        suffix = tail.lstrip()
        token = max((content for content in added if suffix.startswith(content)), key=len, default=None)
        if token is not None:
            ids.add(added[token])
        elif suffix:
            texts.append(_first_line(tail, list(added)))
        if suffix:
            break
    ids |= _call_end_ids(tokenizer, template)
    ids -= {added[token] for token in markers_before_calls(tokenizer, template)}
    return TurnEnd(frozenset({tokenizer.end_id, *ids}), tuple(dict.fromkeys(texts)))


def markers_before_calls(tokenizer: Tokenizer, template: str) -> set[str]:
    """Return the added tokens between the text of an answer and its calls, if both are in one turn."""
    conversation: list[dict[str, Any]] = [
        {"role": "user", "content": _QUESTION_MARK},
        {"role": "assistant", "content": _TEXT_MARK, "tool_calls": [_CALL]},
    ]
    try:
        text = render(tokenizer, template, conversation, False)
        question, prompt = (render(tokenizer, template, conversation[:1], add_prompt) for add_prompt in (False, True))
    except TemplateRejection:
        return set()
    between, calls, _ = text.partition(_TEXT_MARK)[2].partition(_ANSWER_MARK)
    heading = prompt.removeprefix(question).strip()
    if heading and heading in between:
        return set()  # the call is a separate turn, and the tokens before it end the first one
    return {token for token in added_tokens(tokenizer) if calls and token in between}


def added_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the ids of added tokens by text, without the white space that some tokenizers add."""
    added = tokenizer.hf.added_tokens_decoder
    return {token.content: token_id for token_id, token in added.items() if token.content.strip()}


def _tokenizer_template(tokenizer: Tokenizer) -> str:
    hf_template = tokenizer.hf.chat_template
    # Some tokenizers have several templates, by purpose: tool use, documents.
    templates = hf_template if isinstance(hf_template, dict) else {"default": hf_template}
    if "default" not in templates:
        what = f"the tokenizer has the templates {', '.join(templates)}, but none is the default"
        raise InputError.at(_KEY, what, "write chatml, or the path of a Jinja file")
    default = templates["default"] or (CHATML if set(CHATML_TOKENS) <= added_tokens(tokenizer).keys() else PLAIN)
    _check_tokenizer_template(default, "the tokenizer's chat template")
    if "tool_use" not in templates:
        return str(default)
    _check_tokenizer_template(templates["tool_use"], "the tokenizer's chat template for tools (tool_use)")
    return _combine_templates(default, templates["tool_use"])


def _check_tokenizer_template(template: Any, name: str) -> None:
    if not isinstance(template, str):
        raise InputError.at(_KEY, f"{name} is {str(template)[:100]}, not a text", "write chatml")
    _check_template(template, name)


def _combine_templates(default: str, tool_use: str) -> str:
    """Combine two templates: `tool_use` if there are tools, as transformers chooses, else `default`.

    `tool_use` also renders conversations that have calls without tools, since `default` omits calls. `default` comes
    first so that its line numbers stay. The plus signs keep Jinja from stripping white space of the two templates.
    """
    default, tool_use = (re.sub(r"(\r\n|\r|\n)\Z", "", template) for template in (default, tool_use))
    is_plain = "not (tools or messages | selectattr('tool_calls') | list)"
    return f"{{% if {is_plain} +%}}{default}{{%+ else %}}{{% set tools = tools or [] +%}}{tool_use}{{%+ endif %}}"


_LONG_CONTENT = "word " * 400
"""A content that reveals if the output grows faster than the input."""


def _check_template(template: str, name: str, seconds: int = TRIAL_SECONDS) -> None:
    """Raise InputError if the template is not Jinja or exceeds its limits. Ignore refused messages."""
    from transformers.utils.chat_template_utils import render_jinja_template

    def write() -> str:
        texts = []
        for content in ("a", _LONG_CONTENT):
            turns = [{"role": role, "content": content} for role in ("user", "assistant", "user")]
            for messages in (turns[:1], turns, [{"role": "system", "content": content}, *turns]):
                with suppress(TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError):
                    texts += render_jinja_template([messages], chat_template=template, add_generation_prompt=True)[0]
        return max(texts, key=len, default="")

    if template.encode(errors="replace").decode() != template:
        raise InputError.at(_KEY, f"{name} contains half a character", "fix it, or write chatml")
    if template not in (CHATML, PLAIN):
        check_limits(write, _KEY, name, seconds)
    try:
        render_jinja_template([[{"role": "user", "content": "a"}]], chat_template=template)
    except TemplateSyntaxError as error:
        what = f"{name}:{error.lineno}: {error.message}"
        raise InputError.at(_KEY, what, "fix it, or write chatml") from None
    except Exception:
        pass


def _insert_marks(text: str, tokens: set[str], mark: str) -> str:
    """Insert a mark after the first character of each token in `text`, except tokens of one character."""
    breakable = frozenset(token for token in tokens if len(token) > 1)
    pattern = _token_pattern(breakable)
    # Continue inside the token: another one may start there and survive the mark.
    pieces, position = [], 0
    while breakable and (match := pattern.search(text, position)):
        pieces.append(text[position : match.start() + 1])
        position = match.start() + 1
    return mark.join([*pieces, text[position:]])


@lru_cache(8)
def _token_pattern(tokens: frozenset[str]) -> re.Pattern[str]:
    """Return a pattern for the tokens, grouped by prefix: Gemma's 6,400 are not tried one by one at each `<`."""

    def group_pattern(group: set[str]) -> str:
        prefix = commonprefix([*group])  # noqa: RUF071 (by characters)
        suffixes = {token[len(prefix) :] for token in group}
        if "" in suffixes:  # a token ends here, so longer ones do not matter
            return re.escape(prefix)
        first: dict[str, set[str]] = {}
        for token in suffixes:
            first.setdefault(token[0], set()).add(token)
        return f"{re.escape(prefix)}(?:{'|'.join(map(group_pattern, first.values()))})"

    return re.compile(group_pattern({*tokens}) if tokens else "(?!)")


# Marks for the contents of messages: a question, an answer or argument, the next message, text before a call.
_QUESTION_MARK, _ANSWER_MARK, _NEXT_MARK, _TEXT_MARK = "\ue000", "\ue001", "\ue002", "\ue003"
_CALL = {"id": "callcall1", "type": "function", "function": {"name": "f", "arguments": {"a": _ANSWER_MARK}}}


def _texts_after_answer(tokenizer: Tokenizer, template: str) -> Iterator[str]:
    """Yield the text that the template writes after an answer, first at the end of a conversation, then inside one."""
    contents = (("user", _QUESTION_MARK), ("assistant", _ANSWER_MARK), ("user", _NEXT_MARK))
    conversation = [{"role": role, "content": content} for role, content in contents]
    for length in (2, 3):
        try:
            text = render(tokenizer, template, conversation[:length], False)
        except TemplateRejection:
            continue
        if _ANSWER_MARK not in text:
            return  # the template omits a last answer: the end token ends it
        yield text.rpartition(_ANSWER_MARK)[2].partition(_NEXT_MARK)[0]


def _call_end_ids(tokenizer: Tokenizer, template: str) -> set[int]:
    """Return the token that ends a turn with a call (gpt-oss's <|call|>, GLM's <|observation|>), if there are calls."""
    control = tokenizer.control_tokens
    conversation: list[dict[str, Any]] = [
        {"role": "user", "content": _QUESTION_MARK},
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        {"role": "tool", "content": _NEXT_MARK, "tool_call_id": "callcall1", "name": "f"},
    ]
    for length in (2, 3):
        with suppress(TemplateRejection):
            text = render(tokenizer, template, conversation[:length], False)
            tail = text.partition(_ANSWER_MARK)[2].partition(_NEXT_MARK)[0]
            marks = sorted((tail.find(token), token) for token in control if token in tail)
            if marks:  # the last one at the end of a conversation, the first one inside
                return {int(tokenizer.hf.convert_tokens_to_ids(marks[-1 if length == 2 else 0][1]))}
    return set()


def _first_line(tail: str, added: list[str]) -> str:
    """Return the first line of text after an answer, up to a token; or only a marker in brackets."""
    first = min((position for token in added if (position := tail.find(token)) >= 0), default=len(tail))
    text = tail[:first]
    bracketed = re.match(r"\s*(<[^<>\s]+>|\[[^\[\]\s]+\])", text)
    if bracketed:
        return bracketed[1]
    space = text[: len(text) - len(text.lstrip())]
    # Including preceding line feeds: an answer may contain `User:`, but no line that starts with it.
    return space + text.lstrip().partition("\n")[0].rstrip()
