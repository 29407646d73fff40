"""Registries: the names that keys of the run file accept, and the code of each name. Plugins can add names.

A table refers to code as `module:attribute`, or as `module:attribute:Settings` if the entry has settings: the class of
the section of the run file with the entry's name. Code is imported when its name is first used, so a run imports only
what it uses. To extend artel, add one file and one line here. To extend it from outside, list a module in `plugins`
that calls `register`. Modules with settings must not import torch at the top, because `artel config` imports them.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

from artel.errors import InputError

T = TypeVar("T")


class Registry:
    """Maps the names that a key of the run file accepts to their objects."""

    def __init__(self, key: str, entries: dict[str, str]) -> None:
        self.key = key
        self._entries: dict[str, Any] = {}
        self._settings: dict[str, Any] = {}
        self._modules: dict[str, str] = {}
        for name, reference in entries.items():
            module, attribute, *settings = reference.split(":")
            self._entries[name] = f"{module}:{attribute}"
            if settings:
                self._settings[name] = f"{module}:{settings[0]}"

    @property
    def names(self) -> list[str]:
        return list(self._entries)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._entries

    def __getitem__(self, name: str) -> Any:
        """Return the object of a name. Raise InputError, with the nearest name, if it is not registered."""
        if name not in self._entries:
            near = difflib.get_close_matches(name, self._entries, 1)
            fix = f"did you mean {near[0]}?" if near else f"write one of: {', '.join(self._entries)}"
            raise InputError.at(self.key, f"unknown name {name!r}", fix)
        return _import_entry(self._entries, name)

    def get_settings(self, name: object) -> Any:
        """Return the class of an entry's settings, or None if the name is unknown or has no settings."""
        return _import_entry(self._settings, name) if isinstance(name, str) and name in self._settings else None

    @property
    def names_with_settings(self) -> list[str]:
        return list(self._settings)

    def register(self, name: str, *, settings: type | None = None) -> Callable[[T], T]:
        """Return a decorator that registers a class, function or other object under `name`.

        Raise InputError if another module has registered the name. `settings`: a `Section` of the run file. It becomes
        a section with the entry's name, beside the key that accepts the name.
        """
        module = sys._getframe(1).f_globals["__name__"]

        def add(entry: T) -> T:
            if name in self._entries and self._modules.get(name) != module:  # a module may be imported again
                fix = f"use another name in {module}"
                raise InputError.at(self.key, f"{name!r} is registered already", fix)
            self._entries[name] = entry
            self._modules[name] = module
            if settings is not None:
                self._settings[name] = settings
            return entry

        return add

    def get_module(self, name: str) -> str | None:
        """Return the module outside artel that registered a name; None for artel's own names."""
        return self._modules.get(name)


def _import_entry(table: dict[str, Any], name: str) -> Any:
    """Return the object of a name, importing it if the table still has a reference."""
    if isinstance(table[name], str):
        module, _, attribute = table[name].partition(":")
        table[name] = getattr(import_module(module), attribute)
    return table[name]


