"""Errors of the server, as OpenAI's error object: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from itertools import islice
from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "server_error",
}

_MESSAGES = {
    "missing": "is missing",
    "string_type": "must be a string",
    "int_type": "must be an integer",
    "int_parsing": "must be an integer",
    "int_from_float": "must be an integer",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "bool_type": "must be a boolean",
    "bool_parsing": "must be a boolean",
    "list_type": "must be an array",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "none_required": "cannot be set here; remove it",
    "too_short": "has too few entries; give {min_length} or more",
    "too_long": "has too many entries; give at most {max_length}",
    "string_too_short": "is shorter than {min_length} characters",
    "string_too_long": "is longer than {max_length} characters",
    "greater_than": "is too small; write a number above {gt}",
    "greater_than_equal": "is too small; write {ge} or more",
    "less_than": "is too large; write a number below {lt}",
    "less_than_equal": "is too large; write at most {le}",
    "literal_error": "is unknown; write {expected}",
    "union_tag_invalid": "has an unknown {discriminator}; write {expected_tags}",
    "union_tag_not_found": "lacks {discriminator}",
    "string_pattern_mismatch": "does not match the pattern {pattern}",
}
"""Messages by pydantic's error type."""
_TYPE_ERRORS = {name for name, message in _MESSAGES.items() if message.startswith("must be")}
_MAX_LISTED = 10
"""Maximum problems listed in an error."""
_MAX_PROBLEMS = 5000
"""Maximum problems of a body that are examined."""
_MAX_KEY_CHARS = 64
"""Maximum characters of an unknown key to suggest similar keys for. The search is quadratic in its length."""


class ApiError(HTTPException):
    """An error response: status, message and the key at fault."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(status, message)
        self.status = status
        self.param = param
        self.code = code

    def __str__(self) -> str:
        return self.detail

    def body(self) -> dict[str, Any]:
        error_type = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": error_type, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        headers = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}}.get(self.status)
        return JSONResponse(self.body(), self.status, headers)


def make_body_error(error: ValidationError, body: dict[str, Any], valid_keys: Collection[str]) -> ApiError:
    """Return the error for a body that does not fit its schema: up to ten problems, and the number of further ones.

    `valid_keys`: the keys that the body may have.
    """
    problem_count = error.error_count()
    if problem_count > _MAX_PROBLEMS:  # pydantic can only list all problems, which takes seconds
        unknown = ", ".join(repr(key[:50]) for key in islice((key for key in body if key not in valid_keys), 3))
        message = f"the body has {problem_count:,} problems" + (unknown and f"; unknown keys: {unknown}, …")
        return ApiError(422, message, None, "invalid_request")
    located = locate_problems(error.errors(include_url=False, include_input=False), body)
    lines = [f"{path}: {_format_problem(problem, path, valid_keys)}" for path, problem in located[:_MAX_LISTED]]
    lines += [f"and {len(located) - _MAX_LISTED} more"] if len(located) > _MAX_LISTED else []
    return ApiError(422, "; ".join(lines)[:2000], located[0][0][:200], "invalid_request")


def locate_problems(problems: Sequence[Any], body: Any) -> list[tuple[str, Any]]:
    """Return (path in the body, problem) for pydantic's errors, without duplicates.

    If a key accepts several types, return only the problem with the type that was sent.
    """
    located = [(_body_path(body, problem), problem) for problem in problems]
    specific = {path for path, problem in located if not _is_type_error(problem)}
    parents = {path[:index] for path, _ in located for index, character in enumerate(path) if character == "."}
    unique = {
        (path, _MESSAGES.get(problem["type"], problem["msg"])): (path, problem)
        for path, problem in reversed(located)
        if not (_is_type_error(problem) and (path in specific or path in parents))
    }
    return list(reversed(unique.values()))


def _is_type_error(problem: dict[str, Any]) -> bool:
    """True if the problem is the type of a value, such as "must be a string"."""
    return problem["type"] in _TYPE_ERRORS


def _format_problem(problem: dict[str, Any], path: str, valid_keys: Collection[str]) -> str:
    if problem["type"] == "extra_forbidden":
        is_name = "." not in path and len(path) <= _MAX_KEY_CHARS
        similar = " or ".join(difflib.get_close_matches(path, [*valid_keys], 3, cutoff=0.5)) if is_name else ""
        return "is unknown here" + (similar and f"; did you mean {similar}?")
    template = _MESSAGES.get(problem["type"])
    limits = problem.get("ctx", {})
    integers = {name: int(value) for name, value in limits.items() if isinstance(value, float) and value.is_integer()}
    return problem["msg"] if template is None else template.format(**limits | integers)


def _body_path(body: Any, problem: dict[str, Any]) -> str:
    """Return the path of a value in a body, like `documents.0.text`. Omits the union members that pydantic tried."""
    location = problem["loc"]
    steps: list[str] = []
    for depth, step in enumerate(location, 1):
        is_missing = problem["type"] == "missing" and depth == len(location)
        holds_key = depth == len(location) - 1 and problem["type"] == "extra_forbidden"
        if holds_key and isinstance(body, dict) and isinstance(body.get(step), dict) and location[-1] not in body[step]:
            continue  # a union member whose name is also a key of the body
        if isinstance(body, dict) and isinstance(step, str) and (step in body or is_missing):
            steps.append(step)
            body = body.get(step)
        elif isinstance(body, list) and isinstance(step, int) and step < len(body):
            steps.append(str(step))
            body = body[step]
    return ".".join(steps)
