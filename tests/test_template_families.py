"""The templates of the families that people use most: exactly the assistant's turns are learned, whatever is said."""

import re
from pathlib import Path

import pytest
from tokenizers import AddedToken
from transformers import GPT2Tokenizer, LlamaTokenizer

from artel.config import RunConfig
from artel.errors import InputError
from artel.objectives import Chat, DocumentSamples
from artel.objectives.preference import PreferenceOptimization
from artel.text import Conversation, Document, Message, Preference, Record, Rejected, ToolCall
from artel.text.tool_calls import read_calls
from artel.tokens import Tokenizer
from artel.tokens.tokenizer.chat_template import prompt_ids, render, resolve_template, turn_end
from support.chat_models import trained_tokenizer
from support.chat_templates import FAMILIES
from support.tokenizer_families import bytewise, gemma, llama_2, mistral, sentencepiece

SYSTEM, USER, ASSISTANT = "system", "user", "assistant"
KINDS = {
    "one": [(USER, "Hi"), (ASSISTANT, "Hello!")],
    "system": [(SYSTEM, "Be brief."), (USER, "Hi"), (ASSISTANT, "Hello!"), (USER, "More?"), (ASSISTANT, "No.")],
    "many": [(USER, "a"), (ASSISTANT, "One."), (USER, "b"), (ASSISTANT, "Two!"), (USER, "c"), (ASSISTANT, "3")],
    "first": [(ASSISTANT, "Welcome."), (USER, "a"), (ASSISTANT, "One.")],
    "thought": [(USER, "a"), (ASSISTANT, "One.", "I think.")],
    "thoughts": [(USER, "a"), (ASSISTANT, "One.", "First."), (USER, "b"), (ASSISTANT, "Two.", "Second.")],
    "thought before": [(USER, "a"), (ASSISTANT, "One.", "First."), (USER, "b"), (ASSISTANT, "Two.")],
    "questions": [(USER, "a"), (USER, "b"), (ASSISTANT, "One.")],
    "answers": [(USER, "a"), (ASSISTANT, "One."), (ASSISTANT, "Two.")],
    "spaces": [(USER, "\n a \n"), (ASSISTANT, "\n\n  One.\n "), (USER, " b"), (ASSISTANT, "\n Two \n\n")],
    "russian": [(USER, "Привет! Как дела?"), (ASSISTANT, "Хорошо, а у вас?")],
    "code": [(USER, "<b>[x]</b> {{ y }}"), (ASSISTANT, "```py\nassistant: user\n{% z %} <|x|>\n```")],
}  # fmt: skip

WEATHER = {"type": "function", "function": {"name": "weather", "description": "The weather of a city.", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}}  # fmt: skip
PARIS, ROME = (ToolCall("weather", {"city": city, "days": days}, f"abcdefgh{days}") for city, days in
               (("Париж", 1), ("Rome", 2)))  # fmt: skip


def calling(content, *calls, thought=""):
    """A turn that calls, and what the tools return."""
    results = [Message("tool", f"{number + 18}C", tool_call_id=call.id) for number, call in enumerate(calls)]
    return [Message(ASSISTANT, content, thought, tool_calls=calls), *results]


ASKED = Message(USER, "How warm is it?")
TOOL_KINDS = {
    "call": [ASKED, *calling("", PARIS), Message(ASSISTANT, "Warm.")],
    "spoken call": [ASKED, *calling("Let me see.", PARIS), Message(ASSISTANT, "Warm.")],
    "parallel": [ASKED, *calling("", PARIS, ROME), Message(ASSISTANT, "Warm.")],
    "last call": [ASKED, *calling("", ROME)[:1]],
    "later": [ASKED, *calling("", PARIS), Message(ASSISTANT, "Warm."), ASKED, Message(ASSISTANT, "Still.")],
    "call thought": [ASKED, *calling("", PARIS, thought="I look."), Message(ASSISTANT, "Warm.")],
    "call thoughts": [ASKED, *calling("Let me see.", PARIS, thought="I look."), Message(ASSISTANT, "Warm.", "So.")],
    "last call thought": [ASKED, *calling("", ROME, thought="I look.")[:1]],
    "later thoughts": [ASKED, *calling("", PARIS, thought="I look."), Message(ASSISTANT, "Warm.", "So."),
                       ASKED, Message(ASSISTANT, "Still.", "As before.")],
}  # fmt: skip


def messages_of(kind):
    return [Message(*message) for message in KINDS[kind]]


def build_objective(family):
    run = RunConfig.model_validate({"objective": "chat", "data": {"block": 100_000}})
    return Chat(run, family.tokenizer())