FORMATS = Registry(
    "data.sources.format",
    {
        "auto": "artel.text.formats.format:AUTO",
        "text": "artel.text.formats.text:TEXT",
        "html": "artel.text.formats.pages:HTML",
        "jsonl": "artel.text.formats.jsonl:JSONL",
        "parquet": "artel.text.formats.parquet:PARQUET",
        "csv": "artel.text.formats.table:CSV",
        "warc": "artel.text.formats.pages:WARC",
        "epub": "artel.text.formats.archives:EPUB",
        "docx": "artel.text.formats.archives:DOCX",
        "pairs": "artel.text.formats.pairs:PAIRS",
        "nq": "artel.text.formats.questions:NQ",
        "squad": "artel.text.formats.questions:SQUAD",
        "chat": "artel.text.formats.chat:CHAT",
        "preference": "artel.text.formats.preferences:PREFERENCE",
        "matches": "artel.text.formats.matches:MATCHES",
        "prompts": "artel.text.formats.prompts:PROMPTS",
        "gym": "artel.text.formats.gym:GYM:GymSource",
        "labels": "artel.text.formats.labels:LABELS",
        "conll": "artel.text.formats.conll:CONLL",
        "entities": "artel.text.formats.entities:ENTITY_ROWS",
        "dummy": "artel.text.formats.dummy:DUMMY",
    },
)
OBJECTIVES = Registry(
    "objective",
    {
        "causal": "artel.objectives.causal:Causal",
        "masked": "artel.objectives.masked:Masked",
        "span_qa": "artel.objectives.span_qa.span_qa_objective:SpanQA",
        "chat": "artel.objectives.chat:Chat",
        "preference": "artel.objectives.preference:PreferenceOptimization",
        "policy": "artel.objectives.policy.policy_objective:PolicyOptimization:PolicyConfig",
        "reward": "artel.objectives.reward:Reward",
        "rerank": "artel.objectives.rerank:Rerank",
        "classification": "artel.objectives.classification.classification_objective:Classification",
        "embedding": "artel.objectives.embedding.embedding_objective:Embedding",
        "tokens": "artel.objectives.tokens.tokens_objective:Tokens",
        "seq2seq": "artel.objectives.seq2seq:SequenceToSequence",
        "distill": "artel.objectives.distill.distill_objective:Distill",
    },
)
OPTIMIZERS = Registry(
    "train.optimizer",
    {
        "adamw": "artel.training.optim.specs:ADAMW",
        "adamw8bit": "artel.training.optim.specs:ADAMW_8BIT",
        "adafactor": "artel.training.optim.specs:ADAFACTOR",
        "muon": "artel.training.optim.specs:MUON",
        "sgd": "artel.training.optim.specs:SGD",
        "lion": "artel.training.optim.lion:LION:LionConfig",
    },
)
SCHEDULES = Registry(
    "train.schedule",
    {
        "linear": "artel.training.schedule:linear",
        "cosine": "artel.training.schedule:cosine",
        "constant": "artel.training.schedule:constant",
        "wsd": "artel.training.schedule:warmup_stable_decay",
        "inverse_sqrt": "artel.training.schedule:inverse_sqrt:InverseSqrtConfig",
        "cosine_with_restarts": "artel.training.schedule:cosine_with_restarts:RestartsConfig",
    },
)
STRATEGIES = Registry(
    "parallel.data",
    {
        "auto": "artel.parallel.parallelize:MeshPlan",
        "ddp": "artel.parallel.parallelize:MeshPlan",
        "zero1": "artel.parallel.parallelize:MeshPlan",
        "zero2": "artel.parallel.parallelize:MeshPlan",
        "fsdp": "artel.parallel.parallelize:MeshPlan",
        "hsdp": "artel.parallel.parallelize:MeshPlan",
    },
)
TRACKERS = Registry(
    "track",
    {
        "console": "artel.training.metrics.trackers:ConsoleTracker",
        "jsonl": "artel.training.metrics.trackers:JsonLinesTracker",
        "tensorboard": "artel.training.metrics.tensorboard:TensorBoardTracker",
        "wandb": "artel.training.metrics.wandb:WandbTracker",
        "mlflow": "artel.training.metrics.mlflow:MlflowTracker",
        "trackio": "artel.training.metrics.trackio:TrackioTracker",
    },
)
TOOLS = Registry(  # in the order in which a configuration is tried
    "config convert",
    {
        "command_line": "artel.config.converters.command_line:COMMAND_LINE",
        "trl": "artel.config.converters.trl:TRL",
        "llama_factory": "artel.config.converters.llama_factory:LLAMA_FACTORY",
        "axolotl": "artel.config.converters.axolotl:AXOLOTL",
        "impruver": "artel.config.converters.impruver:IMPRUVER",
        "masked_lm_json": "artel.config.converters.masked_lm_json:MASKED_LM_JSON",
        "nq_recipe": "artel.config.converters.nq_recipe:NQ_RECIPE",
    },
)
EXPORTERS = Registry(
    "--to",
    {
        "gguf": "artel.inference.export.gguf:GgufExporter:GgufConfig",
        "onnx": "artel.inference.export.onnx:OnnxExporter",
    },
)
LAUNCHERS = Registry(
    "launch.to",
    {
        "slurm": "artel.launching.backends.slurm:Slurm:SlurmSettings",
        "kubernetes": "artel.launching.backends.kubernetes:Kubernetes:KubernetesSettings",
        "hf_jobs": "artel.launching.backends.hf_jobs:HfJobs:HfJobsSettings",
        "skypilot": "artel.launching.backends.skypilot:Skypilot:SkypilotSettings",
    },
)
CALLBACKS = Registry("callbacks", {})
REWARDS = Registry(
    "policy.rewards",
    {
        "function": "artel.rewards.function:FunctionReward:FunctionConfig",
        "equals": "artel.rewards.checks:Equals:EqualsConfig",
        "matches": "artel.rewards.checks:Matches:MatchesConfig",
        "number": "artel.rewards.checks:NumberReward:NumberConfig",
        "json": "artel.rewards.checks:Json:JsonConfig",
        "length": "artel.rewards.checks:Length:LengthConfig",
        "language": "artel.rewards.checks:Language:LanguageConfig",
        "format": "artel.rewards.checks:Format:FormatConfig",
        "math": "artel.rewards.math_answer:Math:MathConfig",
        "gym": "artel.rewards.gym:Gym:GymConfig",
        "model": "artel.rewards.reward_model:ModelReward:ModelRewardConfig",
        "judge": "artel.rewards.judge:Judge:JudgeConfig",
    },
)
