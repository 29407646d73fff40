"""Writes a model card from a run's folder: metadata, description, usage, data, training and metrics.

The card shows no secrets, and no paths outside the folder where the run was started.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

import artel
from artel.reports.model_card.markdown import block, code, hide_paths, table
from artel.reports.model_card.metadata import MAIN, PublishedModel, metadata, yaml_header
from artel.reports.page.language import Language
from artel.reports.page.run_file import changed_keys, config_value, iterate_leaves
from artel.reports.page.views import ledger_view, plan_table
from artel.reports.run_data import RunData
from artel.secrets import hide_secrets

_MAX_SAMPLES = 4
_MAX_SAMPLE_CHARS = 2000
Rows = list[list[str]]


def model_card(run: RunData, published: PublishedModel) -> str:
    """Return the text of README.md, readable by `huggingface_hub.ModelCard`."""
    language = Language("en")
    metrics = _validation_metrics(run, published.step)
    name = published.repo.split("/")[-1]
    sources = _list_sources(run)
    text = _load_template().render(
        metadata=yaml_header(metadata(run, published, metrics)),
        name=name,
        published=published,
        main=MAIN,
        about=_describe_model(run, published, language),
        code=_usage_code(published),
        commands=_usage_commands(published, name),
        sources=table(["source", "format", "licence"], sources) if sources else "",
        has_licences=any(licence for *_, licence in sources),
        ledger=_summarize_ledger(run, language),
        training=table(["", ""], list(_training_rows(run, published, language))),
        metrics=_metrics_table(run, metrics, published.step, language),
        plan=_plan_table(run, language),
        samples=_newest_samples(run, published.step),
        run_file=block(_dump_changed_keys(run), "yaml"),
        versions=_list_versions(run),
        artel_version=artel.__version__,
    )
    return hide_secrets(text)


# Description and usage --------------------------------------------------------------


def _describe_model(run: RunData, published: PublishedModel, language: Language) -> str:
    """Describe the model, its size and its base in one sentence."""
    size = f"{language.integer(published.parameters)} parameters"
    base = f"[{published.base_model}](https://huggingface.co/{published.base_model})" if published.base_model else ""
    if published.is_adapter:
        lora = config_value(run.config, "model", "lora") or {}
        about = f"It is a LoRA adapter of {size} (rank {lora.get('rank')}, alpha {_format_value(lora.get('alpha'))})"
        about += f" for {base}" if base else ""
        if config_value(run.config, "model", "quantize") not in (None, "none"):
            about += f", trained over weights quantized to {config_value(run.config, 'model', 'quantize')}"
    else:
        about = f"It is a {published.model_type} model of {size}"
        if base:
            about += f", fine-tuned from {base}"
        else:
            about += ", trained from scratch" if not config_value(run.config, "model", "from") else ", fine-tuned"
    return f"{about}."


def _usage_code(published: PublishedModel) -> str:
    """Return lines of Python that run unchanged once the repository can be read."""
    revision = "" if published.revision == MAIN else f', revision="{published.revision}"'
    install = "pip install torch transformers" + (" peft" if published.is_adapter else "")
    lines = [
        f"# {install}",
        "import torch",
        f"from transformers import {published.auto_class}, AutoTokenizer",
        "",
        f'name = "{published.repo}"',
        f"tokenizer = AutoTokenizer.from_pretrained(name{revision})",
        f"model = {published.auto_class}.from_pretrained(name{revision})",
        "",
        published.usage,
    ]
    return block("\n".join(lines), "python")


def _usage_commands(published: PublishedModel, name: str) -> str:
    revision = "" if published.revision == MAIN else f" --revision {published.revision}"
    return block(f"hf download {published.repo}{revision} --local-dir {name}\n{published.command}", "bash")


# Texts -------------------------------------------------------------------------------------


def _list_sources(run: RunData) -> Rows:
    """Return a row per source of the run file: name and paths, format, licence."""
    rows = []
    for source in config_value(run.config, "data", "sources") or []:
        paths = ", ".join(code(hide_paths(path)) for path in source.get("path", []))
        name = code(hide_paths(str(source.get("name") or "")))
        label = f"{name}: {paths}" if name and paths else name or paths
        format_name = str(source.get("format", ""))
        rows.append([label or code(format_name), format_name, code(str(source.get("license") or ""))])
    return rows


def _summarize_ledger(run: RunData, language: Language) -> dict[str, str] | None:
    """Return a sentence and a table with the counts of documents read, kept and dropped."""
    view = ledger_view(run, 0, language)
    if view is None:
        return None
    sets = view["sets"]
    rows = [[code(hide_paths(name)) if name != "Σ" else "all", *cells] for name, *cells in sets["rows"]]
    rows = rows[-1:] if len(rows) == 2 else rows  # with one set, the total row is enough
    return {"verdict": view["verdict"], "table": table(sets["columns"], rows, sets["numbers"])}


# Training ----------------------------------------------------------------------------------


def _training_rows(run: RunData, published: PublishedModel, language: Language) -> Iterator[list[str]]:
    """Yield the rows of the table about training."""
    train = run.config.get("train", {})
    start = run.starts[-1] if run.starts else None
    chosen, environment = (start.chosen, start.environment) if start else ({}, {})
    newest = run.curves.newest
    yield ["objective", ": ".join(filter(None, (published.objective, published.does)))]
    size = f"{language.integer(published.parameters)} parameters"
    joiner = " with an adapter of" if published.is_adapter else ","
    yield ["model", f"{published.model_type}{joiner} {size}"]
    optimizer = f"{train.get('optimizer')}, weight decay {_format_value(train.get('weight_decay'))}"
    clip = train.get("clip")
    method, limit = (clip.get("by"), clip.get("limit")) if isinstance(clip, dict) else ("norm", clip)
    clipping = f"gradients clipped by {method} at {_format_value(limit)}" if limit else "no clipping"
    yield ["optimizer", f"{optimizer}, {clipping}"]
    warmup = _format_value(train.get("warmup"))
    yield [
        "learning rate",
        f"{_format_value(train.get('learning_rate'))} at most, {train.get('schedule')}, warmup {warmup}",
    ]
    batch, block_size = train.get("batch"), config_value(run.config, "data", "block")
    yield ["batch", f"{language.integer(batch)} samples of at most {language.integer(block_size)} tokens"]
    if published.step is not None:
        total = f" of {language.integer(run.steps)}" if run.steps and run.steps != published.step else ""
        yield ["steps", f"{language.integer(published.step)}{total}"]
    tokens = _metric_at_step(run, "tokens", published.step) or newest.get("tokens")
    if isinstance(tokens, int | float):
        yield ["tokens", language.integer(tokens)]
    precision = chosen.get("train.precision", train.get("precision"))
    yield ["precision", f"{precision}, weights {train.get('weights')}"]
    if start is not None:
        hosts = int(environment.get("hosts", 1))
        on_hosts = f" on {language.integer(hosts)} hosts" if hosts > 1 else ""
        yield ["processes", f"{language.integer(start.processes)}{on_hosts}{_describe_layout(run)}"]
        yield ["hardware", str(environment.get("device", ""))]
    if run.elapsed_seconds is not None:
        yield ["wall time", language.duration(run.elapsed_seconds)]
    if run.tokens_per_second is not None:
        yield ["speed", f"{language.integer(run.tokens_per_second)} tokens/s"]
    yield ["seed", str(run.config.get("seed", ""))]


def _describe_layout(run: RunData) -> str:
    """Return the keys of `parallel` that differ from their defaults: `, data fsdp, tensor 2`."""
    keys = {key: value for key, value in changed_keys(run.config).items() if key.startswith("parallel.")}
    layout = hide_paths({key.removeprefix("parallel."): value for key, value in keys.items()})
    return "".join(f", {key} {value}" for key, value in layout.items())


def _dump_changed_keys(run: RunData) -> str:
    """Return a run file with the keys that differ from their defaults."""
    tree = _prune(run.config, "", set(changed_keys(run.config)))
    return yaml.safe_dump(hide_paths(tree), sort_keys=False, allow_unicode=True)


def _prune(value: Any, key: str, keys: set[str]) -> Any:
    """Reduce a section of the run file to the leaves in `keys`."""
    leaf_keys = {name for name, _ in iterate_leaves(value, key)}
    if leaf_keys == {key}:
        return value
    if isinstance(value, list):
        return [_prune(item, f"{key}.{index}", keys) for index, item in enumerate(value)]
    children = {name: (child, f"{key}.{name}" if key else str(name)) for name, child in value.items()}
    return {
        name: _prune(child, child_key, keys)
        for name, (child, child_key) in children.items()
        if any(leaf in keys for leaf, _ in iterate_leaves(child, child_key))
    }


# Metrics, plan, samples, versions ----------------------------------------------------------


def _validation_metrics(run: RunData, step: int | None) -> dict[str, float]:
    """Return the validation metrics at a step, or the newest before it."""
    metrics = {}
    for name in run.curves.validation:
        value = _metric_at_step(run, name, step, validation=True)
        if value is not None:
            metrics[name] = value
    return metrics


def _metric_at_step(run: RunData, name: str, step: int | None, *, validation: bool = False) -> float | None:
    """Return a metric at a step, or at the last logged step before it. `step` None: at the end of the run."""
    if name == "tokens":
        curve = run.curves.training.get("loss")
        values = None if curve is None else curve.tokens
    else:
        curve = (run.curves.validation if validation else run.curves.training).get(name)
        values = None if curve is None else curve.value
    if curve is None or values is None:
        return None
    index = len(curve.step) if step is None else int(np.searchsorted(curve.step, step, side="right"))
    value = float(values[index - 1]) if index else math.nan
    return value if math.isfinite(value) else None


def _metrics_table(run: RunData, metrics: dict[str, float], step: int | None, language: Language) -> str:
    """Return a table of training, validation and best-checkpoint metrics. Empty if nothing was logged."""
    best = next((checkpoint.step for checkpoint in run.checkpoints if checkpoint.is_best), None)
    best_metrics = {} if best is None else _validation_metrics(run, best)
    training = _metric_at_step(run, "loss", step)
    rows = [] if training is None else [["loss", language.number(training), "", ""]]
    for name, value in metrics.items():
        label = language.label(name)
        row = ["", language.number(value), language.number(best_metrics[name]) if name in best_metrics else ""]
        if rows and rows[0][0] == label:
            rows[0][2:] = row[1:]
        else:
            rows.append([label, *row])
    if not rows:
        return ""
    best_title = "best" if best is None else f"best (step {language.integer(best)})"
    return table(["metric", "training", "validation", best_title], rows, {1, 2, 3})


def _plan_table(run: RunData, language: Language) -> str:
    """Return planned values next to measured ones. Empty if there is no plan."""
    plan = plan_table(run, language)
    return "" if plan is None else table(plan["columns"], plan["rows"], plan["numbers"])


def _newest_samples(run: RunData, step: int | None) -> list[dict[str, str]]:
    """Return the newest generated text for each prompt, up to `step`."""
    newest = {sample.prompt: sample for sample in run.samples if step is None or sample.step <= step}
    return [
        {
            "prompt": block(sample.prompt[:_MAX_SAMPLE_CHARS] or " "),
            "text": block(sample.text[:_MAX_SAMPLE_CHARS] or " "),
        }
        for sample in list(newest.values())[:_MAX_SAMPLES]
    ]


def _list_versions(run: RunData) -> str:
    environment = run.starts[-1].environment if run.starts else {}
    versions = {name: environment.get(name) for name in ("artel", "torch", "transformers", "python")}
    return ", ".join(f"{name} {version}" for name, version in versions.items() if version)


def _format_value(value: Any) -> str:
    """Format a value as in a run file: 5e-05, 0.1, null."""
    return "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


@cache
def _load_template() -> Any:
    # The card is Markdown, not HTML. Text by others appears only in code blocks and escaped inline code.
    environment = Environment(loader=PackageLoader("artel.reports.model_card", ""), undefined=StrictUndefined)
    environment.trim_blocks = environment.lstrip_blocks = True
    return environment.get_template("card.md.jinja")
