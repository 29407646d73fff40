"""Functions that a model may call, and what a call of them must be."""

from __future__ import annotations

import json

import jsonschema

from artel.tokens.tokenizer.chat_template import turn_end
from artel.tokens.tokenizer.template_calls import find_call_form
from artel.tokens.tokenizer.template_tools import tool_style

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 8},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"enum": ["C", "F"]},
        "part": {"type": "string", "enum": ["day", "night"]},
        "hours": {"type": "array", "items": {"$ref": "#/$defs/hour"}, "maxItems": 3},
        "exact": {"type": "boolean"},
    },
    "required": ["city", "days"],
    "$defs": {"hour": {"type": "integer", "minimum": 0, "maximum": 23}},
}
SCHEMAS = {"get": WEATHER, "get_time": {"type": "object", "maxProperties": 0}}


def tool(name, parameters=None):
    function = {"name": name, "description": "What it does."} | ({"parameters": parameters} if parameters else {})
    return {"type": "function", "function": function}


TOOLS = (tool("get", WEATHER), tool("get_time"))


def form_of(family):
    tokenizer = family.tokenizer()
    style, end = tool_style(tokenizer, family.template), turn_end(tokenizer, family.template)
    return tokenizer, end, find_call_form(tokenizer, family.template, style, end)


def assert_called(calls, names=SCHEMAS):
    """Calls of `names` alone, with arguments that fit, and none besides."""
    for call in calls:
        function = call["function"]
        assert function["name"] in names
        schema = SCHEMAS[function["name"]] | {"additionalProperties": False}
        jsonschema.validate(json.loads(function["arguments"]), schema)
