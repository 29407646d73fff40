"""Inference for objectives: answers to prompts, sampling defaults, and example code."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from artel.config import RunConfig
from artel.errors import InputError, Problem
from artel.generation import GenerationPrompt
from artel.objectives.types import GenerationEval, Reply
from artel.tokens import Samples, StoreSplit, Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from artel.generation.generate import Sampling
    from artel.tokens.tokenizer.chat_template import TurnEnd

_PROMPT_WORDS = 4
"""Number of words that an example prompt takes from the training text."""
_PROMPT_TOKENS = 100
"""Number of tokens decoded to find these words."""
_MAX_EXAMPLE_TOKENS = 40
_MAX_EXAMPLE_WORDS = 12


class Decoding:
    """Mixin for objectives whose models answer prompts. The defaults refuse every prompt."""

    continues: ClassVar[bool] = True
    """True if the output continues the prompt; False if it answers it."""
    needs_context: ClassVar[bool] = False
    """True if a prompt is a question about a text (`artel generate --context`)."""
    takes_context: ClassVar[bool] = False
    """True if a prompt may come with a second text (`artel generate --context`)."""
    tasks: ClassVar[tuple[str, ...]] = ()
    """Tasks of `run_task`: classify, embed, entities, generate, rerank, score. The task `answer` uses `reply`."""

    def __init__(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        self.config = config
        self.tokenizer = tokenizer

    def reply(self, model: PreTrainedModel, prompt: str, context: str, sampling: Sampling) -> Reply:
        """Return the reply that `artel generate` prints. `context` is empty unless the objective takes one."""
        raise InputError.at("--prompt", "models of this objective do not answer prompts", "see artel evaluate")

    def run_task(self, model: PreTrainedModel, task: str, inputs: list[Any]) -> list[dict[str, Any]]:
        """Return the model's answer to each input, as values for JSON. `task` is one of `tasks`.

        Raise InputError if an input does not fit the task or the model.
        """
        raise NotImplementedError

    def generation_prompt(self, model: PreTrainedModel, prompt: str) -> GenerationPrompt | None:
        """Return the ids that a model which `generates` continues; None if only `reply` can answer a prompt."""
        return None

    def generation_eval(self, model: PreTrainedModel, split: StoreSplit) -> GenerationEval | None:
        """Return the prompts and scoring of a generation eval for `split`; None if the objective has none."""
        return None

    def turn_end(self) -> TurnEnd | None:
        """Return the token sequences that end an assistant turn; None unless the texts are conversations."""
        return None

    def default_sampling(self) -> Sampling:
        from artel.generation.generate import Sampling

        return Sampling()

    def sampling(self, **settings: Any) -> Sampling:
        """Return the default sampling with those `settings` that are not None."""
        return replace(
            self.default_sampling(), **{name: value for name, value in settings.items() if value is not None}
        )

    def demo_command(self, folder: str, samples: Samples | None) -> str:
        """Return a command that demonstrates the model of a finished run.

        `folder`: the run's folder, quoted for a shell. `samples`: its training samples; None if they must not be shown.
        """
        return f"artel generate {folder} --prompt {shlex.quote(self.example_prompt(samples))}"

    def model_card_code(self) -> str:
        """Return Python for the model card that runs `model` with transformers, `tokenizer` and `torch` only."""
        inputs = f'inputs = tokenizer({python_literal(self.example_prompt(None))}, return_tensors="pt")'
        return f"{inputs}\nprint(model(**inputs).logits)"

    def example_prompt(self, samples: Samples | None) -> str:
        """Return a text to continue: the first of `validate.prompts`, or the first words of the training text."""
        if samples is None:
            return next(filter(None, self.config.validate_.prompts), "Once upon a time")
        if self.config.validate_.prompts:
            return self.config.validate_.prompts[0]
        ids = samples.read(0).ids[:_PROMPT_TOKENS]
        is_special = np.isin(ids, self.tokenizer.special_ids)
        chunks = np.split(np.arange(len(ids)), np.flatnonzero(is_special))  # a block may hold several documents
        words = " ".join(self.tokenizer.decode(ids[chunk[~is_special[chunk]]]) for chunk in chunks).split()
        return " ".join(words[: min(_PROMPT_WORDS, max(1, len(words) - 1))])  # the last word may be cut


def writing_problems(config: RunConfig) -> list[Problem]:
    """Return a problem for each key that splits the model so that it cannot write answers during training."""
    parallel = config.parallel
    fix = "use ddp, zero1, zero2, fsdp or tensor"
    return [
        Problem(f"parallel.{key}", "the model cannot write answers with this kind of parallelism", fix)
        for key, is_set in (("pipeline", parallel.pipeline > 1), ("deepspeed", parallel.deepspeed is not None))
        if is_set
    ]


# Helpers for example code


def python_literal(text: str) -> str:
    """Return a text as a Python literal in double quotes."""
    return json.dumps(text, ensure_ascii=False)


def first_words(tokenizer: Tokenizer, ids: np.ndarray) -> str:
    """Return the first words of a text in one line. `ids`: (tokens,), without special tokens."""
    return " ".join(tokenizer.decode(ids[:_MAX_EXAMPLE_TOKENS]).split()[:_MAX_EXAMPLE_WORDS])


def generation_code(max_tokens: int, ends: Collection[int] = ()) -> list[str]:
    """Return Python that lets `model` continue `inputs`, up to `max_tokens` or one of the ids `ends`."""
    stop = f", eos_token_id={sorted(ends)}" if ends else ""
    length = max(1, min(100, max_tokens))
    return [
        f"outputs = model.generate(**inputs, max_new_tokens={length}, do_sample=True, top_k=50{stop})",
        'written = outputs[0, inputs["input_ids"].shape[1] :]',
        "print(tokenizer.decode(written, skip_special_tokens=True))",
    ]
