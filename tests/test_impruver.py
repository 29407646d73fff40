"""impruver's YAML as a run file: every key is carried over or told, wrong values are refused all at once."""

import copy
import dataclasses
import json
import re

import pytest
import yaml

from artel.config import load_run, parse_run
from artel.config.converters.tools import convert
from artel.errors import InputError
from support.impruver_configs import FROM_SCRATCH, PRETRAINED
from support.runs import artel, metrics, succeed

HUB = "hf://datasets/OWNER/{}@refs/convert/parquet/{}/*.parquet"


def converted(text):
    """The run file, and what is told of keys that it does not hold, or not as they were meant."""
    result = convert(text, "old.yaml")
    return result.run, result.not_carried + result.differs


def reported(left):
    """The keys of which something is told."""
    return {line.split(": ")[1].split(" = ")[0] for line in left if line.startswith("old.yaml:")}


def leaves(tree):
    """(key, holder, name) of every key that has no section below it; what stands in a list of names is one value."""
    for name, value in tree.items():
        if name == "datasets":
            for number, dataset in enumerate(value):
                yield from ((f"datasets.{number}.{key}", dataset, key) for key in dataset)
        elif isinstance(value, dict):
            for key, inner in value.items():
                if key == "config":
                    yield from ((f"model.config.{deepest}", inner, deepest) for deepest in inner)
                else:
                    yield f"{name}.{key}", value, key
        else:
            yield name, tree, name


def other(key, value):
    """Another value that the key may have."""
    choices = {"model.dtype": "bf16", "trainer.eval_strategy": "no", "trainer.save_strategy": "epoch",
               "trainer.lr_scheduler_type": "linear", "lora.bias": "none", "lora.task_type": "CAUSAL_LM",
               "model.config_class": "transformers.LlamaConfig", "trainer.report_to": ["wandb"],
               "trainer.metric_for_best_model": "loss", "trainer.optim": "sgd", "trainer.max_steps": 30,
               "trainer.max_grad_norm": 2, "model.config.n_inner": 7}  # fmt: skip
    if key in choices:
        return choices[key]
    if isinstance(value, bool):
        return not value
    if isinstance(value, dict):
        return {next(iter(value)): "other" if isinstance(next(iter(value.values())), str) else 0.3}
    if isinstance(value, list):
        return [*value, "other"]
    if key.endswith("converter"):
        return "impruver.char_dialog_to_messages"
    if key.endswith("split"):
        return "train[:7]"
    if isinstance(value, str) and value[0].isdigit():
        return "2e-5"
    return f"{value}_" if isinstance(value, str) else value / 2 if isinstance(value, float) else value + 1


@pytest.mark.parametrize("text", [PRETRAINED, FROM_SCRATCH], ids=["pretrained", "scratch"])
def test_every_key_is_carried_over_or_told(text):
    """Another value of a key shows: in the run file, or in what is told of it."""
    tree = yaml.safe_load(text)
    before = convert(yaml.safe_dump(tree, sort_keys=False), "old.yaml")
    parse_run(copy.deepcopy(before.run), {}, {(): "old.yaml"})
    told = reported(before.not_carried + before.differs)
    for key, _, name in leaves(tree):
        assert key in told | before.carried.keys() | before.same.keys(), f"{key} is neither carried over nor told"
        changed = copy.deepcopy(tree)
        holder = next(holder for other_key, holder, _ in leaves(changed) if other_key == key)
        holder[name] = other(key, holder[name])
        after = convert(yaml.safe_dump(changed, sort_keys=False), "old.yaml")
        is_seen = after.run != before.run or without_places(after) != without_places(before)
        assert is_seen or key in before.same, f"another {key} is lost in silence"
        if key not in told | before.same.keys():
            assert after.run != before.run, f"{key} is neither carried over nor told"


def without_places(result):
    """What is told, without the places in the file."""
    return [re.sub(r"^old\.yaml:\d+: ", "", line) for line in result.not_carried + result.differs]


