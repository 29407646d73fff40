"""The inputs of all contestants: a model's first weights, and random tokens as a store and in training order."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import yaml
from transformers import PreTrainedConfig, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from artel.config import ModelConfig
from artel.diagnostics.bench.training.artel_loop import run_of
from artel.diagnostics.bench.training.contestant import Work
from artel.errors import InputError, Problem
from artel.models.loading.build import build_model
from artel.models.loading.check import check_model
from artel.models.loading.request import ModelRequest
from artel.objectives import objective_of
from artel.registry import OBJECTIVES
from artel.tokens import Sample, StoreWriter, Tokenizer, TokenStore, load_tokenizer, micro_batches, step_numbers

# Small models for each kind of head, for two CPU cores.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "AutoModelForCausalLM": {"model_type": "gpt2", "n_layer": 6, "n_embd": 384, "n_head": 6, "vocab_size": 16_384},
    "AutoModelForMaskedLM": {
        "model_type": "roberta",
        "num_hidden_layers": 6,
        "hidden_size": 384,
        "num_attention_heads": 6,
        "intermediate_size": 1536,
        "vocab_size": 16_384,
        "type_vocab_size": 1,
    },
}
# Keys about the library that wrote the configuration and the dtype of its weights, which are float32 here.
_IGNORED = ("architectures", "transformers_version", "dtype", "torch_dtype")
_SPECIAL = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>", "mask_token": "<mask>"}
_SEED = 0
_CHUNK = 1_000_000  # tokens written at a time


@dataclass(frozen=True, slots=True)
class DocumentSamples:
    """The model in the folder of a `Work`."""

    config: PreTrainedConfig
    parameters: int
    targets: int
    """In the first global batch."""


def read_model(option: str, objective: str) -> dict[str, Any]:
    """The configuration in `--model`: a folder, a file or a mapping as YAML; a small model where it is empty.

    Dropout is 0 unless it is set. Raises InputError for what cannot be read or is no model for the objective.
    """
    values = _read(option) if option else dict(_DEFAULTS[OBJECTIVES[objective].auto_class])
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        fix = "write {model_type: gpt2, n_layer: 6}, or give a JSON or YAML file or a folder with config.json"
        raise InputError.at("--model", f"{option!r} is no model's configuration: it has no model_type", fix)
    values = {key: value for key, value in values.items() if key not in _IGNORED and not key.startswith("_")}
    known = _known(values["model_type"])
    if _is_config_json(option):  # transformers ignores keys of its earlier versions there
        values = {key: value for key, value in values.items() if key in known or key == "model_type"}
    try:
        check_model(ModelConfig(config=values), OBJECTIVES[objective].auto_class)
    except InputError as error:
        raise _about_options(error) from None
    dropout = {key: 0.0 for key, value in known.items() if "drop" in key and isinstance(value, float) and value > 0}
    return dropout | values


def make(work: Work, model: dict[str, Any], steps: int) -> DocumentSamples:
    """Write model/, store/, inputs.npy and targets.npy for `steps` steps into `work.folder`. Raises InputError."""
    folder = Path(work.folder)
    vocabulary = int(model.get("vocab_size") or _known(model["model_type"]).get("vocab_size") or 16_384)
    made_up = _tokenizer(vocabulary, model.get("pad_token_id"))
    made_up.save_pretrained(str(folder / "store" / "tokenizer"))
    tokenizer = load_tokenizer(str(folder / "store" / "tokenizer"))
    try:
        request = ModelRequest(
            ModelConfig(config=model), OBJECTIVES[work.objective].auto_class, block=work.length, seed=_SEED
        )
        built = build_model(request, tokenizer)
    except InputError as error:
        raise _about_options(error) from None
    built.model.save_pretrained(work.model)
    tokenizer.save(Path(work.model))
    _write_store(work, tokenizer, steps)
    targets = _write_rows(work, tokenizer, steps)
    return DocumentSamples(built.model.config, built.num_parameters, targets)


def _read(option: str) -> Any:
    path = Path(option)
    try:
        if path.is_dir():
            path = path / "config.json"
        text = path.read_text(encoding="utf-8") if not option.lstrip().startswith("{") else option
        return yaml.safe_load(text)  # JSON is YAML
    except (OSError, ValueError, yaml.YAMLError) as error:
        fix = "give a JSON or YAML file, a folder with config.json, or {model_type: gpt2, n_layer: 6}"
        reason = " ".join(str(error).split())[:200]
        raise InputError.at("--model", f"{option!r} cannot be read: {reason}", fix) from None


def _is_config_json(option: str) -> bool:
    return bool(option) and (Path(option).is_dir() or Path(option).name == "config.json")


def _known(model_type: str) -> dict[str, Any]:
    """The keys of a model type with their defaults; empty for one that transformers does not know."""
    if model_type not in CONFIG_MAPPING:
        return {}
    plain = CONFIG_MAPPING[model_type]()
    return plain.to_dict() | {name: getattr(plain, name, None) for name in plain.attribute_map}


def _about_options(error: InputError) -> InputError:
    """The same problems, named by this command's options instead of a run file's keys."""
    return InputError(
        [
            Problem(
                problem.where.replace("model.config", "--model").replace("data.block", "--length"),
                problem.what,
                problem.fix.replace("data.block:", "--length"),
            )
            for problem in error.problems
        ]
    )


def _tokenizer(vocabulary: int, pad: int | None) -> PreTrainedTokenizerFast:
    """A tokenizer of the words t0, t1 … and the special tokens of encoders, with the model's padding id."""
    from tokenizers import Tokenizer as Backend
    from tokenizers.models import WordLevel
    from tokenizers.processors import TemplateProcessing

    places = {"<pad>": pad if pad is not None and 0 <= pad < vocabulary else 1}
    free = (place for place in range(vocabulary) if place != places["<pad>"])
    places |= {name: next(free) for name in _SPECIAL.values() if name != "<pad>"}
    names = {place: name for name, place in places.items()}
    backend = Backend(WordLevel({names.get(at, f"t{at}"): at for at in range(vocabulary)}, unk_token="<unk>"))
    backend.post_processor = TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> $B </s>",
        special_tokens=[(name, places[name]) for name in ("<s>", "</s>")],
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, **_SPECIAL)


