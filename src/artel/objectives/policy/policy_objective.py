"""Learning from rewards: in each round a policy writes answers, rewards score them, and it learns from them.

`training/rounds.py` creates the rounds. A sample is a prompt; its reference has the columns that rewards need. A row of
a batch is a prompt with the answers that are learned. The loss is in `losses.py`, its presets in `config.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from artel.config import RunConfig
from artel.errors import InputError, Problem
from artel.generation import GenerationPrompt
from artel.models import IGNORED
from artel.objectives.answer_rows import Answer, answer_tensors
from artel.objectives.base import Objective, directions
from artel.objectives.causal import Causal
from artel.objectives.chat import Chat, template_problems, template_version
from artel.objectives.collate import next_token_view
from artel.objectives.conversation.calls import dump_conversation, load_conversation
from artel.objectives.conversation.dialogue import Dialogue
from artel.objectives.conversation.frame import ConversationError
from artel.objectives.conversation.writer import ConversationWriter
from artel.objectives.decoding import Decoding, writing_problems
from artel.objectives.hooks import RoundSettings, Teacher, TeacherCall
from artel.objectives.policy.config import PolicyConfig
from artel.objectives.rollouts import Rollout, Round, Segment
from artel.objectives.types import Batch, DocumentSamples, Presentation, TokenView
from artel.storage import user_path
from artel.text import Document, DroppedRecord, Message, Prompt, Record, Rejected, ToolCall, Tools
from artel.text.tool_calls import tool_names
from artel.text.tool_functions import read_functions
from artel.tokens import Rows, Sample, StoreSplit, Tokenizer

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel


_TOOLS = "policy.tools"
_TURNS = 5
"""Maximum number of replies in an answer, unless `policy.turns` is set."""


class PolicyOptimization(Objective):
    auto_class = "AutoModelForCausalLM"
    learns_from = ("prompts",)
    presentation = Presentation(
        "writes answers that earn rewards", pipeline_tag="text-generation", finetuning_rate=1e-6, is_offered=False
    )
    section = "policy"
    decided_by_records = ("form",)
    generates = True
    has_answers = True
    scores_answers = True
    sums = ("loss", "targets", "tokens", "answers", "clipped_low", "clipped_high", "kl", "difference", "fresh_tokens")
    metric_directions = directions(lower=[], higher=["reward"])
    main_metric = "reward"

    def __init__(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        super().__init__(config, tokenizer)
        self._policy = config.settings(PolicyConfig)
        self._loss_settings = self._policy.resolve()
        base = Chat if self._policy.form == "conversation" else Causal
        self._base: Chat | Causal = base(config, tokenizer)
        self._writer = ConversationWriter(tokenizer, self._base.template) if isinstance(self._base, Chat) else None
        self.inserts_date = self._base.inserts_date
        self._width = self._loss_settings.learned_answers or self._policy.answers
        self._shares_prompts = False
        self._call_reference: TeacherCall | None = None
        self._groups: dict[tuple[int, int], list[Rollout]] = {}
        self._advantages: dict[tuple[int, int], np.ndarray] = {}
        self._round_metrics: dict[str, float] = {}
        self._is_fresh = False
        self._assumed_length: int | None = None

    # The run file

    @classmethod
    def problems(cls, config: RunConfig) -> list[Problem]:
        policy, problems = config.settings(PolicyConfig), [*super().problems(config), *template_problems(config)]
        if not policy.rewards and policy.environment is None:
            fix = "write at least one, e.g. rewards: [{equals: {column: answer}}] or rewards: [rewards.py:exact]"
            problems.append(Problem("policy.rewards", "is empty, so nothing tells good answers from bad ones", fix))
        problems += _turn_problems(policy)
        if policy.new_tokens >= config.data.block:
            what = f"{policy.new_tokens:,} tokens of an answer leave no space for a prompt in data.block"
            problems.append(Problem("policy.new_tokens", what, f"write less than {config.data.block:,}"))
        if policy.resolve().needs_reference and config.model.lora is None and config.model.from_ is None:
            key, other = ("policy.kl", "policy.kl: 0") if policy.kl > 0 else ("policy.preset", "another preset")
            what = "the loss compares with the model before training, but a model from scratch has learned nothing"
            problems.append(Problem(key, what, f"write model: {{from: FOLDER}}, or {other}"))
        problems += writing_problems(config)
        if config.parallel.context > 1:
            problems.append(
                Problem("parallel.context", "answers to a prompt share a row, which is not split", "write 1")
            )
        return problems

    @classmethod
    def decide(cls, config: RunConfig, records: Iterable[Record]) -> dict[str, Any]:
        """Return the form of the prompts: conversation if they are messages, text if they are plain texts."""
        forms: dict[str, str] = {}
        for record in records:
            assert isinstance(record.fields, Prompt)
            forms.setdefault("conversation" if record.fields.messages else "text", record.origin)
        if len(forms) > 1:
            what = f"{forms['conversation']} is a conversation, {forms['text']} a plain text"
            raise InputError.at("policy.form", what, "write all prompts in one form")
        form = next(iter(forms), "text")
        if form == "text" and config.settings(PolicyConfig).has_turns:
            raise InputError([_form_problem(f"{forms.get('text', 'the data')} is a plain text")])
        return {"form": form}

    @classmethod
    def special_tokens(cls, config: RunConfig) -> list[str]:
        return Chat.special_tokens(config) if config.settings(PolicyConfig).form == "conversation" else []

    @classmethod
    def store_settings(cls, config: RunConfig) -> Any:
        policy = config.settings(PolicyConfig)
        settings = [config.data.block, policy.new_tokens, policy.form, config.chat.template, template_version(config)]
        if not policy.has_turns:
            return settings
        functions = b""
        if (
            policy.tools is not None and (file := user_path(policy.tools, _TOOLS)).is_file()
        ):  # else `samples` reports it
            functions = file.read_bytes()
        return [*settings, "turns", xxhash.xxh3_64_hexdigest(functions)]

    @property
    def loss_description(self) -> str:
        return self._policy.preset

    @property
    def decoding(self) -> Decoding:
        """The decoding of `chat` if prompts are conversations, else that of `causal`."""
        return self._base

    # Samples

    @cached_property
    def _functions(self) -> Tools:
        """The descriptions of the functions in `policy.tools`."""
        return read_functions(self._policy.tools, _TOOLS).tools if self._policy.tools else ()

    def _tools(self, prompt: Prompt) -> Tools:
        """Return the functions of a prompt: those of `policy.tools`, and those of the record with other names."""
        names = tool_names(self._functions)
        return (*self._functions, *(tool for tool in prompt.tools if not {*tool_names((tool,))} & {*names}))

    def samples(self, documents: list[Document]) -> Iterator[DocumentSamples | Rejected | DroppedRecord]:
        if self._functions and self._writer is not None:
            messages = (
                Message("user", "a"),
                Message("assistant", "", tool_calls=(ToolCall("f", {}),)),
                Message("tool", "b"),
            )
            self._writer.check_tools(messages, self._functions, _TOOLS)
        for document in documents:
            record = document.record
            assert isinstance(record.fields, Prompt)
            try:
                yield self._convert(record.fields, record.origin, record.set_name)
            except ConversationError as error:
                detail = f"{error}; fix it, or use another chat.template"
                yield Rejected(record.origin, "template", detail, record.set_name)

    def _convert(self, prompt: Prompt, origin: str, set_name: str) -> DocumentSamples | Rejected | DroppedRecord:
        question: str | list[dict[str, str]] = prompt.text
        dialogue = {}
        if self._writer is not None:
            messages = prompt.messages or (Message("user", prompt.text),)
            tools = self._tools(prompt)
            if self._writer.has_control_token(messages, tools):
                return DroppedRecord("control_token")
            ids = self._writer.prompt_ids(messages, tools)
            if self._policy.has_turns:
                dialogue = {"dialogue": dump_conversation(messages, tools)}
            question = [{"role": message.role, "content": message.content} for message in messages]
        elif prompt.messages:
            return Rejected(origin, "no_text", "it is a conversation; write policy.form: conversation", set_name)
        else:
            ids = self.tokenizer.prompt(prompt.text)
        if len(ids) + self._policy.new_tokens > self.config.data.block:
            return DroppedRecord("longer_than_block")
        reference = {"prompt": question, "columns": dict(prompt.columns), **dialogue}
        return DocumentSamples([Sample(np.array(ids, dtype=np.int64))], reference=reference)

    def token_views(self, rows: Rows) -> list[TokenView]:
        ids = rows.ids[0, : rows.lengths[0]]
        return [next_token_view(ids, np.full(len(ids) - 1, IGNORED), "prompt")]

    # The model before training

    @property
    def teacher(self) -> Teacher | None:
        """The model before training, if the loss needs it. Under an adapter it is the base, which is there anyway."""
        if not self._loss_settings.needs_reference or self.config.model.lora is not None:
            return None
        return Teacher(self.config.model.from_ or "", None, is_initial_model=True)

    def set_teacher(self, call: TeacherCall, model_config: PreTrainedConfig) -> None:
        self._call_reference = call

    # Rounds

    @property
    def rounds(self) -> RoundSettings:
        from artel.generation.generate import Sampling

        policy = self._policy
        sampling = Sampling(policy.new_tokens, policy.temperature, policy.top_k, policy.top_p)
        return RoundSettings(
            steps=policy.steps,
            answers=policy.answers,
            sampling=sampling,
            rewards=policy.rewards,
            resample=self._loss_settings.resample,
            reward_seconds=policy.reward_timeout,
            reward_bytes=policy.reward_memory,
            penalty=policy.overlong_penalty if policy.overlong == "punish" else None,
            turns=(policy.turns or _TURNS) if policy.has_turns else 1,
            tools=policy.tools,
            environment=policy.environment,
            engine=policy.engine,
        )

    def assume_answer_length(self, tokens: int | None) -> None:
        self._assumed_length = tokens

    def round_prompt(self, model: PreTrainedModel, ids: list[int]) -> GenerationPrompt:
        """Return a sample's prompt, with the tokens and texts that end an answer."""
        empty_prompt = self.decoding.generation_prompt(model, "")
        assert empty_prompt is not None
        # Some models begin a call with a control token: [TOOL_CALLS], <|python_tag|>.
        return GenerationPrompt(ids, empty_prompt.end, empty_prompt.special_tokens or self._policy.tools is not None)

    def dialogue(self, reference: Mapping[str, Any]) -> Dialogue | None:
        if not self._policy.has_turns:
            return None
        assert self._writer is not None
        return Dialogue(self._writer, *load_conversation(reference["dialogue"]))

    def set_round(self, round_: Round, *, is_fresh: bool, seconds: Mapping[str, float]) -> None:
        import torch

        from artel.objectives.policy.round_metrics import engine_metrics, reward_metrics, turn_metrics

        rewards = torch.from_numpy(round_.rewards)
        learned = torch.tensor([self._is_learned(rollout) for rollout in round_.rollouts]).reshape(rewards.shape)
        self._set_groups(round_, rewards, learned)
        self._is_fresh = is_fresh
        self._round_metrics = reward_metrics(round_, rewards, learned)
        self._round_metrics |= {f"seconds_{activity}": round(duration, 3) for activity, duration in seconds.items()}
        if self._policy.has_turns:
            self._round_metrics |= turn_metrics(round_)
        if self._policy.engine is not None:
            self._round_metrics |= engine_metrics(round_, self._corrections if self._corrects else None)

    def _set_groups(self, round_: Round, rewards: torch.Tensor, learned: torch.Tensor) -> None:
        """Set the answers that are learned and their advantages. Arguments: float64 and bool (prompts, answers)."""
        import torch

        from artel.objectives.policy.losses import advantages, best_and_worst

        self._groups = round_.groups()
        count = self._loss_settings.learned_answers
        if count is None:
            group_advantages = advantages(rewards, self._loss_settings.advantage).numpy()
            self._advantages = dict(zip(self._groups, group_advantages, strict=True))
            return
        indices = best_and_worst(rewards.masked_fill(~learned, torch.nan))[:, :count].tolist()
        self._groups = {
            key: [group[index] for index in answers if index >= 0]
            for (key, group), answers in zip(self._groups.items(), indices, strict=True)
        }
        self._advantages = dict.fromkeys(self._groups, np.ones(self._width))

    def training_metrics(self, totals: dict[str, float]) -> dict[str, float]:
        tokens = max(1.0, totals["tokens"])
        has_bounds = self._loss_settings.ratio != "none"
        metrics = {name: totals[name] / tokens for name in ("clipped_low", "clipped_high") if has_bounds}
        if self._loss_settings.needs_reference:
            metrics["kl"] = totals["kl"] / tokens
        if totals["fresh_tokens"]:
            metrics["mismatch"] = totals["difference"] / totals["fresh_tokens"]
        return self._round_metrics | metrics

    # Batches and loss

    def check(self, model: PreTrainedModel) -> None:
        """Also let the answers to one prompt share a row if the model supports it."""
        from artel.models.document_mask import obeys_shared_prefixes

        self._shares_prompts = obeys_shared_prefixes(model)

    def batch(self, rows: Rows) -> Batch:
        """Return `answer_tensors` of the prompts with the learned answers, and the other tensors of the loss.

        `advantages` float32 (samples, answers); `old_log_probs` float32 (count,), of the targets; `is_fresh` (). If a
        prompt is not in the round, it gets answers of the maximum length, so that their memory can be measured.
        """
        import torch

        samples, groups, entries = [], [], []
        no_answer = Answer(np.empty(0, dtype=np.int64), np.empty(0))
        for row in range(len(rows.valid)):
            prompt = rows.ids[row, : rows.lengths[row]]
            group = self._groups.get((int(rows.indices[row]), int(rows.epochs[row])))
            group = self._longest_group(prompt) if group is None else group
            groups.append(group if rows.valid[row] else [])
            learned_group = [self._is_learned(rollout) and bool(rows.valid[row]) for rollout in group]
            missing = self._width - len(group)
            samples.append(
                [
                    _join(segment, learned=is_learned)
                    for rollout, is_learned in zip(group, learned_group, strict=True)
                    for segment in rollout.segments
                ]
                + [no_answer] * missing
            )
            entries += [len(rollout.segments) for rollout in group] + [1] * missing
        tensors = answer_tensors(samples, share_prompts=self._shares_prompts, entries=entries)
        learned = [rollout for group in groups for rollout in group if self._is_learned(rollout)]
        old_log_probs = np.concatenate([np.empty(0), *(rollout.written for rollout in learned)])
        keys = [(int(index), int(epoch)) for index, epoch in zip(rows.indices, rows.epochs, strict=True)]
        no_advantages = np.zeros(self._width)
        tensors["advantages"] = torch.tensor(
            np.stack([self._advantages.get(key, no_advantages) for key in keys]), dtype=torch.float32
        )
        tensors["old_log_probs"] = torch.tensor(old_log_probs, dtype=torch.float32)
        if self._corrects:
            tensors["corrections"] = torch.tensor(
                np.concatenate([np.empty(0), *(self._corrections(rollout)[0] for rollout in learned)]),
                dtype=torch.float32,
            )
        tensors["is_fresh"] = torch.tensor(float(self._is_fresh))
        lengths = [rollout.length for rollout in learned]
        targets = self._loss_settings.targets(tokens=sum(lengths), answers=len(lengths))
        segments = [segment for group in groups for rollout in group for segment in rollout.segments]
        count = sum(len(segment.prompt_ids) + len(segment.ids) for segment in segments)
        return Batch(tensors, targets=targets, tokens=count)

    def _is_learned(self, rollout: Rollout) -> bool:
        """True if the answer counts in the loss: it has a reward, and `overlong: mask` does not exclude it."""
        is_masked = rollout.cut_off and self._policy.overlong == "mask"
        return rollout.reward is not None and rollout.length > 0 and not is_masked

    @property
    def _corrects(self) -> bool:
        """True if the loss corrects for the difference to the server that wrote."""
        engine = self._policy.engine
        return engine is not None and engine.correction != "none" and self._loss_settings.ratio != "none"

    def _corrections(self, rollout: Rollout) -> tuple[np.ndarray, np.ndarray]:
        """Return `corrections` of the tokens that were written."""
        from artel.objectives.policy.losses import corrections

        engine = self._policy.engine
        assert engine is not None
        written, by_engine = np.array(rollout.written), np.array(rollout.engine_written or rollout.written)
        return corrections(written - by_engine, engine.correction, engine.limit)

    def _longest_group(self, prompt: np.ndarray) -> list[Rollout]:
        """Return answers of the maximum length, or of the assumed one, without common tokens."""
        length = self._assumed_length or self._policy.new_tokens
        return [
            Rollout(
                number=0, index=0, epoch=0, answer=answer, attempt=0, seed=0, prompt_ids=prompt.tolist(),
                ids=[answer % self.tokenizer.vocabulary] * length, log_probs=[0.0] * length, text="", cut_off=False,
                rewards={}, reward=0.0, failures={},
            )
            for answer in range(self._width)
        ]  # fmt: skip

    def loss(self, model: PreTrainedModel, batch: Batch) -> torch.Tensor:
        import torch

        from artel.models.lora.adapters import adapter_off
        from artel.objectives.policy.losses import policy_sums

        log_probs = self._log_probs(model, batch)
        reference = None
        if self._call_reference is not None:
            with torch.no_grad():
                reference = self._call_reference(lambda initial_model: self._log_probs(initial_model, batch))
        elif self._loss_settings.needs_reference:
            with torch.no_grad(), adapter_off(model):
                reference = self._log_probs(model, batch)
        tensors = batch.tensors
        sums = policy_sums(
            log_probs, tensors["old_log_probs"], reference, tensors["advantages"], tensors["answer_targets"],
            self._loss_settings, tensors.get("corrections"),
        )  # fmt: skip
        values = sums._asdict()
        values["difference"] = values["difference"] * tensors["is_fresh"]
        values["fresh_tokens"] = values["tokens"] * tensors["is_fresh"]
        return torch.stack([values[name] for name in self.sums])

    def _log_probs(self, model: PreTrainedModel, batch: Batch) -> torch.Tensor:
        """Return the log-probability of each target at the sampling temperature, float32 (count,)."""
        from artel.models.document_mask import shared_prefix_inputs
        from artel.models.logits_loss import target_log_probs

        tensors = batch.tensors
        inputs = {"input_ids": tensors["input_ids"], "use_cache": False}
        if "branches" in tensors:
            shared = (tensors[name] for name in ("documents", "branches", "positions"))
            inputs |= shared_prefix_inputs(model, *shared)
        log_probs, _ = target_log_probs(
            model, inputs, tensors["targets"], tensors["target_positions"], temperature=self._policy.temperature
        )
        return log_probs

    def answer_log_probs(
        self, model: PreTrainedModel, answers: Sequence[Sequence[Segment]], device: torch.device
    ) -> list[list[float]]:
        segments = [segment for answer in answers for segment in answer]
        written = [segment for segment in segments if segment.written]
        values: list[float] = []
        for start in range(0, len(written), self._width):  # as many as a step learns at a time, for their memory
            sample = [_join(segment, learned=True) for segment in written[start : start + self._width]]
            tensors = answer_tensors([sample], share_prompts=self._shares_prompts)
            values += self._log_probs(model, Batch(tensors, targets=0, tokens=0).to(device)).tolist()
        ends = np.cumsum([len(segment.written) for segment in segments])
        return [values[end - len(segment.written) : end] for segment, end in zip(segments, ends, strict=True)]

    def metrics(self, totals: dict[str, float], outputs: np.ndarray, split: StoreSplit) -> dict[str, float]:
        raise NotImplementedError("a policy is validated by the reward of its answers: use RewardValidation")