@pytest.fixture(scope="module")
def objectives():
    made = {}
    return lambda name: made.setdefault(name, build_objective(FAMILIES[name]))


def document_of(messages, tools=()):
    return Document(Record("", "a.jsonl:7", "a", Conversation(tuple(messages), tools)), "train")


def one(objective, messages, tools=()):
    (made,) = objective.samples([document_of(messages, tools)])
    return made


def turns_of(tokenizer, sample):
    """(where each run of learned tokens begins, its text)."""
    runs = []
    for at, (token, flag) in enumerate(zip(sample.ids.tolist(), sample.flags, strict=True)):
        if flag and not (at and sample.flags[at - 1]):
            runs.append((at, []))
        if flag:
            runs[-1][1].append(token)
    return [(at, tokenizer.decode(ids)) for at, ids in runs]


def as_templates_take(messages):
    return [{"role": message.role, "content": message.content} for message in messages]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_exactly_the_assistants_turns_are_learned(objectives, name, kind):
    family, objective, messages = FAMILIES[name], objectives(name), messages_of(kind)
    made = one(objective, messages)
    if kind in family.refuses:
        assert isinstance(made, Rejected)
        assert (made.origin, made.reason) == ("a.jsonl:7", "template")
        assert family.refuses[kind] in made.detail
        return
    assert isinstance(made, DocumentSamples), made
    tokenizer, (sample,) = objective.tokenizer, made.samples
    turns = turns_of(tokenizer, sample)
    # Two answers one after another may touch: they are one run of tokens then.
    assert "".join(text for _, text in turns) == "".join(family.learned(messages))
    if not messages[-1].thought:
        before = sample.ids[: turns[-1][0]].tolist()
        prompt = prompt_ids(tokenizer, objective.template, as_templates_take(messages[:-1]))
        if not any(message.thought for message in messages) and kind != "answers":
            # What the model has read when it begins to answer; tags of an empty thought after it are not learned.
            assert prompt[: len(before)] == before[: len(prompt)]
            tags = tokenizer.decode(before[len(prompt) :]).split()
            assert "".join(tags) in ("", "<think></think>", "</think>")


@pytest.mark.parametrize("kind", TOOL_KINDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_calls_are_learned_and_what_tools_return_is_not(objectives, name, kind):
    family, objective, messages = FAMILIES[name], objectives(name), TOOL_KINDS[kind]
    if family.calls is None:
        with pytest.raises(InputError, match=r"the template does not write tool calls, but a\.jsonl:7 has them"):
            one(objective, messages, (WEATHER,))
        return
    if not family.describes:
        with pytest.raises(InputError, match="the template does not write descriptions of tools"):
            one(objective, messages, (WEATHER,))
    made = one(objective, messages, (WEATHER,) if family.describes else ())
    if kind in family.refuses:
        assert isinstance(made, Rejected)
        assert family.refuses[kind] in made.detail
        return
    assert isinstance(made, DocumentSamples), made
    turns = turns_of(objective.tokenizer, made.samples[0])
    assert [text for _, text in turns] == family.learned(messages)
    assert "18C" not in "".join(text for _, text in turns)


@pytest.mark.parametrize("kind", ["call", "spoken call", "parallel", "last call"])
@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.calls])
def test_what_is_learned_is_read_back_as_the_calls_that_it_was(objectives, name, kind):
    family, tokenizer = FAMILIES[name], objectives(name).tokenizer
    if kind in family.refuses:
        return
    called = TOOL_KINDS[kind][1]
    (written, *_) = family.learned(TOOL_KINDS[kind])
    for end in tokenizer.hf.convert_ids_to_tokens(turn_end(tokenizer, family.template).ids):
        written = written.removesuffix(end)  # generation stops there
    said, calls = read_calls(written, (WEATHER,))
    assert said == called.content
    assert [(call.name, call.arguments) for call in calls] == [
        (call.name, call.arguments) for call in called.tool_calls
    ]


@pytest.mark.parametrize(("page", "words"), [("chat.md", "templates of"), ("ru/chat.md", "шаблон")])
def test_the_page_counts_them(page, words):
    text = (Path(__file__).parents[1] / "docs" / page).read_text(encoding="utf-8")
    assert [int(number) for number in re.findall(rf"(\d+) {words}", text)] == [len(FAMILIES)]


# Tokenizers with several templates

USER_ASKS = [{"role": "user", "content": "How warm is it?"}]
SPACES = (
    "\n  {% for message in messages %}\n {{ message.content }}\n{% endfor %} \n\n",
    "  \n{% macro f(n) %}{{ n }}{% if n %} {{ f(n - 1) }}{% endif %}{% endmacro %}\n"
    "  {% for tool in tools or [] %}\n\t{{ tool.function.name }}\n  {% endfor %}{{ f(2) }}  \n",
)