def test_what_becomes_of_a_pretrained_model():
    run, left = converted(PRETRAINED)
    assert run == {
        "run": "./models/all", "seed": 7, "objective": "chat",
        "data": {
            "sources": [
                {"path": "./texts/questions.jsonl", "format": "chat", "converter": "alpaca",
                 "mapping": {"instruction": "question", "output": "answer"}, "rows": "[:1000]"},
                {"path": HUB.format("dialogs", "ru/test"), "format": "chat", "converter": "dialog",
                 "rows": "[10%:-5%]"},
                {"path": HUB.format("own", "default/train"), "format": "chat",
                 "converter": "my.converters:rows_to_messages"},
            ],
            "packing": "concatenate", "validation": 0.05, "block": 1500,
        },
        "tokenizer": {"from": "OWNER/tokenizer"},
        "model": {
            "from": "OWNER/model", "quantize": "int8",
            "lora": {"rank": 4, "alpha": 24, "dropout": 0.1, "rslora": True, "dora": True, "save": ["embed_tokens"],
                     "target": ["q_proj", "v_proj"]},
        },
        "train": {
            "precision": "bf16", "batch": 16, "micro_batch": 2, "epochs": 2, "learning_rate": 4e-4,
            "weight_decay": 0.08, "epsilon": 1e-6, "betas": [0.8, 0.99], "clip": 0.5, "optimizer": "adamw8bit",
            "schedule": "cosine", "warmup": 16, "minimum_learning_rate": 0.2, "compile": "on",
            "activation_checkpointing": "full",
        },
        "validate": {"every": 70}, "checkpoint": {"every": 80, "keep": 2}, "log": {"every": 5},
        "track": ["console", "jsonl", "wandb", "tensorboard"],
    }  # fmt: skip
    assert reported(left) == {
        "train_path", "val_path", "datasets.0.add_global_bos", "datasets.0.add_global_eos",
        "datasets.0.max_tokens_count", "datasets.1.only_target_loss", "model.class", "model.attn_implementation",
        "model.load_in_4bit", "model.dtype", "model.config_class", "model.config.n_layer", "lora.bias",
        "lora.task_type", "lora.init_lora_weights", "tokenizer.class", "tokenizer.special_tokens",
        "tokenizer.chat_template", "trainer.per_device_train_batch_size", "trainer.per_device_eval_batch_size",
        "trainer.warmup_ratio", "trainer.optim", "trainer.metric_for_best_model", "trainer.greater_is_better",
        "trainer.load_best_model_at_end", "trainer.data_seed", "trainer.remove_unused_columns",
        "trainer.report_to", "trainer.ddp_timeout",
    }  # fmt: skip


def test_what_becomes_of_a_model_from_scratch():
    run, left = converted(FROM_SCRATCH)
    assert run["model"] == {"config": {"model_type": "gpt2", "n_layer": 3, "n_embd": 96, "n_head": 3, "n_inner": None,
                                       "max_position_embeddings": 128}}  # fmt: skip
    assert run["chat"] == {"train_on": "all", "template": "chatml"}
    assert run["data"] == {"sources": [{"path": "train.json", "format": "chat", "converter": "messages"}],
                           "packing": "concatenate", "validation": 0.05}  # fmt: skip
    assert run["train"] == {
        "precision": "fp16", "batch": 8, "micro_batch": 8, "steps": 100, "learning_rate": 5e-5, "weight_decay": 0,
        "lion": {"betas": [0.9, 0.999]}, "clip": None, "optimizer": "lion", "schedule": "constant", "warmup": 0,
    }  # fmt: skip
    assert (run["validate"], run["checkpoint"], "log" in run) == ({"every": "1 epoch"}, {"every": "1 epoch"}, False)
    assert reported(left) == {
        "model.dtype", "model.config.n_ctx", "model.config.vocab_size", "model.config.torch_dtype",
        "model.config._attn_implementation", "model.config.bos_token_id", "model.config.n_layr", "model.load_in_8bit",
        "lora.r", "trainer.num_train_epochs", "trainer.eval_steps", "trainer.save_strategy",
        "trainer.warmup_steps", "trainer.logging_steps",
    }  # fmt: skip
    assert any("gpt2 has no such key; did you mean n_layer?" in line for line in left)


def test_what_the_scripts_do_of_themselves_is_written_down():
    run, left = converted("datasets: [{name: a.jsonl}]\nmodel: {name: m}\nlora: {lora_alpha: 2}\ntrainer: {}\n")
    assert run["model"]["lora"] == {"rank": 8, "alpha": 2, "dropout": 0}
    assert (run["train"]["epochs"], run["train"]["schedule"], run["train"]["warmup"]) == (3, "linear", 0)
    assert run["validate"] == {"every": "never"}
    assert "chat" not in run  # the assistant's turns
    assert [line.split(" is not given")[0] for line in left] == ["tokenizer.chat_template", "lora.target_modules"]


@pytest.mark.parametrize(
    ("split", "rows", "is_told"),
    [("train", None, False), ("train[:1000]", "[:1000]", False), ("train[-5%:]", "[-5%:]", False),
     ("validation", None, True), ("train[:10]+test", None, True), ("train[1shard]", None, True)],
)  # fmt: skip
def test_splits(split, rows, is_told):
    run, left = converted(f"datasets: [{{name: a.jsonl, split: '{split}'}}]\nmodel: {{name: m}}\ntrainer: {{}}\n")
    assert run["data"]["sources"][0].get("rows") == rows
    assert ("datasets.0.split" in reported(left)) == is_told


