"""Tools and environments in a child process: they answer the replies of a model.

A tool is a function of the user that the model calls. An environment is a class of the user, with an instance per
answer:

    class Game:
        def reset(self, row): ...    # columns of the prompt's record → a text to add to the prompt, or None
        def step(self, reply): ...   # a reply of the model → (the next message or None, True if the answer ends here)
        def reward(self): ...        # optional: the reward of the answer

An instance stays in its process between the replies. If another answer ends the process, the instance is made again in
a new one: each request has all earlier replies. What the environment answers to them must then be the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from artel.plugins import describe_exception
from artel.rewards.function import import_callable
from artel.text import ToolCall
from artel.text.tool_functions import CallFailed, import_functions

TOOLS_KEY, ENVIRONMENT_KEY = "policy.tools", "policy.environment"
_EXAMPLE = "class Game: … with reset(row) and step(reply)"


@dataclass(slots=True)
class _Instance:
    environment: Any
    steps: int = 0
    """Number of replies that it has answered."""


class _WrongValue(Exception):
    """An environment returned something else than its interface says."""


class Environments:
    """The user's functions and the instances of the user's environment in one process."""

    def __init__(self, tools: str | None, environment: str | None) -> None:
        """Raise InputError if the file or the class cannot be used."""
        self._functions = None if tools is None else import_functions(tools, TOOLS_KEY)
        self._class: Callable[[], Any] | None = None
        if environment is not None:
            self._class = import_callable(environment, "class", ENVIRONMENT_KEY, _EXAMPLE)
        self._instances: dict[str, _Instance] = {}

    @property
    def has_reward(self) -> bool:
        return callable(getattr(self._class, "reward", None))

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run a call, or a method of an environment. Return {"text", "done"}, {"value"} or {"failure"}."""
        if "call" in request:
            assert self._functions is not None
            try:
                return {"text": _clean(self._functions.call(ToolCall(**request["call"])))}
            except CallFailed as failure:
                return {"failure": str(failure)}
        try:
            return self._run(request)
        except MemoryError:
            raise
        except _WrongValue as error:
            return {"failure": str(error)}
        except BaseException as error:  # user code may raise anything
            return {"failure": describe_exception(error)}

    def _run(self, request: dict[str, Any]) -> dict[str, Any]:
        action, steps = request["action"], request["steps"]
        instance = self._instances.pop(request["answer"], None)  # an instance that raises is not used again
        if action == "reset":
            instance, opening = self._make(request)
            self._instances[request["answer"]] = instance
            return {"text": opening}
        if instance is None or instance.steps != len(steps):
            instance = self._repeat(request)
        if action == "reward":
            return {"value": instance.environment.reward()} if self.has_reward else {}
        text, done = _step(instance, request["reply"])
        self._instances[request["answer"]] = instance
        return {"text": text, "done": done}

    def _make(self, request: dict[str, Any]) -> tuple[_Instance, str | None]:
        assert self._class is not None
        instance = _Instance(self._class())
        return instance, _read_text("reset", instance.environment.reset(request["row"])) or None

    def _repeat(self, request: dict[str, Any]) -> _Instance:
        """Make an instance that was lost with its process: repeat its steps."""
        instance, opening = self._make(request)
        messages = [opening, *(_step(instance, reply)[0] for reply, _ in request["steps"])]
        if messages != [request["opening"], *(message for _, message in request["steps"])]:
            raise _WrongValue("is not deterministic: repeated after its process was lost, it gave other messages")
        return instance


def _step(instance: _Instance, reply: str) -> tuple[str | None, bool]:
    value = instance.environment.step(reply)
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise _WrongValue(f"step returned {type(value).__name__}, not (message, done)")
    text, done = _read_text("step", value[0]), bool(value[1])
    if text is None and not done:
        raise _WrongValue("step returned no message, but not done either")
    instance.steps += 1
    return text, done


def _read_text(method: str, value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise _WrongValue(f"{method} returned {type(value).__name__} as its message, not a text or None")
    return _clean(value)


def _clean(text: str) -> str:
    """Return the text as UTF-8 can write it. A function may return half a character."""
    return text.encode("utf-8", "replace").decode()
