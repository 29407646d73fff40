"""Answers in several turns: tools, environments, and templates that change what was said."""

import json
import os
import signal
from pathlib import Path

import pytest

from artel.tokens.tokenizer.chat_template import CHATML
from support.chat_models import MARKS, learned_by_heart
from support.runs import (
    artel,
    assert_same_models,
    losses,
    merged,
    metrics,
    start,
    succeed,
    torchrun,
    write_run,
)
from test_rounds import read_rollouts

FUNCTIONS = '''
def weather(city: str):
    """
    The weather.

    Args:
        city: A city.
    """
    if city == "Tomsk":
        raise LookupError("no such city")
    return -3
'''
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "A city."}},
                "required": ["city"],
            },
        },
    }
]


def call(city):
    return {"type": "function", "function": {"name": "weather", "arguments": {"city": city}}}


def talk(city, result, answer):
    """A conversation with a call, or without one if there is no city."""
    calls = [{"role": "assistant", "content": "", "tool_calls": [call(city)]}, {"role": "tool", "content": result}]
    return [{"role": "user", "content": "Is it cold?"}, *(calls if city else []), {"role": "assistant", "content": answer}]


@pytest.fixture(scope="module")
def calling(tmp_path_factory):
    """A model that calls for Omsk or Tomsk, or answers at once, each as often."""
    talks = [talk("Omsk", "-3", "Yes."), talk("Tomsk", "error", "No."), talk("", "", "No.")]
    folder = tmp_path_factory.mktemp("models") / "calls"
    return learned_by_heart(folder, MARKS, CHATML, talks, TOOLS, steps=150, max_position_embeddings=1024)
