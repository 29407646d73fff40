"""What a model writes in an evaluation: by the engine, many at once, shared by all processes."""

from __future__ import annotations

from typing import Any

from artel.inference.batch.answers import Tell, write_beginnings
from artel.inference.open import OpenedModel
from artel.models.generate import Sampling, check_embedded
from artel.objectives.types import GenerationEval, GenerationPrompt
from artel.parallel import World
from artel.training.evaluation import ProgressMessages


def figures_of(
    opened: OpenedModel, writing: GenerationEval, world: World, tell: Tell
) -> tuple[dict[str, float], dict[str, Any]]:
    """Figures and details of what the model writes, taking the likeliest token each time."""
    for beginning in writing.prompts:
        check_embedded(opened.model, opened.tokenizer, beginning.ids)
    sampling = Sampling(writing.new_tokens, temperature=0.0)
    tell(f"{opened.name} writes {writing.what}")

    def write(beginnings: list[GenerationPrompt]) -> list[str]:
        news = ProgressMessages(tell, f"{opened.name} writes:")
        texts = []
        for written in write_beginnings(opened, beginnings, sampling, tell):
            texts.append(written.text)
            news(len(texts) / len(beginnings))
        return texts

    return writing.judge(world.share(write, writing.prompts))
