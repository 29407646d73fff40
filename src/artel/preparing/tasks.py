"""The tasks of a workspace, by stage and index, as engines run them."""

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
        """Return the indices of the stage's unfinished tasks."""
        if stage == "near":
            num_tasks = BAND_GROUPS
        else:
            num_tasks = len(self._plans if stage == "shards" else self.workspace.input_shards)
        return [index for index in range(num_tasks) if not self._result_path(stage, index).exists()]

    def run(self, stage: Stage, task_index: int) -> None:
        """Run a task, unless its result exists. Its errors are InputError or WorkError."""
        workspace = self.workspace
        result = self._result_path(stage, task_index)
        if result.exists():
            return
        if stage == "lines":
            write_lines(workspace.config, workspace.input_shards[task_index], result, self._benchmarks)
        elif stage == "text":
            shard = workspace.input_shards[task_index]
            repeated_lines = workspace.repeated_lines_path(task_index)
            write_prepared_shard(workspace.config, shard, self._objective, result, repeated_lines, self._benchmarks)
        elif stage == "near":
            find_near_duplicates(workspace, self._prepared_shards, task_index)
        else:
            write_shard(workspace, self._prepared_shards, self._plans[task_index], self._objective)

    def _result_path(self, stage: Stage, task_index: int) -> Path:
        """Return the file or folder that exists if the task is finished."""
        if stage == "shards":
            return self.workspace.shard_path(self._plans[task_index].folder)
        return {
            "lines": self.workspace.lines_path,
            "text": self.workspace.text_path,
            "near": self.workspace.near_duplicates_path,
        }[stage](task_index)

    @cached_property
    def _prepared_shards(self) -> list[PreparedShard]:
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
