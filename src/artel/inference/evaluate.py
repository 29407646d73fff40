"""Evaluation of a model: the metrics of its objective on texts, questions or pairs from any source."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from artel.config import ModelConfig, RunConfig, SourceConfig, TokenizerConfig, load_run, parse_run
from artel.errors import InputError
from artel.generation import GenerationPrompt
from artel.generation.generate import Sampling, check_embedded
from artel.inference.batch.answers import continue_prompts
from artel.inference.open import OpenedModel, open_untrained
from artel.messages import logger
from artel.models.device import pick_precision
from artel.models.loading.check import check_positions
from artel.models.loading.structure import position_limit
from artel.models.quantization import set_compute_precision
from artel.notebooks import html_table
from artel.objectives import Objective, build_objective, objective_type
from artel.objectives.types import GenerationEval
from artel.parallel import DataParallel, World
from artel.preparing import PreparedText, prepare
from artel.registry import FORMATS, OBJECTIVES
from artel.text import Ledger, read_documents
from artel.tokens import TokenStore
from artel.training import RunFolder
from artel.training.evaluation import ProgressMessages, micro_batch_size, reference_outputs
from artel.training.reward_validation import make_validation
from artel.training.teacher import set_cached_outputs, set_teacher

_DEFAULT_BLOCK = 1024
"""Default block size. Large enough that few tokens have little context, and small enough for a laptop."""


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Metrics of a model on some data, the size of the data, and the model's answers, if any."""

    model: str
    objective: str
    metrics: dict[str, float]
    samples: int
    documents: int
    tokens: int | None
    """None for a corpus, whose `samples` are queries."""
    seconds: float
    details: dict[str, Any] = field(default_factory=dict)
    """More results: tables by label, a confusion matrix (`Objective.details`)."""
    predictions: Any = None
    """Content of the predictions file, in the official format. Only for questions."""

    @property
    def data_size(self) -> str:
        """The size of the data, as text."""
        if self.tokens is None:
            return f"{self.documents:,} documents, {self.samples:,} queries"
        return f"{self.documents:,} documents, {self.samples:,} samples, {self.tokens:,} tokens"

    def to_json(self) -> dict[str, Any]:
        names = ("model", "objective", "metrics", "samples", "documents", "tokens", "seconds")
        return {name: getattr(self, name) for name in names} | ({"details": self.details} if self.details else {})

    def _repr_html_(self) -> str:
        rows = [(name.replace("_", " "), f"{value:,.4f}") for name, value in self.metrics.items()]
        return html_table(rows, caption=f"{self.model}: {self.data_size}")


def evaluate(opened: OpenedModel, data: str | None, overrides: Mapping[str, Any], world: World) -> EvaluationResult:
    """Evaluate a model on the validation split of its run or of another run file, or on a whole file or folder.

    Raise InputError if there is no data to evaluate on, or the data is for another objective.
    """
    run = _evaluation_run(opened, data, overrides)
    check_positions(opened.model, run.data.block)
    prepared = _prepare_text(opened, run, data)
    run = prepared.config
    objective = build_objective(run, opened.tokenizer)
    objective.check(opened.model)
    if note := objective.calibrate(opened.objective.calibration()):
        logger.info(note)
    store = prepared.open()
    if data is None:
        objective.fit_statistics(store.train)  # a weighted loss uses the training split's weights
    with closing(make_validation(objective, store.validation, run, world)) as validation:
        if len(validation.samples) == 0:
            fix = "use more text, a smaller data.block, or --data FILE"
            raise InputError.at("data.validation", "no text is held out to evaluate on", fix)
        # fp8 is only for training. Evaluate the model as it will be used.
        requested = "auto" if run.train.precision == "fp8" else run.train.precision
        precision = pick_precision(requested, world.device)
        set_compute_precision(opened.model, precision)
        strategy = DataParallel(opened.model, objective, world, precision)
        batch_size = micro_batch_size(run, world)
        if objective.needs_reference and opened.run is not None:
            untrained = open_untrained(opened.run).model
            set_compute_precision(untrained, precision)
            reference = DataParallel(untrained, objective, world, precision)
            progress = ProgressMessages("evaluating the model before training:")
            log_probs = reference_outputs(objective, store.validation, reference, batch_size, progress)
            objective.set_reference(log_probs.numpy(), validation=True)
        if data is None:
            set_teacher_if_available(objective, run, store, world)
        started = time.monotonic()
        progress = ProgressMessages(f"evaluating {opened.name}:")
        metrics, outputs = validation.evaluate(strategy, batch_size, run.validate_.blocks, progress)
    split = store.validation
    details = objective.details(outputs, split)
    if generation_eval := objective.decoding.generation_eval(opened.model, split):
        text_metrics, text_details = _evaluate_texts(opened, generation_eval, world)
        metrics, details = metrics | text_metrics, details | text_details
    return EvaluationResult(
        opened.name,
        run.objective,
        metrics,
        validation.stored_samples(validation.num_samples(run.validate_.blocks)),
        split.documents,
        split.tokens,
        time.monotonic() - started,
        details,
        objective.predictions_file(outputs, split),
    )


def _prepare_text(opened: OpenedModel, run: RunConfig, data: str | None) -> PreparedText:
    """Return the prepared text to evaluate on. Raise InputError if its labels are not the model's."""
    try:
        return prepare(run)
    except InputError:
        if data is not None and (message := _find_mismatch(opened, run)):
            fix = "use data with the labels of the model, or train a model on these"
            raise InputError.at(data, message, fix) from None
        raise


