"""The tasks of a workspace by name and number: what an engine is handed, here or on a cluster."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Literal

from artel.objectives import Objective, objective_of
from artel.preparing.assembly import write_shard
from artel.preparing.input_shards import write_lines, write_part
from artel.preparing.selection import Made, ShardPlan, find_near, made_parts, shard_plans
from artel.preparing.workspace import Workspace
from artel.text.dedup.near import BAND_GROUPS
from artel.tokens import load_tokenizer

Stage = Literal["lines", "text", "near", "shards"]


class Tasks:
    """What is to be done in a workspace; a task that is done is not done again."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace

    def left(self, stage: Stage) -> list[int]:
        """The numbers of the stage's tasks that are not done."""
        tasks = {"near": lambda: range(BAND_GROUPS), "shards": lambda: self._plans}.get(
            stage, lambda: self.workspace.parts
        )
        count = len(tasks())
        return [number for number in range(count) if not self._result(stage, number).exists()]

    def do(self, stage: Stage, number: int) -> None:
        """Do a task. Raises InputError, WorkError."""
        workspace = self.workspace
        if self._result(stage, number).exists():
            return
        if stage == "lines":
            write_lines(workspace.run, workspace.parts[number], self._result(stage, number))
        elif stage == "text":
            part, earlier = workspace.parts[number], workspace.earlier(number)
            write_part(workspace.run, part, self._objective, self._result(stage, number), earlier)
        elif stage == "near":
            find_near(workspace, self._made, number)
        else:
            write_shard(workspace, self._made, self._plans[number], self._objective)

    def _result(self, stage: Stage, number: int) -> Path:
        """The file or folder that is there when a task is done."""
        if stage == "shards":
            return self.workspace.shard(self._plans[number].folder)
        return {"lines": self.workspace.lines, "text": self.workspace.text, "near": self.workspace.near}[stage](number)

    @cached_property
    def _made(self) -> list[Made]:
        return made_parts(self.workspace)

    @cached_property
    def _plans(self) -> list[ShardPlan]:
        return shard_plans(self.workspace)

    @cached_property
    def _objective(self) -> Objective:
        return objective_of(self.workspace.run, load_tokenizer(str(self.workspace.tokenizer)))
