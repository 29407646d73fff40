"""Conversations as a chat template writes them: which template, what it makes of messages, what ends an answer.

A template is a program in Jinja that turns messages into one text. It is run by transformers' own renderer (sandboxed,
with the tokenizer's special tokens as variables), so that a conversation reads here as it does everywhere else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from jinja2 import TemplateError, TemplateSyntaxError

from artel.errors import InputError
from artel.storage.locations import user_path
from artel.storage.regular_files import special_kind
from artel.tokens.tokenizer.template_limits import TRIAL_SECONDS, EndlessTemplate, in_time, try_template
from artel.tokens.tokenizer.tokenizer import Tokenizer

# https://github.com/openai/openai-python/blob/v0.28.1/chatml.md, as most open models write it.
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
# For tokenizers without a template of their own or chatml's tokens (GPT-2, ruGPT): plain words, and the end token after
# an answer. ChatML's marks would be six or more tokens of letters each there.
PLAIN = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ 'Assistant: ' + message['content'] + eos_token + '\n' }}"
    "{% elif message['role'] == 'user' %}{{ 'User: ' + message['content'] + '\n' }}"
    "{% else %}{{ message['role'].capitalize() + ': ' + message['content'] + '\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)


class TemplateRefuses(Exception):
    """A template that cannot write these messages, by its own word (`raise_exception`) or because it fails on them."""


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """What ends an answer: tokens, and texts where the template's marks are no tokens of the tokenizer."""

    ids: frozenset[int]
    texts: tuple[str, ...] = ()


NAMED = ("auto", "chatml", "plain")
_LARGEST_FILE = 2**20
"""Bytes; those of models have 30,000 at most."""


def template_of(tokenizer: Tokenizer, wanted: str, where: str = "chat.template") -> str:
    """The template that `chat.template` names: auto, chatml, plain, or a Jinja file.

    auto is the tokenizer's own; without one chatml where the tokenizer has its tokens, else plain.

    Raises InputError when the file is missing or what it holds is no Jinja.
    """
    if wanted in ("chatml", "plain"):
        return CHATML if wanted == "chatml" else PLAIN
    if wanted == "auto":
        template = _own(tokenizer, where)
        _check(template, where, "the tokenizer's chat template")
        return template
    return read_template(wanted, where)


def read_template(file: str, where: str = "chat.template", *, trial_seconds: int = TRIAL_SECONDS) -> str:
    """The Jinja template in a file. Raises InputError when the file is missing or what it holds is no Jinja."""
    fix = "write auto, chatml, plain, or the path of a Jinja file"
    try:
        path = user_path(file, where)
        status = path.stat()
        if kind := special_kind(status.st_mode):
            raise InputError.at(where, f"{file} is {kind}, not a regular file", fix)
        if status.st_size > _LARGEST_FILE:
            what = f"{file} has {status.st_size:,} bytes, more than the {_LARGEST_FILE:,} of any template"
            raise InputError.at(where, what, fix)
        template = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError.at(where, f"{file} cannot be read: {error.strerror}", fix) from None
    except UnicodeDecodeError as error:
        what = f"{file} is not UTF-8 (byte {error.start})"
        raise InputError.at(where, what, "save it as UTF-8") from None
    _check(template, where, file, trial_seconds)
    return template


