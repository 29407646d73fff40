"""The recipes of the package: run files that work unchanged and can be copied."""

from __future__ import annotations

from importlib.resources import files


def recipe_names() -> list[str]:
    """Return the names of the recipes, sorted."""
    return sorted(entry.name.removesuffix(".yaml") for entry in _folder().iterdir() if entry.name.endswith(".yaml"))


def recipe_text(name: str) -> str:
    """Return the YAML text of a recipe. Raise KeyError for an unknown name."""
    if name not in recipe_names():
        raise KeyError(name)
    return (_folder() / f"{name}.yaml").read_text(encoding="utf-8")


def _folder():  # type: ignore[no-untyped-def]  # importlib.resources' Traversable moved between Python versions
    return files("artel.config") / "recipes"
