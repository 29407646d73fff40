"""Each tutorial runs as printed, page by page, in a folder that is not the clone: relative paths, defaults."""

import pytest

from printed.walking import cases, go
from printed.walks_tutorials import TUTORIALS


@pytest.mark.processes
@pytest.mark.parametrize("walk", cases(TUTORIALS))
def test_commands_do_as_printed(walk, tmp_path, home):
    go(walk, tmp_path, home)
