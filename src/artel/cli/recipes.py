"""`artel recipes`: list, print or copy the run files of the package."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from artel.cli.common import AsJson, print_json, print_status
from artel.cli.streams import print_result

app = typer.Typer(help="List, print or copy the recipes of the package: ls, cat, cp.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(help="Name of a recipe, as listed by `artel recipes ls`.")]


@app.command("ls")
def ls(as_json: AsJson = False) -> None:
    """List the recipes, each with its first line.

    Example: artel recipes ls
    """
    from artel.config import recipe_names, recipe_text

    first_lines = {name: recipe_text(name).splitlines()[0].lstrip("# ") for name in recipe_names()}
    if as_json:
        print_json({"recipes": first_lines})
        return
    for line in first_lines.values():
        print_result(line)


@app.command("cat")
def cat(name: Name) -> None:
    """Print a recipe.

    Example: artel recipes cat tolstoy-scratch
    """
    print_result(_read_recipe(name), end="")


@app.command("cp")
def cp(name: Name, file: Annotated[Path, typer.Argument(help="File or folder to copy to.")]) -> None:
    """Copy a recipe to a file.

    Example: artel recipes cp tolstoy-scratch run.yaml
    """
    from artel.storage import check_new_file, write_output

    if file.is_dir():
        file = file / f"{name}.yaml"
    check_new_file(file)
    write_output(file, _read_recipe(name))
    print_status(f"wrote {file}. Next: artel train {file}")


def _read_recipe(name: str) -> str:
    import difflib

    from artel.config import recipe_names, recipe_text
    from artel.errors import InputError

    try:
        return recipe_text(name)
    except KeyError:
        similar = difflib.get_close_matches(name, recipe_names(), 1)
        fix = f"did you mean {similar[0]}?" if similar else f"recipes are: {', '.join(recipe_names())}"
        raise InputError.at(name, "unknown recipe", fix) from None