@pytest.mark.parametrize("tools", [None, [WEATHER]], ids=["no tools", "tools"])
@pytest.mark.parametrize("templates", ["hermes2_pro", SPACES, SPACES[::-1]], ids=["hermes", "spaces", "turned"])
def test_of_several_templates_the_one_is_taken_that_transformers_takes(templates, tools):
    tokenizer = FAMILIES["hermes2_pro"].tokenizer()
    if isinstance(templates, tuple):
        tokenizer.hf.chat_template = dict(zip(("default", "tool_use"), templates, strict=True))
    own, template = tokenizer.hf.chat_template, resolve_template(tokenizer, "auto")
    for asks in (False, True):
        expected = tokenizer.hf.apply_chat_template(USER_ASKS, tools=tools, tokenize=False, add_generation_prompt=asks)
        assert render(tokenizer, template, USER_ASKS, asks, tools) == expected
    assert tokenizer.hf.chat_template is own


def test_a_call_without_tools_is_written_by_the_template_for_them(objectives):
    made = one(objectives("hermes2_pro"), TOOL_KINDS["call"])
    assert isinstance(made, DocumentSamples), made
    assert "<tool_call>" in turns_of(objectives("hermes2_pro").tokenizer, made.samples[0])[0][1]


@pytest.mark.parametrize(
    ("templates", "says"),
    [
        ({"tool_use": "{{ 1 }}"}, "has the templates tool_use, but none is the default"),
        ({"default": "{{ 1 }}", "tool_use": "{% if %}"}, r"for tools \(tool_use\):1: "),
        ({"default": "{{ 1 }}", "tool_use": 5}, r"for tools \(tool_use\) is 5, not a text"),
    ],
)
def test_templates_that_cannot_be_taken_are_named(templates, says):
    tokenizer = FAMILIES["hermes2_pro"].tokenizer()
    tokenizer.hf.chat_template = templates
    with pytest.raises(InputError, match=says):
        resolve_template(tokenizer, "auto")


def test_what_stands_before_a_call_ends_no_turn():
    ends = {}
    for name in ("gigachat", "gigachat3", "gpt_oss", "glm4_5"):
        tokenizer = FAMILIES[name].tokenizer()
        found = turn_end(tokenizer, FAMILIES[name].template)
        ends[name] = {*tokenizer.hf.convert_ids_to_tokens(found.ids)}
    assert ends == {
        "gigachat": {"<|message_sep|>", "</s>"},
        "gigachat3": {"</s>"},
        "gpt_oss": {"<|return|>", "<|call|>"},
        "glm4_5": {"<|user|>", "<|observation|>", "<|endoftext|>"},
    }


EATING = (
    "{% for m in messages %} <|{{ m['role'] }}|>\n{{ m['content'] }} <|end|>\n{% endfor %}"
    "{% if add_generation_prompt %} <|assistant|>\n{% endif %}"
)


@pytest.mark.parametrize("flags", [{"rstrip": True}, {"lstrip": True}, {"rstrip": True, "lstrip": True}], ids=str)
@pytest.mark.parametrize("said", ["One.", "\n  One."])
def test_tokens_that_take_white_space_in_do_so_in_training_too(flags, said):
    """Phi-3's <|end|> covers the line feed behind it, which lies on the other side of the border of the turn."""
    marks = ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
    tokenizer = trained_tokenizer([])
    tokenizer.hf.add_tokens([AddedToken(mark, special=True, normalized=False, **flags) for mark in marks])
    tokenizer.hf.chat_template = EATING
    run = RunConfig.model_validate({"objective": "chat", "data": {"block": 1000}})
    talk = [Message(USER, "a"), Message(ASSISTANT, said), Message(USER, " b"), Message(ASSISTANT, "Two!")]
    (sample,) = one(Chat(run, tokenizer), talk).samples
    as_dicts = [{"role": message.role, "content": message.content} for message in talk]
    assert sample.ids.tolist() == tokenizer.hf.apply_chat_template(as_dicts, return_dict=False)
    learned = tokenizer.decode(sample.ids[sample.flags > 0])
    assert learned.replace(" ", "").replace("\n", "") == "One.<|end|>Two!<|end|>"
    assert "<|assistant|>" not in learned


def older_llama_2():
    """A tokenizer that adds a space after each special token, too."""
    vocab, merges = sentencepiece("<unk>", "<s>", "</s>")
    return LlamaTokenizer(vocab=vocab, merges=merges, legacy=True)


