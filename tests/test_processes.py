"""What a process holds of its process group."""

import sys

import pytest

from support import WORKERS
from support.runs import torchrun


@pytest.mark.ci
@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="looks at its threads in /proc")
def test_the_end_of_a_model_does_not_destroy_the_group_whose_threads_it_would_wait_for(tmp_path):
    """Some interrupted runs never ended: gloo's thread waited for the lock that the main thread held."""
    done = torchrun(2, str(WORKERS / "interrupted_ddp.py"), str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert all(int((tmp_path / rank).read_text()) > 0 for rank in ("0", "1"))