def render(tokenizer: Tokenizer, template: str, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
    """The messages as one text, with the opening of an answer where it is asked for. Raises TemplateRefuses."""
    try:
        return in_time(
            lambda: tokenizer.hf.apply_chat_template(
                messages, chat_template=template, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        )
    except EndlessTemplate:
        raise InputError.at("chat.template", "does not end for a conversation", "write chatml") from None
    # What templates compute with messages fails in Python's own ways too: a missing key, text added to nothing.
    except Exception as error:
        raise TemplateRefuses(str(error) or type(error).__name__) from None


def prompt_ids(tokenizer: Tokenizer, template: str, messages: list[dict[str, str]]) -> list[int]:
    """Ids of the messages and of the opening of an answer to them. Raises TemplateRefuses.

    The text is encoded in one piece, as in training, and what the template writes becomes control tokens. What people
    write never does: a control token in a message is broken by a mark before the template sees it, and the text is
    encoded apart on both sides of the mark, so its letters stay letters (a tokenizer that begins every text with a
    space has one there). Where the template's own marks are letters to the tokenizer, typed ones cannot be told from
    them. An answer of the model goes back as it was
    written: it may hold the ordinary added tokens that it used (<think>), no special ones, which it can only have
    spelled.
    """
    special = tokenizer.control_tokens
    written = {content for content in _added_tokens(tokenizer) if content in template}
    # A mark that occurs nowhere else: of Unicode's private use, where fonts and icons take a few, never all.
    taken = {*template, *(letter for message in messages for text in message.values() for letter in text)}
    mark = next(chr(code) for code in range(0xE000, 0xF900) if chr(code) not in taken)
    guarded = [
        {
            name: _broken(text, special if message["role"] == "assistant" else {*special, *written}, mark)
            if name != "role" else text
            for name, text in message.items()
        }
        for message in messages
    ]  # fmt: skip
    pieces = render(tokenizer, template, guarded, True).split(mark)
    encoded = tokenizer.encode_with_places([piece for piece in pieces if piece], control=True)
    return [token for part in encoded for token in part.ids.tolist()]


def turn_end(tokenizer: Tokenizer, template: str) -> TurnEnd:
    """What ends an answer: the tokenizer's end token, and what the template writes right after one.

    The template is asked: it writes a conversation with marks for contents. Added tokens that follow the answer's mark
    are told by id (<|im_end|>, <|eot_id|>, <end_of_turn>); where the tokenizer lacks them, or the template has none,
    the text that follows ends an answer: `<|im_end|>` in letters, or the next turn's heading.
    """
    added = _added_tokens(tokenizer)
    ids, texts = {tokenizer.end_id}, []
    for tail in _tails(tokenizer, template):
        follows = tail.lstrip()
        token = max((content for content in added if follows.startswith(content)), key=len, default=None)
        if token is not None:
            ids.add(added[token])
        elif follows:
            texts.append(_heading(tail, list(added)))
    return TurnEnd(frozenset(ids), tuple(dict.fromkeys(texts)))


def _own(tokenizer: Tokenizer, where: str) -> str:
    own = tokenizer.hf.chat_template
    if isinstance(own, dict):  # several, by purpose: tool use, documents
        if "default" not in own:
            what = f"the tokenizer has the templates {', '.join(own)}, and none is the default"
            raise InputError.at(where, what, "write chatml, or the path of a Jinja file")
        own = own["default"]
    if own and not isinstance(own, str):
        raise InputError.at(where, f"the tokenizer's chat template is {str(own)[:100]}, no text", "write chatml")
    if own:
        return own
    return CHATML if set(CHATML_TOKENS) <= _added_tokens(tokenizer).keys() else PLAIN


# Growth that depends on the contents shows with it.
_LONGER = "word " * 400


def _check(template: str, where: str, name: str, seconds: int = TRIAL_SECONDS) -> None:
    """Raise InputError when the template is no Jinja, or has no measure; that it takes messages is another matter."""
    from transformers.utils.chat_template_utils import render_jinja_template

    def write() -> str:
        texts = []
        for content in ("a", _LONGER):
            turns = [{"role": role, "content": content} for role in ("user", "assistant", "user")]
            for messages in (turns[:1], turns, [{"role": "system", "content": content}, *turns]):
                with suppress(TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError):
                    texts += render_jinja_template([messages], chat_template=template, add_generation_prompt=True)[0]
        return max(texts, key=len, default="")

    if template.encode(errors="replace").decode() != template:
        raise InputError.at(where, f"{name} holds half a character", "mend it, or write chatml")
    if template not in (CHATML, PLAIN):
        try_template(write, where, name, seconds)
    try:
        render_jinja_template([[{"role": "user", "content": "a"}]], chat_template=template)
    except TemplateSyntaxError as error:
        what = f"{name}:{error.lineno}: {error.message}"
        raise InputError.at(where, what, "mend it, or write chatml") from None
    except Exception:
        pass


def _added_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Tokens beside the vocabulary proper, by text. Some tokenizers hold runs of white space so: these mean nothing."""
    added = tokenizer.hf.added_tokens_decoder
    return {token.content: number for number, token in added.items() if token.content.strip()}


def _broken(text: str, tokens: set[str] | list[str], mark: str) -> str:
    """`text` with a mark after the first character of each token in it; a token of one character has no inside."""
    wanted = sorted((token for token in tokens if len(token) > 1), key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, wanted)))
    # Looked for anew each time: one token may begin inside another, and still stand when that is broken.
    at = 0
    while wanted and (found := pattern.search(text, at)):
        at = found.start() + 1
        text = text[:at] + mark + text[at:]
    return text


_ASKED, _ANSWERED, _NEXT = "\ue000", "\ue001", "\ue002"


def _tails(tokenizer: Tokenizer, template: str) -> Iterator[str]:
    """What the template writes after an answer: where the conversation ends with it, and where it goes on."""
    contents = (("user", _ASKED), ("assistant", _ANSWERED), ("user", _NEXT))
    conversation = [{"role": role, "content": content} for role, content in contents]
    for length in (2, 3):
        try:
            text = render(tokenizer, template, conversation[:length], False)
        except TemplateRefuses:
            continue
        yield text.rpartition(_ANSWERED)[2].partition(_NEXT)[0] if _ANSWERED in text else ""


def _heading(tail: str, added: list[str]) -> str:
    """The first line of letters that follow an answer, up to a token; of a mark in brackets, the mark alone."""
    first = min((at for token in added if (at := tail.find(token)) >= 0), default=len(tail))
    text = tail[:first]
    bracketed = re.match(r"\s*(<[^<>\s]+>|\[[^\[\]\s]+\])", text)
    if bracketed:
        return bracketed[1]
    space = text[: len(text) - len(text.lstrip())]
    # The line feeds before it belong to it: `User:` may well stand within an answer, a line that begins so not.
    return space + text.lstrip().partition("\n")[0].rstrip()
