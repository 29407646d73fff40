"""Chat templates without measure are named, by a process with limits that tries them; those in use are let through."""

import os
from functools import partial

import pytest

from artel.errors import InputError
from artel.tokens.tokenizer import chat_template, template_limits
from artel.tokens.tokenizer.chat_template import TemplateRejection, read_template, render, resolve_template
from support.templates import MISTRAL, QWEN

LOOP = "{% for a in range(99999) %}"
ENDLESS = f"{LOOP * 3}{'{% endfor %}' * 3}"
BOMBS = {
    "a product": ("{{ 'a' * 10**10 }}", "memory"),
    "doubling": (
        "{% set n = namespace(x='ab') %}{% for i in range(40) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "memory",
    ),
    "a filter": ("{{ 'a' | center(10**10) }}", "memory"),
    "by the length": ("{{ 'a' * (messages[0].content | length) ** 4 }}", "memory"),
    "much text": ("{{ 'word ' * 4000000 }}", "16,777,216 characters"),
    "nested loops": (ENDLESS, "does not end"),
    "calls itself": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "calls itself without end"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BOMBS)
def test_a_template_without_measure_is_named(name, tmp_path):
    template, says = BOMBS[name]
    file = tmp_path / "chat.jinja"
    file.write_text(template)
    with pytest.raises(InputError, match=says) as caught:
        read_template(str(file), trial_seconds=1 if says == "does not end" else 60)
    assert str(file) in str(caught.value)


def test_files_that_are_no_templates(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "book").write_text("words " * 300_000)
    for name, says in {"pipe": "a named pipe", "zero": "a device", "book": "1,800,000 bytes"}.items():
        with pytest.raises(InputError, match=says) as caught:
            read_template(str(tmp_path / name))
        assert caught.value.problems[0].where == "chat.template"


def test_a_tokenizers_own_template_is_tried(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer.hf, "chat_template", BOMBS["calls itself"][0])
    with pytest.raises(InputError, match="the tokenizer's chat template calls itself"):
        resolve_template(tokenizer, "auto")


def test_templates_in_use_pass_and_what_refuses_is_refused_where_it_is_used(tokenizer, tmp_path):
    for template in [QWEN, MISTRAL, "{{ raise_exception('no') }}", "{{ nothing.at.all }}", "{{ 1 / 0 }}"]:
        file = tmp_path / "chat.jinja"
        file.write_text(template)
        assert read_template(str(file)) == template
    with pytest.raises(TemplateRejection, match="division by zero"):
        render(tokenizer, "{{ 1 / 0 }}", [{"role": "user", "content": "a"}], False)
    with pytest.raises(TemplateRejection, match="recursion"):
        render(tokenizer, BOMBS["calls itself"][0], [{"role": "user", "content": "a"}], False)


@pytest.mark.slow
def test_a_conversation_that_sets_a_template_off_ends(tokenizer, monkeypatch):
    """What the trial's words do not set off: the exception comes within the template, and nothing comes later."""
    template = "{% if 'now' in messages[0].content %}" + ENDLESS + "{% endif %}fine"
    chat_template._check_template(template, "it")
    message = {"role": "user", "content": "later"}
    assert render(tokenizer, template, [message], False) == "fine"
    with monkeypatch.context() as short:
        short.setattr(chat_template, "run_with_deadline", partial(template_limits.run_with_deadline, seconds=1.0))
        with pytest.raises(InputError, match=r"chat\.template: does not end"):
            render(tokenizer, template, [{**message, "content": "now"}], False)
    assert render(tokenizer, template, [message], False) == "fine"
    for _ in range(1_000_000):  # an exception that came late would come here: Python looks for one at every turn
        pass
    assert not template_limits._running
