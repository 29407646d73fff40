"""The metadata at the head of a model card: what the hub finds, sorts and links a model by."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from artel.reports.model_card.published import Published
from artel.reports.run_data import RunData

_DATASET = re.compile(r"(?:hf://|https?://[^/]+/)datasets/([\w.-]+/[\w.-]+)(?:[@/]|$)")


def metadata(run: RunData, published: Published, metrics: dict[str, float]) -> ModelCardData:
    """Metadata that huggingface_hub writes and reads; `metrics` are those of the validation split."""
    return ModelCardData(
        license=published.license or None,
        language=list(published.languages) or None,
        library_name="peft" if published.is_adapter else "transformers",
        pipeline_tag=published.pipeline_tag or None,
        base_model=published.base_model or None,
        base_model_relation=_relation(published),
        datasets=datasets(run) or None,
        tags=_tags(published),
        model_name=published.repo.split("/")[-1],
        eval_results=list(_results(run, published, metrics)) or None,
    )


def datasets(run: RunData) -> list[str]:
    """The ids of the hub's data sets among the sources."""
    found = [match[1] for path in _paths(run) if (match := _DATASET.match(path))]
    return list(dict.fromkeys(found))


def _paths(run: RunData) -> Iterator[str]:
    data = run.config.get("data", {})
    for source in data.get("sources", []):
        yield from source.get("path", [])
    if isinstance(data.get("validation"), str):
        yield data["validation"]


def _relation(published: Published) -> str | None:
    if not published.base_model:
        return None
    return "adapter" if published.is_adapter else "finetune"


def _tags(published: Published) -> list[str]:
    tags = ["artel", published.objective, published.model_type, *(["lora"] if published.is_adapter else [])]
    return list(dict.fromkeys(tag for tag in tags if tag))


def _results(run: RunData, published: Published, metrics: dict[str, float]) -> Iterator[EvalResult]:
    """What the hub shows as evaluation results, on the split that was held out."""
    ids = datasets(run)
    for name, value in metrics.items():
        if math.isfinite(value):
            yield EvalResult(
                task_type=published.pipeline_tag or published.objective,
                dataset_type=ids[0] if len(ids) == 1 else "held-out",
                dataset_name="validation split of the run",
                dataset_split="validation",
                metric_type=name,
                metric_name=name.replace("_", " "),
                metric_value=float(f"{value:.6g}"),
            )


def in_yaml(data: ModelCardData) -> Any:
    """The block at the head of README.md."""
    return f"---\n{data.to_yaml(line_break=chr(10))}\n---"