def test_data_sets_that_lie_here_are_paths(tmp_path):
    (tmp_path / "mine").mkdir()
    text = "datasets: [{name: mine}, {name: OWNER/NAME}, {name: ./gone}]\nmodel: {name: m}\ntrainer: {}\n"
    run, left = converted(text)
    paths = [source["path"] for source in run["data"]["sources"]]
    assert paths == ["mine", HUB.format("NAME", "default/train"), "./gone"]
    assert not reported(left)


def test_composed_files_without_data_sets(tmp_path):
    train, validation = tmp_path / "train.jsonl", tmp_path / "val.jsonl"
    for file in (train, validation):
        file.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n')
    text = f"train_path: {train}\nval_path: {validation}\nmodel: {{name: m}}\ntrainer: {{}}\n"
    run, _ = converted(text)
    assert run["data"] == {"sources": [{"path": str(train), "format": "chat"}], "packing": "concatenate",
                           "validation": str(validation)}  # fmt: skip
    train.write_text('{"input_ids": [1, 2], "labels": [1, 2], "attention_mask": [1, 1]}\n')
    with pytest.raises(InputError, match=r"old\.yaml:1: train_path: .* contains token ids, not text\n.*datasets"):
        converted(text)


@pytest.mark.parametrize("name", ["impruver_13B_lora_saiga2.yaml", "impruver_30M_full_alpaca.yaml"])
def test_what_convert_prints_is_a_run_file(tmp_path, shared_data, name):
    file = shared_data / "configs" / name
    done = succeed("config", "convert", file)
    (tmp_path / "run.yaml").write_text(done.stdout)
    run, old = load_run(str(tmp_path / "run.yaml")), yaml.safe_load(file.read_text())
    trainer = old["trainer"]
    assert run.objective == "chat"
    assert len(run.data.sources) == len(old["datasets"])
    assert run.train.batch == trainer["per_device_train_batch_size"] * trainer["gradient_accumulation_steps"]
    assert run.data.block == old["tokenizer"]["max_tokens_count"]
    assert (run.model.quantize, run.model.lora is None) == (("nf4", False) if "lora" in old else ("none", True))
    beginnings = ("not carried over: ", "differs: ", "same in artel: ")
    assert all(line.startswith(beginnings) for line in done.stderr.splitlines())
    as_json = json.loads(artel("config", "convert", file, "--json").stdout)
    assert as_json["run"] == yaml.safe_load(done.stdout)


def test_all_wrong_values_at_once():
    text = """datasets:
  - converter: instruction
  - name: a.jsonl
    split: 3
    mapping: [a]
    only_target_loss: maybe
    max_tokens_count: 0
  - text
model:
  config_class: transformers.GPT2Confg
  dtype: int3
  load_in_4bit: 1
lora: 5
tokenizer: {name: 3}
trainer:
  learning_rate: fast
  num_train_epochs: 0
  per_device_train_batch_size: 0
  lr_scheduler_type: cosin
  warmup_ratio: 2
  weight_decay: -1
  eval_strategy: often
  torch_compile: often
  report_to: 3
  seed: 1.5
"""
    with pytest.raises(InputError) as error:
        converted(text)
    problems = {problem.where: problem for problem in error.value.problems}
    assert len(problems) == len(error.value.problems)
    assert problems.keys() == {
        "old.yaml:2: datasets.0", "old.yaml:2: datasets.0.converter", "old.yaml:4: datasets.1.split",
        "old.yaml:5: datasets.1.mapping", "old.yaml:8: datasets.2",
        "old.yaml:6: datasets.1.only_target_loss", "old.yaml:7: datasets.1.max_tokens_count",
        "old.yaml:10: model.config_class", "old.yaml:11: model.dtype", "old.yaml:12: model.load_in_4bit",
        "old.yaml:13: lora", "old.yaml:14: tokenizer.name", "old.yaml:16: trainer.learning_rate",
        "old.yaml:17: trainer.num_train_epochs", "old.yaml:18: trainer.per_device_train_batch_size",
        "old.yaml:19: trainer.lr_scheduler_type", "old.yaml:20: trainer.warmup_ratio",
        "old.yaml:21: trainer.weight_decay", "old.yaml:22: trainer.eval_strategy", "old.yaml:23: trainer.torch_compile",
        "old.yaml:24: trainer.report_to", "old.yaml:25: trainer.seed",
    }  # fmt: skip
    assert problems["old.yaml:10: model.config_class"].fix == "did you mean transformers.GPT2Config?"
    assert all(problem.what for problem in problems.values())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trainer: {}\ndatasets: [{name: a}]\n", "has no model"),
        ("trainer: {}\ndatasets: [{name: a}]\nmodel: {config: {n_layer: 2}}\n", "has no model type"),
        ("trainer: {}\nlora: {}\nmodel: {name: m}\n", "has no data sets"),
        ("trainer: {}\ndatasets: {name: a}\nmodel: {name: m}\n", "is not a list of data sets"),
        ("trainer: {}\ndatasets: [\n", r"old\.yaml:3: is not valid YAML"),
        ("trainer: {}\ntrainer: {}\ndatasets: []\n", "is given twice"),
        ("data: {sources: []}\nmodel: {from: m}\ntrainer: {}\nlora: {}\n", "is not a known configuration"),
        ("model: {from: m}\ntokenizer: {from: m}\ntrain: {}\n", "is not a known configuration"),
    ],
)
def test_what_is_no_training_configuration(text, message):
    with pytest.raises(InputError, match=message):
        converted(text)


