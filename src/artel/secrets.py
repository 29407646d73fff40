"""What must not be written down or shown: passwords, tokens and signatures in addresses, replaced by ***.

Their place is the environment: AWS_*, HF_TOKEN, and `${NAME}` in http(s) addresses, which stands in what is written as
it is and is read when the address is asked.
"""

from __future__ import annotations

import re
from typing import Any

HIDDEN = "***"

# RFC 3986, 3.2.1: what stands before the @ of the host.
_USER = re.compile(r"(?<=://)([^/\s@'\"?#]+)@")
# Names by which signed addresses (S3, Google Cloud, Azure: sig) and common services carry their secrets.
_PARAMETER = re.compile(
    r"(?i)([?&;](?:[\w.-]*(?:token|secret|password|passwd|signature|credential|auth|authorization|api[_-]?key"
    r"|access[_-]?key|accesskeyid)|key|sig|pwd)=)([^&#\s'\"]+)"
)
# Tokens that are known by their form: of the hub, of AWS, of GitHub, and what stands behind `Bearer`.
_TOKEN = re.compile(r"\b(?:hf_[A-Za-z0-9]{20,}|AKIA[A-Z0-9]{16}|gh[opsur]_[A-Za-z0-9]{30,}|github_pat_\w{30,})")
_BEARER = re.compile(r"(?i)(\bbearer\s+)[\w.~+/=-]{8,}")
_VARIABLE = re.compile(r"\$\{(\w+)\}")


def hide_secrets(value: Any) -> Any:
    """A text, or texts in lists and mappings, with *** in the place of each secret; anything else as it is."""
    if isinstance(value, str):
        return _hidden(value)
    if isinstance(value, dict):
        return {hide_secrets(key): hide_secrets(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [hide_secrets(each) for each in value]
    return value


def variables_of(text: str) -> list[str]:
    """The names of the environment variables that a text asks for."""
    return _VARIABLE.findall(text)


def with_variables(text: str, values: dict[str, str]) -> str:
    """The text with each `${NAME}` replaced by its value."""
    return _VARIABLE.sub(lambda match: values[match[1]], text)


def _hidden(text: str) -> str:
    if "://" in text:
        text = _USER.sub(lambda match: f"{_hidden_user(match[1])}@", text)
    if "=" in text:
        text = _PARAMETER.sub(lambda match: match[1] + (match[2] if _is_variable(match[2]) else HIDDEN), text)
    return _BEARER.sub(rf"\1{HIDDEN}", _TOKEN.sub(HIDDEN, text))


def _hidden_user(user: str) -> str:
    """`user:password` without the password; where there is none, the user may be a token."""
    name, colon, password = user.partition(":")
    if colon:
        return f"{name}:{password if _is_variable(password) else HIDDEN}"
    return name if _is_variable(name) else HIDDEN


def _is_variable(text: str) -> bool:
    return _VARIABLE.fullmatch(text) is not None