def gpt_2(**options):
    """A tokenizer to which two line feeds are one token at the end of a text, and two before a word."""
    vocab, merges = bytewise("<|endoftext|>")
    return GPT2Tokenizer(vocab=vocab | {"ĊĊ": len(vocab)}, merges=[*merges, ("Ċ", "Ċ")], **options)


SPACED = {
    "Llama 2": llama_2,
    "older Llama 2": older_llama_2,
    "Mistral": mistral,
    "Gemma": gemma,
    "GPT-2": gpt_2,
    "GPT-2 with a first space": lambda: gpt_2(add_prefix_space=True),
}


def turns_with(before_answer, end="{{ eos_token }}"):
    """A template that writes `before_answer` between a question and its answer."""
    return (
        "{{ bos_token or '' }}{% for m in messages %}{% if m['role'] == 'user' %}ask " + "{{ m['content'] }}"
        f"{before_answer}" + "{% else %}{{ m['content'] }}" + end + "{% endif %}{% endfor %}"
    )


def learned_and_theirs(tokenizer, template, talk):
    """The objective, what is learned of a conversation, its ids in transformers, and those of its last prompt."""
    tokenizer.chat_template = template
    run = RunConfig.model_validate({"objective": "chat", "data": {"block": 1000}, "chat": {"train_on": "last"}})
    objective = Chat(run, Tokenizer(tokenizer, "tokenizer"))
    document = document_of([Message(role, said) for role, said in talk])
    (made,) = objective.samples([document])
    as_dicts = [{"role": role, "content": said} for role, said in talk]
    prompt = tokenizer.apply_chat_template(as_dicts[:-1], add_generation_prompt=True, return_dict=False)
    whole = tokenizer.apply_chat_template(as_dicts, return_dict=False)
    return objective.notes([document]), made.samples[0], whole, prompt


@pytest.mark.parametrize("before_answer", [" then ", " then\n\n", "[/] "])
@pytest.mark.parametrize("name", SPACED)
def test_an_answer_is_learned_behind_the_tokens_of_its_prompt(name, before_answer):
    """A prompt that ends in a space: the tokenizer joins it with the answer's first word, which no model can write."""
    tokenizer = SPACED[name]()
    talk = [(USER, "a word"), (ASSISTANT, "the end of it")]
    notes, sample, whole, prompt = learned_and_theirs(tokenizer, turns_with(before_answer), talk)
    begin = sample.flags.tolist().index(1)
    assert sample.ids[:begin].tolist() == prompt
    assert tokenizer.decode(sample.ids) == tokenizer.decode(whole)
    assert all(sample.flags[begin:])
    if whole[: len(prompt)] == prompt:
        assert sample.ids.tolist() == whole
        assert notes == []
    else:
        (note,) = notes
        assert "in 1 of the first 1 conversations (first in a.jsonl:7, turn 1 of the assistant)" in note
        assert "apply_chat_template gives other tokens" in note
    pair = Preference((Message(*talk[0]),), Message(*talk[1]), Message(ASSISTANT, "no end"))
    preference = RunConfig.model_validate({"objective": "preference", "data": {"block": 1000}})
    document = Document(Record("", "a.jsonl:7", "a", pair), "train")
    assert PreferenceOptimization(preference, Tokenizer(tokenizer, "tokenizer")).notes([document]) == notes


@pytest.mark.parametrize("name", SPACED)
def test_in_a_long_conversation_each_answer_begins_without_a_second_space(name):
    """Also without special tokens between the turns."""
    tokenizer = SPACED[name]()
    talk = [(USER, "a word"), (ASSISTANT, "the end")] * 30
    for end in ("{{ eos_token }}", "{{ '\n' if not loop.last else eos_token }}"):
        _, sample, whole, _ = learned_and_theirs(tokenizer, turns_with(" then ", end), talk)
        assert tokenizer.decode(sample.ids) == tokenizer.decode(whole)


@pytest.mark.parametrize("name", SPACED)
def test_where_no_token_is_joined_the_ids_are_those_of_the_whole_text(name):
    tokenizer = SPACED[name]()
    for before_answer in ("[/]", " then:\n", "{{ eos_token }}"):
        talk = [(USER, "a word"), (ASSISTANT, "the end"), (USER, "  two "), (ASSISTANT, "two")]
        notes, sample, whole, prompt = learned_and_theirs(tokenizer, turns_with(before_answer), talk)
        assert sample.ids.tolist() == whole
        assert sample.ids[: sample.flags.tolist().index(1)].tolist() == prompt
        assert not any("apply_chat_template" in note for note in notes)
