"""Each command in the recipes' headers runs as printed in a folder that is not the clone: relative paths, defaults."""

import pytest

from printed.walking import cases, go
from printed.walks_recipes import RECIPES


@pytest.mark.processes
@pytest.mark.parametrize("walk", cases(RECIPES))
def test_commands_do_as_printed(walk, tmp_path, home):
    go(walk, tmp_path, home)
