"""RUN/starts.jsonl: a line for each start of a run, by which it can be repeated and its report shows the restarts."""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from typing import Any

import torch
import transformers

import artel
from artel.host import processor
from artel.models.flops import device_name
from artel.training.metrics.jsonl import Lines
from artel.training.run import Run


def note_start(run: Run, chosen: dict[str, Any]) -> None:
    """Add the line of this start; the first rank calls it. `chosen` says what was chosen for keys that are `auto`."""
    world = run.world
    lines = Lines(run.folder.starts)
    lines.add(
        {
            "step": run.step,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "processes": world.size,
            "environment": {
                "hosts": -(-world.size // world.on_host),
                "device": processor() if world.device.type == "cpu" else device_name(world.device),
                "platform": platform.platform(),
                "python": platform.python_version(),
                "artel": artel.__version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
            "chosen": chosen | {"train.steps": run.length.steps},
        }
    )
    lines.close()
