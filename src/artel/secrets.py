"""Hide secrets (passwords, tokens and signatures in URLs) in everything that is written or printed.

Secrets belong in the environment: AWS_*, HF_TOKEN, and `${NAME}` in http(s) URLs. `${NAME}` is stored unchanged and
replaced only when the URL is requested.
"""

from __future__ import annotations

import re
from typing import Any

HIDDEN = "***"

# RFC 3986, 3.2.1: the user information before the @ of the host.
_USER = re.compile(r"(?<=://)([^/\s@'\"?#]+)@")
# Names under which signed URLs (S3, Google Cloud, Azure: sig) and common services carry their secrets.
_PARAMETER = re.compile(
    r"(?i)([?&;](?:[\w.-]*(?:token|secret|password|passwd|signature|credential|auth|authorization|api[_-]?key"
    r"|access[_-]?key|accesskeyid)|key|sig|pwd)=)([^&#\s'\"]+)"
)
# Tokens recognizable by their form: of the hub, AWS and GitHub, and everything after `Bearer`.
_TOKEN = re.compile(r"\b(?:hf_[A-Za-z0-9]{20,}|AKIA[A-Z0-9]{16}|gh[opsur]_[A-Za-z0-9]{30,}|github_pat_\w{30,})")
_BEARER = re.compile(r"(?i)(\bbearer\s+)[\w.~+/=-]{8,}")
_VARIABLE = re.compile(r"\$\{(\w+)\}")


def hide_secrets(value: Any) -> Any:
    """Replace each secret by *** in a string, or in the strings of lists and dicts. Return other values unchanged."""
    if isinstance(value, str):
        return _hide_in_text(value)
    if isinstance(value, dict):
        return {hide_secrets(key): hide_secrets(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [hide_secrets(item) for item in value]
    return value


def find_variables(text: str) -> list[str]:
    """Return the names of the environment variables in a text."""
    return _VARIABLE.findall(text)


def fill_variables(text: str, values: dict[str, str]) -> str:
    """Replace each `${NAME}` in a text by its value."""
    return _VARIABLE.sub(lambda match: values[match[1]], text)


def _hide_in_text(text: str) -> str:
    if "://" in text:
        text = _USER.sub(lambda match: f"{_hide_password(match[1])}@", text)
    if "=" in text:
        text = _PARAMETER.sub(lambda match: match[1] + (match[2] if _is_variable(match[2]) else HIDDEN), text)
    return _BEARER.sub(rf"\1{HIDDEN}", _TOKEN.sub(HIDDEN, text))


def _hide_password(user: str) -> str:
    """Hide the password of `user:password`. Without a password, the user itself may be a token and is hidden."""
    name, colon, password = user.partition(":")
    if colon:
        return f"{name}:{password if _is_variable(password) else HIDDEN}"
    return name if _is_variable(name) else HIDDEN


def _is_variable(text: str) -> bool:
    return _VARIABLE.fullmatch(text) is not None
