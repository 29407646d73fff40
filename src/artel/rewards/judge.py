"""Score answers with a judge: a model behind an OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import os
import re
from concurrent.futures import ThreadPoolExecutor

from pydantic import Field, field_validator

from artel.config import Section
from artel.errors import InputError
from artel.rewards.checks import last_number
from artel.rewards.completion import Completion
from artel.storage import ApiFailure, request_json

CONCURRENT_CALLS = 16
_RETRY_SECONDS = 1.0
_TIMEOUT_SECONDS = 600.0  # socket timeout; the time limit of the call ends it earlier
_MAX_REPLY_BYTES = 2**20
_FIELD = re.compile(r"\{\{\s*(\w+)\s*\}\}")


class JudgeConfig(Section):
    """Ask a model to judge the answer."""

    url: str = Field(description="Address of an OpenAI-compatible server, e.g. http://localhost:8000/v1.")
    model: str = Field(description="Name of the model on that server.")
    prompt: str = Field(
        description="What to ask. {{prompt}}, {{completion}} and {{COLUMN}} are filled in. The last number of the "
        "reply is the reward."
    )
    key: str = Field(default="", description="Name of the environment variable with the server's API key.")

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"{url!r} is not an address; write http://HOST:PORT/v1")
        return url

    @field_validator("prompt")
    @classmethod
    def _check_prompt(cls, prompt: str) -> str:
        if "completion" not in _FIELD.findall(prompt):
            raise ValueError("the judge does not see the answer; write {{completion}} where it belongs")
        return prompt


class Judge:
    """The last number in the judge's reply."""

    concurrent = True

    def __init__(self, settings: JudgeConfig) -> None:
        if settings.key and settings.key not in os.environ:
            what = f"there is no {settings.key} in the environment"
            raise InputError.at("judge.key", what, f"set it: export {settings.key}=…")
        self._settings = settings
        self._threads = ThreadPoolExecutor(CONCURRENT_CALLS)

    async def __call__(self, completions: list[Completion]) -> list[float]:
        return [await self._score(completion) for completion in completions]

    async def _score(self, completion: Completion) -> float:
        prompt = fill_prompt(self._settings.prompt, completion)
        while True:
            try:
                reply = await asyncio.get_running_loop().run_in_executor(self._threads, self._ask, prompt)
                break
            except ApiFailure as error:
                if not error.may_pass:
                    raise ValueError(f"the judge's server failed: {error}") from None
                await asyncio.sleep(_RETRY_SECONDS)
        number = last_number(reply)
        if number is None:
            raise ValueError(f"the judge's reply has no number: {reply[-200:]!r}")
        return number

    def _ask(self, prompt: str) -> str:
        settings = self._settings
        body = {"model": settings.model, "messages": [{"role": "user", "content": prompt}], "temperature": 0}
        url = f"{settings.url.rstrip('/')}/chat/completions"
        reply = request_json(url, body, key=settings.key, timeout=_TIMEOUT_SECONDS, max_bytes=_MAX_REPLY_BYTES)
        try:
            return str(reply["choices"][0]["message"]["content"])
        except (KeyError, IndexError, TypeError):
            raise ValueError(f"the judge's server sent no answer: {str(reply)[:200]}") from None


def fill_prompt(template: str, completion: Completion) -> str:
    """Fill in the fields of a judge's prompt. Inserted text is not searched for fields."""
    prompt = completion.prompt
    if not isinstance(prompt, str):
        prompt = "\n\n".join(f"{message.get('role')}: {message.get('content')}" for message in prompt)

    def replacement(match: re.Match[str]) -> str:
        texts = {"prompt": prompt, "completion": completion.text}
        return str(texts[match[1]] if match[1] in texts else completion.column(match[1]))

    return _FIELD.sub(replacement, template)
