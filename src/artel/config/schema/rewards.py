"""An entry in a list of rewards: how to score what a model writes."""

from __future__ import annotations

import difflib
from typing import Any, ClassVar, Self

import yaml
from pydantic import Field, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema

from artel.config.schema.base import ShortSection
from artel.config.schema.quantities import Number
from artel.config.schema.registered import NamingSection, RewardName
from artel.registry import REWARDS

REWARD_SECONDS = 60.0
"""Default time limit of a reward for an answer."""
REWARD_BYTES = 2**32
"""Default memory limit of a process that computes rewards."""
_EXAMPLES = "for example rewards.py:my_function, or {equals: {column: answer}, weight: 2}"


class RewardTerm(NamingSection):
    """One term of the sum that scores a completion.

    It may be written as `rewards.py:exact` or `module:function` (a function of the user), as the name of a reward, as
    `NAME:VALUE` (`gym:countdown`), or as a mapping with the name as a key: `{equals: {column: answer}, weight: 2}`.
    """

    registries: ClassVar = {"reward": REWARDS}
    reward: RewardName = Field(
        description="Reward: your function (function); the answer equals a column (equals), matches a pattern "
        "(matches), has the right number (number), is JSON (json), has a length (length), a language (language) or "
        "tags (format); the right formula (math); the scorer of a reasoning-gym task (gym); a reward model in a folder "
        "(model); a model behind an OpenAI-compatible server (judge). Its name may also be the key of its settings: "
        "{equals: {column: answer}}."
    )
    weight: Number = Field(default=1.0, description="Factor of this reward in the sum.")

    @property
    def label(self) -> str:
        """Name for tables and metrics: that of the reward, or the label of its settings, e.g. a function's name."""
        return str(getattr((self.model_extra or {}).get(self.reward), "label", self.reward))

    @model_validator(mode="before")
    @classmethod
    def _read_shorthand(cls, value: Any) -> Any:
        if isinstance(value, str):
            return _read_string(value)
        if not isinstance(value, dict) or "reward" in value:
            return value
        names = [name for name in value if name in REWARDS]
        if not names:
            raise ValueError(f"it names no reward; write one of {', '.join(REWARDS.names)}, {_EXAMPLES}")
        if len(names) > 1:
            raise ValueError(f"it has {len(names)} rewards ({', '.join(names)}); write an entry for each")
        settings = value[names[0]]
        return {**value, "reward": names[0], names[0]: {} if settings is None else settings}

    @model_validator(mode="after")
    def _check_sections(self) -> Self:
        for name, _ in self.unused_settings():
            raise ValueError(f"{name} has no effect, the reward is {self.reward}; write another entry for {name}")
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        json_schema = super().__get_pydantic_json_schema__(schema, handler)
        section = handler.resolve_ref_schema(json_schema)
        section["type"] = ["object", "string"]
        section.pop("required")  # the name may be a key
        return json_schema


def _read_string(text: str) -> dict[str, Any]:
    """Return the mapping that a string stands for."""
    name, colon, value = text.partition(":")
    if name in REWARDS and value.startswith(" "):  # a quoted mapping: "matches: '[0-9]'"
        try:
            value = yaml.safe_load(value)
        except yaml.YAMLError:
            raise ValueError(f"{text!r} is not YAML; write it without quotes: {{{name}: …}}") from None
    settings = REWARDS.get_settings(name)
    if name in REWARDS and (not colon or (settings is not None and issubclass(settings, ShortSection))):
        return {"reward": name, **({name: value} if colon else {})}
    if colon:
        return {"reward": "function", "function": text}
    near = difflib.get_close_matches(text, REWARDS.names, 1)
    fix = f"did you mean {near[0]}?" if near else f"write one of {', '.join(REWARDS.names)}, {_EXAMPLES}"
    raise ValueError(f"there is no reward {text!r}; {fix}")