def _write_store(work: Work, tokenizer: Tokenizer, steps: int) -> None:
    """A store of random ids, none of them a special token: the blocks of `steps` steps."""
    objective = OBJECTIVES[work.objective]
    framed = tokenizer.frame().size if objective.encoder else 0
    blocks = steps * work.batch
    tokens = blocks * (work.length - framed) + objective.generates  # the token after the last block
    ordinary = np.setdiff1d(np.arange(tokenizer.vocabulary), tokenizer.special_ids)
    random = np.random.default_rng(_SEED)
    store = Path(work.folder) / "store"
    writer = StoreWriter(store, tokenizer.vocabulary)
    for start in range(0, tokens, _CHUNK):
        ids = random.choice(ordinary, min(_CHUNK, tokens - start))
        writer.add("train", [Sample(ids)], len(ids), f"random:{start}")
    about = {"key": "bench", "objective": work.objective, "tokenizer": tokenizer.fingerprint}
    writer.close(about | {"vocabulary": tokenizer.vocabulary})
    (store / "ledger.json").write_bytes(orjson.dumps({}))


def _write_rows(work: Work, tokenizer: Tokenizer, steps: int) -> int:
    """Write the global batches of `steps` steps in artel's order; the number of targets in the first one."""
    run = run_of(work)
    objective = objective_of(run, tokenizer)
    part = TokenStore(Path(work.folder) / "store").train
    samples = objective.dataset(part)
    order = objective.order(part, len(samples))
    shape = (steps * work.batch, work.length)
    files = {
        name: np.lib.format.open_memmap(Path(work.folder) / f"{file}.npy", "w+", np.int32, shape)
        for name, file in (("input_ids", "inputs"), ("targets", "targets"))
    }
    targets = 0
    for step in range(steps):
        numbers = step_numbers(step, work.batch, shape[0])
        [rows] = micro_batches(
            samples, order.at(numbers), numbers // len(samples), rank=0, world=1, batch=work.batch, size=work.batch
        )
        batch = objective.batch(rows)
        assert batch.tokens == work.batch * work.length
        targets = targets or batch.targets
        for name, file in files.items():
            file[numbers] = batch.tensors[name].numpy()
    for file in files.values():
        file.flush()
    return targets
