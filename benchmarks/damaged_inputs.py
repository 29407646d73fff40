"""Inputs of every kind that a run reads, ways to damage them, and the code that reads them: what fuzz.py goes through.

Checksums are made right again in half of the stores and in most of the checkpoints, so that what is read behind them is
reached.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "critical"}

import orjson
import torch
import torch.distributed as dist
import xxhash
import yaml
from mutations import change_bytes, change_json, change_safetensors, change_values, change_yaml, to_json
from transformers import GPT2Config, GPT2LMHeadModel, RobertaConfig, RobertaForMaskedLM

from artel.config import (
    ModelConfig,
    TokenizerTraining,
    TrainConfig,
    dump_run,
    load_run,
    parse_run,
    recipe_names,
    result_differences,
)
from artel.config.converters.tools import convert
from artel.config.read import read_file
from artel.config.recipes import recipe_text
from artel.messages import route_messages
from artel.models.loading.build import build_model
from artel.models.loading.check import check_model
from artel.models.loading.request import ModelRequest
from artel.preparing import prepare
from artel.tokens import Tokenizer, TokenStore, load_tokenizer, train_tokenizer
from artel.tokens.manifest import SPLITS, read_manifest
from artel.training.checkpoint.format import CheckpointContent, Progress, load_checkpoint, write_full, write_sharded
from artel.training.checkpoint.items import checkpoint_items, collect_states
from artel.training.optim.optimizer import Optimizer

Files = dict[str, bytes]
_READ = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
TINY, RUN = _READ["gpt2"], _READ["run"]


@dataclass(frozen=True)
class Target:
    """A kind of input: its share of the cases, whole inputs, and what changes and reads one."""

    share: float
    wholes: list[Files]
    change: Callable[[Files, Random], Files]
    read: Callable[[Path, Files, Files], None]
    """Given the folder with the changed files, these, and the whole ones. Raises ArtelError, or what is a fault."""


def targets(folder: Path) -> dict[str, Target]:
    """All of them; what they need is made in `folder`."""
    torch.set_num_threads(1)
    run = parse_run({**RUN, "run": str(folder / "run"), "data": {**RUN["data"], "store": str(folder / "stores")}}, {},
                   {(): "run.yaml"})  # fmt: skip
    store = prepare(run).folder
    texts = ["some words of a text", "слова из другого текста"] * 50
    tokenizer = train_tokenizer(iter(texts), TokenizerTraining(vocab=300))
    encoder = train_tokenizer(iter(texts), TokenizerTraining(vocab=300), encoder=True)
    for name, each in (("decoder", tokenizer), ("encoder", encoder)):
        each.save(folder / name)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**TINY))
    model.save_pretrained(folder / "gpt2")
    RobertaForMaskedLM(
        RobertaConfig(vocab_size=300, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    ).save_pretrained(folder / "roberta")
    reader = Checkpoints(model, folder / "checkpoints")
    runs = [{"run.yaml": recipe_text(name).encode()} for name in recipe_names()]
    runs += [{"run.yaml": yaml.safe_dump(RUN).encode()}] * len(runs)
    runs += [
        {"run.json": json.dumps(_READ["old_json"], indent=1).encode()},
        {"old.yaml": _READ["impruver"].encode()},
    ] * 3
    runs += [{"old.cfg": _READ["cfg"].encode()}] * 3
    word_pieces = {"vocab.txt": b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nwords\n##s\na\n",
                   "tokenizer_config.json": b'{"tokenizer_class": "BertTokenizer", "do_lower_case": true}'}  # fmt: skip
    old = {"vocab.json": json.dumps(tokenizer.hf.get_vocab()).encode(), "merges.txt": b"#version: 0.2\ns o\nso m\n"}
    return {
        "run file": Target(0.45, runs, change_one, read_run),
        "store": Target(0.2, [files_in(store)], change_store, read_store),
        "checkpoint": Target(0.15, reader.forms, change_checkpoint, reader.read),
        "tokenizer": Target(0.12, [files_in(folder / "decoder"), files_in(folder / "encoder"), word_pieces, old],
                            change_one, read_tokenizer),
        "model": Target(0.08, [files_in(folder / "gpt2"), files_in(folder / "roberta")], change_model,
                        ModelReader(tokenizer).read),
    }  # fmt: skip


def files_in(folder: Path) -> Files:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


# Run files


def change_one(files: Files, chance: Random) -> Files:
    """One of the files changed, by what it holds; seldom one missing or empty."""
    name = chance.choice(sorted(files))
    way = chance.random()
    if len(files) > 1 and way < 0.04:
        return {each: data for each, data in files.items() if each != name}
    return files | {name: b"" if way < 0.06 else change(name, files[name], chance)}


def change(name: str, data: bytes, chance: Random) -> bytes:
    if name.endswith(".yaml"):
        return change_yaml(data, chance)
    if name.endswith(".json") and data:
        return change_json(data, chance)
    if name.endswith(".safetensors"):
        return change_safetensors(data, chance)
    return change_bytes(data, chance)


def read_run(folder: Path, files: Files, whole: Files) -> None:
    (name,) = files
    file = folder / name
    if name.startswith("old"):
        run = parse_run(convert(read_file(file), str(file)).run, {}, {(): str(file)})
    else:
        run = load_run(str(file))
    again = folder / "again.yaml"
    again.write_bytes(dump_run(run, secrets=True).encode())
    differences = result_differences(load_run(str(again)), run)
    assert not differences, f"written down and read again it is another run: {differences}"
    if run.model.config is not None:
        check_model(run.model, "AutoModelForCausalLM")
    assert not Path("executed").exists(), "code in it was run"


# Token stores


def change_store(files: Files, chance: Random) -> Files:
    """One file changed; in half of the cases all checksums are those of what is there."""
    name = "manifest.json" if chance.random() < 0.5 else chance.choice(sorted(name for name in files if files[name]))
    changed = change(name, files[name], chance)
    files = files | {name: changed}
    if chance.random() < 0.5:
        return files
    try:
        manifest = orjson.loads(files["manifest.json"])
        entries = {f"{part}/{each}": told for part in SPLITS for shard in manifest["parts"][part]["shards"]
                   for each, told in shard["files"].items()} | manifest["files"]  # fmt: skip
        if name in entries:
            entries[name] |= {"bytes": len(changed), "xxh3_128": xxhash.xxh3_128_hexdigest(changed)}
        rest = {each: value for each, value in manifest.items() if each != "checksum"}
        manifest["checksum"] = xxhash.xxh3_128_hexdigest(orjson.dumps(rest, option=orjson.OPT_SORT_KEYS))
        return files | {"manifest.json": orjson.dumps(manifest)}
    except (orjson.JSONDecodeError, orjson.JSONEncodeError, AttributeError, KeyError, TypeError):
        return files  # it is no manifest any more


def read_store(folder: Path, files: Files, whole: Files) -> None:
    store = TokenStore(folder)
    store.verify()
    for part in (store.train, store.validation):
        if part.tokens:
            assert len(part.read(part.tokens - 1, 1)) == 1
            assert len(part.ends()) == part.samples
    assert len(store.digest) == 32
    told = read_manifest(files["manifest.json"])
    if told == orjson.loads(whole["manifest.json"]):
        assert all(files.get(name) == data for name, data in whole.items() if name != "manifest.json"), "not found"


# Checkpoints


class Checkpoints:
    """Two of a tiny run, the newer of which is changed, whole or in pieces."""

    def __init__(self, model: Any, folder: Path) -> None:
        config = TrainConfig(batch=4, learning_rate=1e-3)
        self._optimizer = Optimizer(model, config)
        self._items = checkpoint_items(self._optimizer)
        for step in (3, 6):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 0.01)
            self._optimizer.step(1.0)
            progress = Progress(step=step, tokens=step * 64, validation={"loss": 3.5}, best=3.5, best_step=3, store="x")
            content = CheckpointContent(collect_states(self._items), progress, "run: x\n")
            write_full(folder / f"step-{step:09d}", content)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        write_sharded(folder / "pieces", content, is_first=True, group=None)
        dist.destroy_process_group()
        self.older = folder / "step-000000003"
        self.forms = [files_in(folder / "step-000000006"), files_in(folder / "pieces")]

    def read(self, folder: Path, files: Files, whole: Files) -> None:
        newer = folder / "all" / "step-000000006"
        newer.mkdir(parents=True)
        for name, data in files.items():
            (newer / name).write_bytes(data)
        (folder / "all" / "step-000000003").symlink_to(self.older)
        said: list[str] = []
        with route_messages(lambda record: said.append(record.getMessage())):
            progress = load_checkpoint(folder / "all", self._items)
        assert progress is not None
        assert isinstance(progress.step, int)
        assert isinstance(progress.validation, dict)
        if progress.step != 6 or said:
            assert said, "an earlier one was taken without a word"
            assert progress.step == 3
        elif orjson.loads(files["checksums.json"]) == orjson.loads(whole["checksums.json"]):
            assert all(files.get(name) == data for name, data in whole.items() if name != "checksums.json"), "not found"


def change_checkpoint(files: Files, chance: Random) -> Files:
    name = chance.choice(sorted(files))
    files = files | {name: change(name, files[name], chance)}
    if name != "checksums.json" and chance.random() < 0.7:
        sums = orjson.loads(files["checksums.json"]) | {name: xxhash.xxh3_128_hexdigest(files[name])}
        files["checksums.json"] = orjson.dumps(sums)
    return files


# Tokenizers and models


def read_tokenizer(folder: Path, files: Files, whole: Files) -> None:
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.vocabulary > 0
    assert tokenizer.pad_id >= 0
    assert len(tokenizer.fingerprint) == 32
    (ids,) = tokenizer.encode(["some words, и слова"])
    tokenizer.decode(ids)


class ModelReader:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def read(self, folder: Path, files: Files, whole: Files) -> None:
        """From the folder; or from scratch, by the values of its config.json as they would stand in a run file."""
        kind = "AutoModelForMaskedLM" if b'"roberta"' in whole["config.json"] else "AutoModelForCausalLM"
        if "scratch" in files:
            values = {"model": {"config": json.loads(files["config.json"])}}
            wanted = parse_run({**RUN, **values}, {}, {(): "run.yaml"}).model
        else:
            wanted = ModelConfig.model_validate({"from": str(folder)})
        check_model(wanted, kind)
        built = build_model(ModelRequest(wanted, kind, block=8), self._tokenizer)
        assert built.num_parameters > 0


def change_model(files: Files, chance: Random) -> Files:
    """Most often other values of the configuration, in the folder or as a run file has them (`scratch`)."""
    way = chance.random()
    if way < 0.3:
        saved = ("architectures", "dtype", "transformers_version", "_name_or_path")
        values = {name: each for name, each in json.loads(files["config.json"]).items() if name not in saved}
        return files | {"scratch": b"", "config.json": to_json(change_values(values, chance), chance)}
    if way < 0.75:
        return files | {"config.json": change_json(files["config.json"], chance)}
    return change_one(files, chance)
