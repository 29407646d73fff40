"""What `artel plan` says of memory on a CPU goes by where tensors come to lie: at the addresses of training's own."""

import json
import platform
import random
import shutil
import subprocess
import sys

import pytest
import torch

from artel.planning.plan.cpu_heap import LARGE, Range
from artel.training.memory import retained_host_memory
from support.waiting import LIMIT

EVENTS = 300


def events():
    """(number, bytes) of tensors that come, of 256 KB to 3 MB and any odd size; (-number, 0) of those that go."""
    chance, live = random.Random(0), []
    for number in range(1, EVENTS + 1):
        yield number, chance.choice((LARGE, LARGE + 4, chance.randrange(LARGE, 12 * LARGE, 4)))
        live.append(number)
        if chance.random() < 0.8:
            yield -live.pop(chance.randrange(len(live))), 0


def planned_addresses():
    span, taken = Range(), {}
    for number, size in events():
        if number > 0:
            taken[number] = span.take(size)
            yield taken[number][0]
        else:
            span.give(*taken.pop(-number))


def real_addresses():
    live = {}
    with retained_host_memory(torch.device("cpu")):
        for number, size in events():
            if number > 0:
                live[number] = torch.empty(size // 4)
                yield live[number].data_ptr()
            else:
                del live[-number]


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc" or not shutil.which("g++"), reason="needs glibc and g++")
def test_tensors_lie_where_the_plan_says():
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    first, *_ = real = json.loads(done.stdout)
    planned = list(planned_addresses())
    assert [address - first for address in real] == [address - planned[0] for address in planned]


def test_what_is_free_joins_and_is_used_again():
    span = Range()
    pieces = [span.take(LARGE) for _ in range(8)]
    for piece in pieces[::2] + pieces[1::2]:
        span.give(*piece)
    assert span.take(8 * LARGE) == (0, 8 * LARGE)
    assert span.used == 8 * LARGE  # one page of 2 MB


if __name__ == "__main__":
    print(json.dumps(list(real_addresses())))
