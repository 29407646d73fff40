"""Use a user function as a reward. The names of its arguments decide how it is called:

- `completion` (a text) and `prompt`: called with one answer; returns a number or None.
- `completions` and `prompts`: called with all answers of a round; returns a list. This is TRL's convention: if the
  prompts are conversations, each completion is a list of messages.

`messages` gets the whole conversation, with the prompt; None if the prompt is a plain text. Every other argument gets
the column of that name: the value in the prompt's record, or a list with a value per answer.
`**kwargs` gets all columns. The function may be a coroutine function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from pydantic import Field, field_validator

from artel.config import ShortSection
from artel.errors import InputError
from artel.plugins import guard_user_code, import_user_file, import_user_module
from artel.rewards.completion import Completion, MissingColumn
from artel.storage import check_regular, user_path

_KEY = "function.name"
_EXAMPLE = "def reward(completion, answer): …"


class FunctionConfig(ShortSection):
    """Your function."""

    name: str = Field(description="Your function: FILE.py:FUNCTION or MODULE:FUNCTION.")

    @property
    def label(self) -> str:
        return self.name.rpartition(":")[2]

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        return check_name(name, "function")


class FunctionReward:
    def __init__(self, settings: FunctionConfig) -> None:
        self._name = settings.name
        self._function = import_callable(settings.name, "function", _KEY, _EXAMPLE)
        parameters = _read_parameters(self._function, settings.name)
        self.batch = any(name in parameters for name in ("completions", "prompts"))
        single = [name for name in ("completion", "prompt") if name in parameters]
        if self.batch and single:
            what = f"{settings.name} has arguments for one answer ({', '.join(single)}) and for a batch"
            raise InputError.at(_KEY, what, "use completion and prompt, or completions and prompts")
        self._takes_all = any(value.kind is inspect.Parameter.VAR_KEYWORD for value in parameters.values())
        if not self.batch and not single:
            if not self._takes_all:
                what = f"{settings.name} has no argument named completion or completions"
                raise InputError.at(_KEY, what, f"for one answer: {_EXAMPLE}")
            self.batch = True
        self._named = {name: value for name, value in parameters.items() if value.kind not in _VARIADIC}
        self.concurrent = not self.batch and _is_coroutine_function(self._function)

    def __call__(self, completions: list[Completion]) -> Any:
        if self.batch:
            return self._function(**self._batch_arguments(completions))
        if self.concurrent:
            return self._gather(completions)
        return [self._function(**self._arguments(completion)) for completion in completions]

    async def _gather(self, completions: list[Completion]) -> list[Any]:
        return [await self._function(**self._arguments(completion)) for completion in completions]

    def _arguments(self, completion: Completion) -> dict[str, Any]:
        values = {"completion": completion.text, "prompt": completion.prompt, "messages": completion.messages}
        return self._select(completion.columns | values)

    def _batch_arguments(self, completions: list[Completion]) -> dict[str, Any]:
        names = dict.fromkeys(name for completion in completions for name in completion.columns)
        columns: dict[str, Any] = {name: [item.columns.get(name) for item in completions] for name in names}
        values = {
            "completions": [item.text if isinstance(item.prompt, str) else item.turns for item in completions],
            "prompts": [item.prompt for item in completions],
            "messages": [item.messages for item in completions],
        }
        return self._select(columns | values)

    def _select(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return the values that the function accepts. Raise MissingColumn if a required one is missing."""
        missing = [
            name for name, item in self._named.items() if name not in values and item.default is inspect.Parameter.empty
        ]
        if missing:
            raise MissingColumn(
                f"{self._name} takes {', '.join(missing)}, but the columns are: {', '.join(values) or 'none'}"
            )
        return values if self._takes_all else {name: values[name] for name in self._named if name in values}


_VARIADIC = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)


def check_name(name: str, kind: str) -> str:
    """Return the name of a user's function or class (`kind`). Raise ValueError if it cannot be one."""
    module, _, attribute = name.rpartition(":")
    if not module or not attribute.isidentifier():
        raise ValueError(f"{name!r} is not a {kind}; write FILE.py:{kind.upper()} or MODULE:{kind.upper()}")
    return name


def import_callable(name: str, kind: str, key: str, example: str) -> Callable[..., Any]:
    """Import a function or class of the user. Raise InputError at `key` if it is missing."""
    module_name, _, attribute = name.rpartition(":")
    fix = f"write FILE.py:{kind.upper()} or MODULE:{kind.upper()}"
    if module_name.endswith(".py"):
        path = user_path(module_name, key)
        check_regular(path)
        if not path.is_file():
            raise InputError.at(key, f"there is no file {module_name}", fix)
        module = import_user_file(path)
    else:
        module = import_user_module(module_name, key, fix)
    with guard_user_code(key, f"{name} cannot be imported"):
        value = getattr(module, attribute, None)
    if not callable(value):
        raise InputError.at(key, f"{module_name} has no {kind} {attribute!r}", f"add it: {example}")
    return value


def _read_parameters(function: Callable[..., Any], name: str) -> dict[str, inspect.Parameter]:
    try:
        parameters = dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        raise InputError.at(
            _KEY, f"the arguments of {name} are unknown", f"wrap it in a function: {_EXAMPLE}"
        ) from None
    positional = [key for key, value in parameters.items() if value.kind is inspect.Parameter.POSITIONAL_ONLY]
    if positional:
        what = f"{name} takes {', '.join(positional)} by position only"
        raise InputError.at(_KEY, what, f"wrap it in a function with names: {_EXAMPLE}")
    return parameters


def _is_coroutine_function(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