def _join(segment: Segment, *, learned: bool) -> Answer:
    """Concatenate a prompt and what follows it. The tokens that the model wrote are targets if `learned`."""
    is_written = [log_prob is not None for log_prob in segment.log_probs]
    flags = np.concatenate([np.zeros(len(segment.prompt_ids)), np.array(is_written, dtype=bool) & learned])
    return Answer(np.array(segment.prompt_ids + segment.ids, dtype=np.int64), flags)


def _turn_problems(policy: PolicyConfig) -> list[Problem]:
    """Return the problems of answers with several replies."""
    problems = []
    if policy.turns is not None and not policy.has_turns:
        what = "has no effect without tools or an environment: an answer is one reply"
        problems.append(Problem("policy.turns", what, "remove it, or write policy.tools or policy.environment"))
    if policy.has_turns and policy.form == "text":
        problems.append(_form_problem("is text"))
    if policy.tools is not None and not (policy.tools.endswith(".py") and user_path(policy.tools, _TOOLS).is_file()):
        problems.append(
            Problem(_TOOLS, f"{policy.tools} is not a Python file", "write the path of a .py with functions")
        )
    return problems


def _form_problem(what: str) -> Problem:
    return Problem("policy.form", f"{what}, but tools and environments need a conversation", "write conversation")
