"""Installed packages and environment variables, with the values of secrets hidden."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement

DISTRIBUTION = "artel-lm"
_GROUPS = ("all", "dev")  # every extra; the tools of developers

_NAMES = re.compile(
    r"(ARTEL|OMP|MKL|KMP|GOMP|CUDA|NVIDIA|NCCL|GLOO|TORCH|TORCHINDUCTOR|TORCHDYNAMO|PYTORCH|HF|HUGGINGFACE|TRANSFORMERS"
    r"|TOKENIZERS|FASTOKENS|TRITON|KINETO|WANDB|AWS|SLURM|PYTHON)_?[A-Z0-9_]*|\w+_PROXY|XDG_CACHE_HOME|TMPDIR|CC|CXX"
    r"|LD_PRELOAD|LD_LIBRARY_PATH|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|NNODES|NODE_RANK"
    r"|LLAMA_CPP",
    re.IGNORECASE,
)
_SECRET = re.compile(r"TOKEN(?!IZERS)|KEY|SECRET|PASS|CREDENTIAL|AUTH|SESSION|COOKIE|PROXY|AWS|WANDB", re.IGNORECASE)
_MAX_VALUE_CHARS = 200


@dataclass(frozen=True, slots=True)
class Package:
    """A package that artel can use: its requirement and its installed version."""

    requirement: Requirement
    installed: str | None

    @property
    def fits(self) -> bool:
        """True if a version that artel works with is installed."""
        return self.installed is not None and self.requirement.specifier.contains(self.installed, prereleases=True)

    def __str__(self) -> str:
        if self.installed is None:
            return f"{self.requirement.name} is missing"
        needed = "" if self.fits else f" ({self.requirement.specifier} is needed)"
        return f"{self.requirement.name} {self.installed}{needed}"


def install_command(extra: str) -> str:
    """Return the command that installs an extra."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def list_packages() -> dict[str, list[Package]]:
    """Return packages by extra, in the project's order; core dependencies under ""."""
    by_extra: dict[str, list[Package]] = {"": []}
    for extra, requirement in _list_requirements():
        if extra not in _GROUPS:
            by_extra.setdefault(extra, []).append(Package(requirement, installed_version(requirement.name)))
    return by_extra


def _list_requirements() -> list[tuple[str, Requirement]]:
    """Return the requirements in the project's metadata, or in its pyproject.toml if it is not installed."""
    try:
        installed = [Requirement(line) for line in requires(DISTRIBUTION) or []]
    except PackageNotFoundError:
        project = Path(__file__).parents[3] / "pyproject.toml"
        if not project.is_file():
            return []
        table = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
        groups = {"": table["dependencies"], **table["optional-dependencies"]}
        return [(extra, Requirement(line)) for extra, lines in groups.items() for line in lines]
    return [(_get_extra(requirement), requirement) for requirement in installed]


def _get_extra(requirement: Requirement) -> str:
    match = re.search(r"extra == ['\"]([^'\"]+)['\"]", str(requirement.marker or ""))
    return match[1] if match else ""


def installed_version(name: str) -> str | None:
    """Return the version of a distribution; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def environment(variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that affect artel and its libraries with their values; for secrets only "set"."""
    return {name: _display_value(name, value) for name, value in sorted(variables.items()) if _NAMES.fullmatch(name)}


def _display_value(name: str, value: str) -> str:
    # An address can have a password, as https://user:password@host.
    if _SECRET.search(name) or "@" in value:
        return "set" if value else "empty"
    return value if len(value) <= _MAX_VALUE_CHARS else f"{value[:_MAX_VALUE_CHARS]}…"