def test_slips_of_the_pen_are_told_with_what_was_meant():
    slips = {"output_dirr": "output_dir", "datasets.0.convertor": "converter", "model.load_in_4bits": "load_in_4bit",
             "lora.target_module": "target_modules", "tokenizer.max_token_count": "max_tokens_count",
             "trainer.learning_rat": "learning_rate"}  # fmt: skip
    text = """output_dirr: a
datasets: [{name: a.jsonl, convertor: b}]
model: {name: m, load_in_4bits: true}
lora: {target_module: c}
tokenizer: {max_token_count: 3}
trainer: {learning_rat: 1e-5, colour: red}
"""
    _, left = converted(text)
    for key, meant in slips.items():
        assert any(f": {key} = " in line and line.endswith(f"did you mean {meant}?") for line in left), key
    assert "old.yaml:6: trainer.colour = red: artel has no equivalent" in left


def test_a_true_key_of_the_trainer_is_not_taken_for_a_slip():
    """Every field of TrainingArguments and LoraConfig converts; none that artel has not is called misspelt."""
    from peft import LoraConfig
    from transformers import TrainingArguments

    for section, kind in (("trainer", TrainingArguments), ("lora", LoraConfig)):
        for field in dataclasses.fields(kind):
            text = yaml.safe_dump({"datasets": [{"name": "a.jsonl"}], "model": {"name": "m"}, "trainer": {}}
                                  | {section: {field.name: "odd"}})  # fmt: skip
            try:
                result = convert(text, "old.yaml")
            except InputError as error:  # a key that artel has, and `odd` is wrong for it
                assert f" {section}.{field.name}: " in str(error)  # noqa: PT017
                continue
            key = f"{section}.{field.name}"
            lines = [line for line in result.not_carried + result.differs if f": {key} = odd: " in line]
            assert lines or key in result.carried.keys() | result.same.keys(), key
            assert not any("did you mean" in line for line in lines), key


@pytest.mark.slow
def test_a_converted_configuration_trains(shared_data, tmp_path):
    """From impruver's YAML to a trained model, by the commands that its users would type."""
    old = tmp_path / "old.yaml"
    old.write_text(yaml.safe_dump({
        "output_dir": str(tmp_path / "out"),
        "datasets": [{"name": str(shared_data / "chat" / "identity.json"), "split": "train[:80]",
                      "converter": "impruver.instruction_to_messages", "only_target_loss": False}],
        "model": {"class": "transformers.GPT2LMHeadModel", "config_class": "transformers.GPT2Config", "dtype": "fp32",
                  "config": {"n_layer": 2, "n_head": 2, "n_embd": 32, "max_position_embeddings": 128, "n_ctx": 128}},
        "tokenizer": {"name": str(shared_data / "tokenizers" / "gpt2"), "max_tokens_count": 128},
        "trainer": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 6,
                    "learning_rate": 1e-3, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "no",
                    "logging_steps": 1, "warmup_steps": 1, "torch_compile": False},
    }))  # fmt: skip
    converted = succeed("config", "convert", old)
    assert "n_ctx" in converted.stderr
    run = tmp_path / "run.yaml"
    run.write_text(converted.stdout)
    succeed("train", run, f"data.store={tmp_path / 'stores'}", f"run={tmp_path / 'run'}")
    trained = [line["loss"] for line in metrics(tmp_path / "run") if "loss" in line]
    assert len(trained) == 6
    assert trained[-1] < trained[0]
