"""Each command of the README runs as printed in a folder that is not the clone, relative paths and defaults and all."""

import pytest

from printed.walking import cases, go
from printed.walks_readme import README


@pytest.mark.processes
@pytest.mark.ci
@pytest.mark.parametrize("walk", cases(README))
def test_commands_do_as_printed(walk, tmp_path, home):
    go(walk, tmp_path, home)
