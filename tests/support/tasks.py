"""Tasks of lm-evaluation-harness on files of one's own."""

import json
from pathlib import Path

import yaml


def task(folder: Path, name: str, rows: list[dict], **about) -> str:
    """The YAML file of a task, whose data is kept beside it."""
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    kwargs = {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")}
    about = {"task": name, "dataset_path": "json", "dataset_kwargs": kwargs, "test_split": "test"} | about
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(about))
    return str(folder / f"{name}.yaml")


def counting(folder: Path, **changes) -> str:
    """Questions with two answers to choose from."""
    rows = [{"question": f"Count: one, two, three, {word}", "choices": [" four.", " river."], "answer": number % 2}
            for number, word in enumerate(("", "and", "or", "then", "so"))]  # fmt: skip
    about = {"output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_choice": "choices",
             "doc_to_target": "answer", "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}]}  # fmt: skip
    return task(folder, "counting", rows, **about | changes)


def passages(folder: Path) -> str:
    """Texts whose perplexity is measured."""
    rows = [{"text": f"The miller walks by the river {count} times."} for count in ("two", "three", "ten")]
    return task(folder, "passages", rows, output_type="loglikelihood_rolling", doc_to_text="", doc_to_target="{{text}}",
                metric_list=[{"metric": "byte_perplexity"}])  # fmt: skip
