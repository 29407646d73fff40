"""Tools and environments between the replies of an answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from artel.generation import GenerationPrompt
from artel.objectives.hooks import RoundSettings
from artel.parallel import ParallelStrategy, World
from artel.rewards import Job, RewardPool
from artel.text import Message
from artel.tokens import Tokenizer
from artel.training.drafts import Draft

_Results = list[list[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Interaction:
    """Runs the tools and environments of answers in the reward processes.

    If a strategy shards the weights, all ranks write the same answers and must call these methods together. The first
    rank then runs everything for them.
    """

    settings: RoundSettings
    strategy: ParallelStrategy
    world: World
    pool: RewardPool | None
    """None if there are neither tools nor environments."""
    tokenizer: Tokenizer
    measure: Callable[[], AbstractContextManager[None]]
    """Called around each use of the processes."""
    report: Callable[[float], None]
    """Called with the finished fraction."""

    @property
    def _has_environment(self) -> bool:
        return self.settings.environment is not None

    def open(self, drafts: Sequence[Draft]) -> None:
        """Create the environments, and add their first messages to the prompts."""
        if not self._has_environment:
            return
        requests = [[_request(draft, "reset")] for draft in drafts]
        for draft, (opening,) in zip(drafts, self._respond(drafts, requests), strict=True):
            if reason := opening.get("failure"):
                draft.end_environment(reason)
            elif opening["text"] is not None:
                draft.open(opening["text"])

    def answer(self, drafts: Sequence[Draft], end: GenerationPrompt) -> None:
        """Answer the last replies of drafts. End the drafts that get no further reply. `end`: the ends of a reply."""
        requests = []
        for draft in drafts:
            draft.is_over = draft.cut_off or draft.replies == self.settings.turns
            calls = draft.calls if self.settings.tools is not None else ()
            if calls and not draft.is_over:
                requests.append([{"call": {"name": call.name, "arguments": call.arguments}} for call in calls])
            elif self._has_environment and not calls:
                requests.append([_request(draft, "step", reply=draft.text)])
            else:
                requests.append([])
                draft.is_over = True
        results = self._respond(drafts, requests)
        for draft, draft_requests, draft_results in zip(drafts, requests, results, strict=True):
            if not draft_requests:
                continue
            if "call" in draft_requests[0]:
                draft.add_messages(self._results(draft, draft_results), end, self.tokenizer)
            else:
                self._continue(draft, draft_results[0], end)

    def close(self, drafts: Sequence[Draft]) -> None:
        """End the environments, and read their rewards."""
        if not self._has_environment:
            return
        ended = [draft for draft in drafts if "environment" not in draft.failures]
        requests = [[_request(draft, "reward")] for draft in ended]
        for draft, (result,) in zip(ended, self._respond(ended, requests), strict=True):
            draft.reward = result.get("value")
            if reason := result.get("failure"):
                draft.end_environment(reason)

    def _respond(self, drafts: Sequence[Draft], requests: list[list[dict[str, Any]]]) -> _Results:
        """Return the results of the requests of each draft."""
        results: _Results = [[] for _ in drafts]
        positions = [position for position, draft_requests in enumerate(requests) if draft_requests]
        if not positions:
            return results
        jobs = [Job(drafts[position].position, requests[position]) for position in positions]

        def respond() -> _Results:
            assert self.pool is not None
            with self.measure():
                return self.pool.respond(jobs, self.report)

        answers = respond() if self.strategy.holds_full_model else self.world.call_on_first(respond)
        for position, answer in zip(positions, answers, strict=True):
            results[position] = answer
        return results

    @staticmethod
    def _results(draft: Draft, results: list[dict[str, Any]]) -> list[Message]:
        """Return the messages with the results of the draft's calls."""
        messages = []
        for call, result in zip(draft.calls, results, strict=True):
            if reason := result.get("failure"):
                draft.fail("tools", f"{call.name}: {reason}")
                result = {"text": f"error: {reason}"}
            messages.append(draft.make_message(result["text"], call))
        return messages

    def _continue(self, draft: Draft, result: dict[str, Any], end: GenerationPrompt) -> None:
        """Continue a draft with the message of its environment."""
        if reason := result.get("failure"):
            draft.end_environment(reason)
            return
        text = result["text"]
        draft.steps.append((draft.text, text))
        draft.is_over = draft.is_over or result["done"]
        if text is None:
            return
        message = draft.make_message(text)
        if draft.is_over:
            draft.add_last_message(message)
        else:
            draft.add_messages([message], end, self.tokenizer)


def _request(draft: Draft, action: str, **fields: Any) -> dict[str, Any]:
    """Return a request to the environment of a draft, with what is needed to create it again (`environments.py`)."""
    row = draft.reference["columns"]
    state = {"answer": draft.name, "row": row, "opening": draft.opening, "steps": draft.steps}
    return {"action": action, **state, **fields}
