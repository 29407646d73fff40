"""Try the rewards of a run before it starts: its model answers a few prompts, and the rewards score the answers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import numpy as np

from artel.config import RunConfig
from artel.errors import InputError
from artel.messages import logger
from artel.models.device import pick_precision
from artel.models.loading.build import build_model
from artel.models.quantization import set_compute_precision
from artel.objectives import DocumentSamples, Objective, build_objective, objective_type
from artel.objectives.rollouts import Rollout
from artel.parallel import DataParallel, World
from artel.planning.outline import local_tokenizer
from artel.preparing import is_prepared, prepare
from artel.text import Document, DroppedRecord, Ledger, Rejected, read_documents
from artel.tokens import Sample, Tokenizer
from artel.training.answer_writer import AnswerWriter, Prompts, open_round_rewards
from artel.training.drafts import Question
from artel.training.evaluation import ProgressMessages
from artel.training.round_summary import RoundSummary, summarize
from artel.training.schedule import run_length

_DECIDING_DOCUMENTS = 64
"""Number of records that decide values which the run file leaves open, such as the form of the prompts."""


@dataclass(frozen=True, slots=True)
class RewardTrial:
    """Answers of an untrained model to several prompts, with their rewards."""

    groups: list[list[Rollout]]
    """The answers to each prompt."""
    prompts: list[str]
    """Text of each prompt: all of it, or its last message."""
    names: list[str]
    """Names of the rewards."""
    summary: RoundSummary
    seconds_per_answer: dict[str, float]
    """Mean time of each reward."""

    def to_json(self) -> dict[str, Any]:
        keys = ("number", "answer", "text", "cut_off", "rewards", "reward", "failures")
        answers = [
            {"prompt": prompt} | {key: getattr(rollout, key) for key in keys}
            for prompt, group in zip(self.prompts, self.groups, strict=True)
            for rollout in group
        ]
        summary = {key: None if value != value else value for key, value in asdict(self.summary).items()}
        return {"rollouts": answers, "summary": summary, "seconds_per_answer": self.seconds_per_answer}


@dataclass(frozen=True, slots=True)
class _FirstRecords:
    """The prompts of the first records of a text that is not prepared."""

    samples: list[DocumentSamples]

    def sample(self, index: int) -> Sample:
        return self.samples[index].samples[0]

    def reference(self, index: int) -> dict[str, Any]:
        reference = self.samples[index].reference
        assert reference is not None
        return reference


def try_rewards(config: RunConfig, num_prompts: int, world: World) -> RewardTrial:
    """Let the model that a run starts from answer the first `num_prompts` prompts, and score the answers.

    With a prepared text these are the prompts of the first steps, with the seeds of the run; otherwise the first
    records. Raise InputError if the objective does not learn from rewards.
    """
    if not objective_type(config).scores_answers:
        what = f"objective {config.objective} does not learn from rewards"
        raise InputError.at("objective", what, "use a run file with objective: policy")
    tokenizer = None if is_prepared(config) else local_tokenizer(config)
    if tokenizer is None:  # it is in the store, or must be trained or downloaded first
        objective, prompts, questions = _stored_prompts(config, num_prompts)
    else:
        objective, prompts, questions = _first_prompts(config, tokenizer, num_prompts)
    config, settings = objective.config, objective.rounds
    assert settings is not None
    with open_round_rewards(settings, config.plugins) as pool:
        logger.info("loading the model")
        request = objective.model_request(config.model, config.data.block, config.seed)
        model = build_model(request, objective.tokenizer).model.to(world.device)
        precision = pick_precision("auto" if config.train.precision == "fp8" else config.train.precision, world.device)
        set_compute_precision(model, precision)
        strategy = DataParallel(model, objective, world, precision)
        progress = ProgressMessages("writing and scoring answers:")
        writer = AnswerWriter(
            objective, prompts, strategy, world, pool, config.seed, lambda _, fraction: progress(fraction)
        )
        groups = writer.write(questions, settings.answers)
        answers = sum(map(len, groups))
        seconds = {name: total / answers for name, total in pool.seconds.items()}
        texts = [_last_text(prompts.reference(question.index)["prompt"]) for question in questions]
        return RewardTrial(groups, texts, [*groups[0][0].rewards], summarize(groups), seconds)


def _stored_prompts(config: RunConfig, num_prompts: int) -> tuple[Objective, Prompts, list[Question]]:
    """Return the first prompts in the order of training."""
    prepared = prepare(config)
    config, split = prepared.config, prepared.open().train
    objective = build_objective(config, prepared.tokenizer())
    samples = objective.dataset(split)
    if not len(samples):
        raise InputError.at("data.sources", "there is no prompt to answer", "look at RUN/rejected.jsonl")
    total = run_length(config, samples, split).total_samples
    numbers = np.arange(num_prompts if total is None else min(num_prompts, total))
    indices, epochs = objective.order(split, len(samples)).at(numbers), numbers // len(samples)
    return objective, split, [Question(*map(int, values)) for values in zip(numbers, indices, epochs, strict=True)]


def _first_prompts(
    config: RunConfig, tokenizer: Tokenizer, num_prompts: int
) -> tuple[Objective, Prompts, list[Question]]:
    """Return the prompts of the first training records."""
    unusable: list[Rejected | DroppedRecord] = []
    ledger = Ledger(on_reject=unusable.append)
    documents = (document for document in read_documents(config.data, ledger) if document.split == "train")
    first = list(islice(documents, max(num_prompts, _DECIDING_DOCUMENTS)))
    config = _with_decided_values(config, first)
    objective = build_objective(config, tokenizer)
    samples: list[DocumentSamples] = []
    while first and len(samples) < num_prompts:
        for result in objective.samples(first):
            if isinstance(result, DocumentSamples):
                samples.append(result)
            else:
                unusable.append(result)
        first = list(islice(documents, num_prompts))
    if unusable:
        logger.info("%s of the first %s records cannot be used", len(unusable), len(unusable) + len(samples))
    if not samples:
        fix = "look at them with artel data show; a prompt and an answer together may exceed data.block"
        raise InputError.at("data.sources", "no record is a prompt that can be answered", fix)
    questions = [Question(index, index, 0) for index in range(min(num_prompts, len(samples)))]
    return objective, _FirstRecords(samples), questions


def _with_decided_values(config: RunConfig, documents: list[Document]) -> RunConfig:
    """Return the run with the values of its objective's section that the records decide."""
    objective = objective_type(config)
    if not objective.undecided(config):
        return config
    values = objective.decide(config, (document.record for document in documents))
    section = getattr(config, objective.section).model_copy(update=values)
    return config.model_copy(update={objective.section: section})


def _last_text(prompt: str | list[dict[str, Any]]) -> str:
    """Return a prompt's text, or its last message."""
    return prompt if isinstance(prompt, str) else str(prompt[-1]["content"]) if prompt else ""
