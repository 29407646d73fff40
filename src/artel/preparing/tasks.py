"""The tasks of a workspace, by stage and number, as engines run them."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Literal

from artel.objectives import Objective, build_objective
from artel.preparing.assembly import write_shard
from artel.preparing.prepared_shard import PreparedShard, prepared_shards, write_lines, write_prepared_shard
from artel.preparing.selection import ShardPlan, shard_plans
from artel.preparing.selection_rules import find_near_duplicates
from artel.preparing.workspace import Workspace
from artel.text import BenchmarkIndex
from artel.text.dedup.near import BAND_GROUPS
from artel.tokens import load_tokenizer

Stage = Literal["lines", "text", "near", "shards"]


class Tasks:
    """The tasks of a workspace. A finished task is not run again."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace

    def unfinished(self, stage: Stage) -> list[int]:
        """Return the numbers of the stage's unfinished tasks."""
        if stage == "near":
            count = BAND_GROUPS
        else:
            count = len(self._plans if stage == "shards" else self.workspace.input_shards)
        return [number for number in range(count) if not self._result(stage, number).exists()]

    def run(self, stage: Stage, number: int) -> None:
        """Run a task, unless its result exists. Its errors are InputError or WorkError."""
        workspace, result = self.workspace, self._result(stage, number)
        if result.exists():
            return
        if stage == "lines":
            write_lines(workspace.config, workspace.input_shards[number], result, self._benchmarks)
        elif stage == "text":
            shard, earlier = workspace.input_shards[number], workspace.repeated_lines_path(number)
            write_prepared_shard(workspace.config, shard, self._objective, result, earlier, self._benchmarks)
        elif stage == "near":
            find_near_duplicates(workspace, self._prepared, number)
        else:
            write_shard(workspace, self._prepared, self._plans[number], self._objective)

    def _result(self, stage: Stage, number: int) -> Path:
        """Return the file or folder that exists if the task is finished."""
        if stage == "shards":
            return self.workspace.shard_path(self._plans[number].folder)
        return {
            "lines": self.workspace.lines_path,
            "text": self.workspace.text_path,
            "near": self.workspace.near_duplicates_path,
        }[stage](number)

    @cached_property
    def _prepared(self) -> list[PreparedShard]:
        return prepared_shards(self.workspace)

    @cached_property
    def _plans(self) -> list[ShardPlan]:
        return shard_plans(self.workspace)

    @cached_property
    def _benchmarks(self) -> BenchmarkIndex | None:
        return self.workspace.benchmark_index()

    @cached_property
    def _objective(self) -> Objective:
        return build_objective(self.workspace.config, load_tokenizer(str(self.workspace.tokenizer_path)))
