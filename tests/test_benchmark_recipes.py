"""benchmarks/recipes.py knows every recipe: it trains here, or the page says why not."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from recipes import HERE, NOT_HERE

from artel.config import recipe_names


def test_each_recipe_is_in_one_of_the_two_lists_and_nothing_else_is():
    assert sorted([*HERE, *NOT_HERE]) == sorted(recipe_names())