def _find_mismatch(opened: OpenedModel, run: RunConfig) -> str:
    """Return the reason if a model cannot be evaluated on a run's records. Empty if it can, or without records."""
    with suppress(InputError):
        return opened.objective.mismatch(document.record for document in read_documents(run.data, Ledger()))
    return ""


def set_teacher_if_available(objective: Objective, run: RunConfig, store: TokenStore, world: World) -> None:
    """Give the objective its teacher or the teacher's saved outputs. Without either, omit the teacher's metrics.

    Outputs are not recomputed, since that can take hours and much disk space.
    """
    if objective.teacher is None or objective.scores_answers:  # rewards need no teacher
        return
    note = RunFolder(Path(run.run)).teacher
    if objective.teacher.settings is not None:
        if not set_cached_outputs(objective, store, note):
            logger.info("metrics of the teacher omitted: its saved outputs were removed")
        return
    try:
        set_teacher(objective, run, store, world, note, True)
    except InputError as error:
        logger.info("metrics of the teacher omitted: %s: %s", error.problems[0].where, error.problems[0].what)


def _evaluation_run(opened: OpenedModel, data: str | None, overrides: Mapping[str, Any]) -> RunConfig:
    """Return the run whose validation split to evaluate: the model's, another run, or a run made for a path."""
    if data is None and opened.run is None:
        raise InputError.at(opened.name, "is not a run, so it has no validation split", "add --data FILE")
    if data is None:
        return load_run(opened.name, overrides)
    # Set no run folder, since dropped documents of this text do not belong in another run's ledger.
    model_tokenizer = TokenizerConfig.model_validate({"from": opened.folder})
    if data.endswith((".yaml", ".yml")) or (Path(data) / "config.yaml").is_file():
        run = load_run(data, overrides)
        if run.objective != opened.objective.config.objective and not _can_evaluate(opened, objective_type(run)):
            raise InputError.at(
                opened.name,
                f"learned {opened.objective.config.objective}, but {data} is for {run.objective}",
                "evaluate it on data for its own objective",
            )
        changes = {"run": "", "tokenizer": model_tokenizer, "model": ModelConfig()}
        return run.model_copy(update=changes | _values_from_training(opened, run))
    base = opened.objective.config
    objective_name = overrides.get("objective")
    if opened.run is None and objective_name in OBJECTIVES.names:
        base = base.model_copy(update={"objective": objective_name})
    source = _make_source(base, data)
    # Keep repeated documents, since a document's score must not depend on others in the file.
    values = base.model_dump(mode="json", by_alias=True) | {"model": {}, "tokenizer": {"from": opened.folder}}
    values["data"] |= {"sources": [source.model_dump(mode="json")], "validation": 0.0, "dedup": {"exact": False}}
    values["data"]["decontaminate"] = None  # the data may be a benchmark
    values["data"]["block"] = _block_size(opened)
    run = parse_run(values, overrides, {(): data})
    return run.model_copy(update={"run": "", "data": run.data.model_copy(update={"validation": 1.0})})


def _values_from_training(opened: OpenedModel, run: RunConfig) -> dict[str, Any]:
    """Return the objective's section with the values that the model's training data decided, such as labels."""
    objective = objective_type(run)
    trained_run = opened.objective.config
    if not objective.decided_by_records or run.objective != trained_run.objective:
        return {}
    values = {key: getattr(getattr(trained_run, objective.section), key) for key in objective.decided_by_records}
    return {objective.section: getattr(run, objective.section).model_copy(update=values)}


def _can_evaluate(opened: OpenedModel, objective: type[Objective]) -> bool:
    """True if an objective can evaluate a model that learned another one, or that artel did not train.

    Rewards score the answers of any model with the same head. A causal model of others may also answer questions.
    """
    fits = objective.scores_answers or (opened.run is None and objective.is_per_token)
    return fits and objective.auto_class == opened.objective.auto_class


def _make_source(base: RunConfig, path: str) -> SourceConfig:
    """Return a source for `path` with the settings of the run's first source, or chosen by suffix and objective."""
    first_source = base.data.sources[0] if base.data.sources else None
    if first_source is not None and FORMATS[first_source.format].has_files:
        return first_source.model_copy(update={"path": [path], "name": "", "format": first_source.format})
    record_kinds = set(objective_type(base).learns_from)
    if "text" in record_kinds:
        return SourceConfig(path=[path])
    formats = [name for name in FORMATS.names if record_kinds & set(FORMATS[name].yields) and FORMATS[name].has_files]
    by_suffix = [name for name in formats if path.endswith(FORMATS[name].suffixes)]
    return SourceConfig(path=[path], format=(by_suffix or formats)[0])


def _block_size(opened: OpenedModel) -> int:
    if opened.run is not None:
        return opened.run.data.block
    return min(_DEFAULT_BLOCK, position_limit(opened.model) or _DEFAULT_BLOCK)


def _evaluate_texts(
    opened: OpenedModel, generation_eval: GenerationEval, world: World
) -> tuple[dict[str, float], dict[str, Any]]:
    """Return metrics and details of greedily generated texts. The processes divide the prompts."""
    for prompt in generation_eval.prompts:
        check_embedded(opened.model, opened.tokenizer, prompt.ids)
    sampling = Sampling(generation_eval.new_tokens, temperature=0.0)
    logger.info("%s generates %s", opened.name, generation_eval.description)

    def generate(prompts: list[GenerationPrompt]) -> list[str]:
        progress = ProgressMessages(f"{opened.name} generates:")
        texts = []
        for answer in continue_prompts(opened, prompts, sampling):
            texts.append(answer.text)
            progress(len(texts) / len(prompts))
        return texts

    return generation_eval.score(world.map_over_ranks(generate, generation_eval.prompts))
