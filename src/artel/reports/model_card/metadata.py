"""Metadata at the head of a model card. The hub uses it to find, sort and link models."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from artel.reports.run_data import RunData

MAIN = "main"
_DATASET = re.compile(r"(?:hf://|https?://[^/]+/)datasets/([\w.-]+/[\w.-]+)(?:[@/]|$)")


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """A model as it will be published on the hub."""

    repo: str
    """OWNER/NAME."""
    auto_class: str
    """The transformers class that opens the model."""
    objective: str
    """Name of the objective in the run file."""
    does: str
    """A clause that describes the task of the model."""
    pipeline_tag: str
    """The hub's task, or empty."""
    usage: str
    """Lines of Python that use `model` and `tokenizer`."""
    command: str
    """A command of artel that uses the model, downloaded to a folder named after the repository."""
    model_type: str
    """`model_type` of config.json; for an adapter, of its base model."""
    parameters: int
    """Number of parameters in the weight files."""
    step: int | None = None
    """Step at which the model was saved. None if unknown."""
    revision: str = MAIN
    is_adapter: bool = False
    base_model: str = ""
    """Hub id of the model that training started from. Empty if from scratch, or if it is not on a hub."""
    license: str = ""
    languages: tuple[str, ...] = ()


def metadata(run: RunData, published: PublishedModel, metrics: dict[str, float]) -> ModelCardData:
    """Return the metadata of the card. `metrics`: metrics on the validation split."""
    return ModelCardData(
        license=published.license or None,
        language=list(published.languages) or None,
        library_name="peft" if published.is_adapter else "transformers",
        pipeline_tag=published.pipeline_tag or None,
        base_model=published.base_model or None,
        base_model_relation=_base_model_relation(published),
        datasets=datasets(run) or None,
        tags=_list_tags(published),
        model_name=published.repo.split("/")[-1],
        eval_results=list(_eval_results(run, published, metrics)) or None,
    )


def datasets(run: RunData) -> list[str]:
    """Return the ids of hub data sets among the sources."""
    ids = [match[1] for path in _source_paths(run) if (match := _DATASET.match(path))]
    return list(dict.fromkeys(ids))


def _source_paths(run: RunData) -> Iterator[str]:
    data = run.config.get("data", {})
    for source in data.get("sources", []):
        yield from source.get("path", [])
    if isinstance(data.get("validation"), str):
        yield data["validation"]


def _base_model_relation(published: PublishedModel) -> str | None:
    if not published.base_model:
        return None
    return "adapter" if published.is_adapter else "finetune"


def _list_tags(published: PublishedModel) -> list[str]:
    tags = ["artel", published.objective, published.model_type, *(["lora"] if published.is_adapter else [])]
    return list(dict.fromkeys(tag for tag in tags if tag))


def _eval_results(run: RunData, published: PublishedModel, metrics: dict[str, float]) -> Iterator[EvalResult]:
    """Yield evaluation results on the held-out split."""
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


def yaml_header(data: ModelCardData) -> Any:
    """Return the YAML block at the head of README.md."""
    return f"---\n{data.to_yaml(line_break=chr(10))}\n---"
