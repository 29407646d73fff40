"""A walk: its commands one after another, and what went wrong with any of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from printed import inputs
from printed.commands import ROOT
from printed.network import library
from printed.running import run
from printed.walks import Step, Walk
from support.runs import DEEPSPEED
from support.sockets import free_ports


def cases(walks: tuple[Walk, ...]) -> list:
    """Parameters of a test, a walk each."""
    limit = pytest.mark.timeout(3000)  # each command has its own; this one is for a walk on a machine that is busy
    marks = {True: [pytest.mark.long, limit], False: [limit]}
    return [pytest.param(walk, id=walk.name.replace(" ", "-"), marks=marks[walk.long]) for walk in walks]


def go(walk: Walk, folder: Path, home: Path) -> None:
    """Fails with what every command of the walk that does not do as printed has said."""
    if walk.deepspeed and not DEEPSPEED.is_dir():
        pytest.skip("deepspeed is not beside the environment: see the Makefile")
    if walk.package:
        pytest.importorskip(walk.package, reason="its extra is not installed")
    for make in walk.needs:
        make(folder)
    for name in walk.hub:
        inputs.with_hub(Path(os.environ["HF_HOME"]), name)
    failed = []
    with library() as variables:
        if walk.deepspeed:
            variables["PYTHONPATH"] = os.pathsep.join(
                [str(DEEPSPEED), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
            )
        for step in (*map(Step, walk.before), *walk.steps):
            command = step.instead or f"{step.text} {step.more}".strip()
            command = command.replace("{clone}", str(ROOT)).replace("{port}", str(free_ports(1)[0]))
            done = run(command, folder, home, step.typed, variables)
            output = done.stdout + done.stderr
            if (
                done.returncode != step.status
                or (step.leaves and not (folder / step.leaves).exists())
                or step.says not in output
            ):
                failed.append(
                    f"$ {command}\n{output[-4000:]}\n(status {done.returncode}; leaves {step.leaves or '-'}; "
                    f"says {step.says or '-'})"
                )
    assert not failed, "\n\n".join(failed)
