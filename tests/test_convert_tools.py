"""Configurations of axolotl, LLaMA-Factory and command lines of transformers' scripts as run files."""

import copy
import json
import re
import sys
from pathlib import Path

import pytest
import yaml

import artel as artel_package
from artel.config import load_run, parse_run
from artel.config.converters.conversion import Conversion, KeyTable
from artel.config.converters.tools import convert, detect_tool
from artel.config.converters.yaml_text import add_comments, flatten
from artel.errors import InputError
from support import foreign_configs as configs
from support.converting import operations, reported
from support.runs import succeed

HUB = "hf://datasets/{}@refs/convert/parquet/{}/*.parquet"
YAMLS = {
    "axolotl-qlora": configs.AXOLOTL_QLORA, "axolotl-dpo": configs.AXOLOTL_DPO,
    "axolotl-pretrain": configs.AXOLOTL_PRETRAIN, "llama-factory-lora": configs.LLAMA_FACTORY_LORA,
    "llama-factory-dpo": configs.LLAMA_FACTORY_DPO, "axolotl-more": configs.AXOLOTL_MORE,
    "llama-factory-more": configs.LLAMA_FACTORY_MORE, "axolotl-grpo": configs.AXOLOTL_GRPO,
    "trl-grpo": configs.TRL_GRPO, "trl-grpo-lora": configs.TRL_GRPO_LORA,
}  # fmt: skip
# Other values of these would make another file of it, or one that the tool itself refuses.
FIXED = {"do_train", "base_model", "model_name_or_path", "dataset", "stage", "rl"}


@pytest.fixture
def data_sets():
    """The folder of data sets that LLaMA-Factory's configurations name."""
    Path("data").mkdir()
    Path("data/dataset_info.json").write_text(json.dumps(configs.LLAMA_FACTORY_DATA))


def changed(tree, key, value):
    """A copy of the tree with this value at the path `key`."""
    result = copy.deepcopy(tree)
    holder = result
    for part in key[:-1]:
        holder = holder[part]
    holder[key[-1]] = value
    return result


def other(value):
    if isinstance(value, bool):
        return not value
    if isinstance(value, list):
        return [*value, "other"]
    if isinstance(value, str):
        return str(float(value) / 2) if re.fullmatch(r"[\d.]+e-?\d+", value) else f"{value}x"
    return value + 3 if isinstance(value, int) else value / 2 or 0.25


@pytest.mark.parametrize("text", YAMLS.values(), ids=YAMLS)
def test_every_key_is_accounted_for_and_what_is_carried_has_an_effect(text, data_sets):
    tree = yaml.safe_load(text)
    before = convert(yaml.safe_dump(tree, sort_keys=False), "old")
    parse_run(copy.deepcopy(before.run), {}, {(): "old"})
    written = {".".join(map(str, key)): (key, value) for key, value in flatten(tree)}
    assert written.keys() == before.carried.keys() | reported(before).keys() | before.same.keys()
    for dotted in before.carried.keys() - FIXED:
        key, value = written[dotted]
        try:
            after = convert(yaml.safe_dump(changed(tree, key, other(value)), sort_keys=False), "old")
        except InputError as error:
            assert dotted.partition(".")[0] in str(error)  # noqa: PT017
            continue
        same = (after.run, set(after.same)) == (before.run, set(before.same))
        is_reported = reported(after).get(dotted) != reported(before).get(dotted)
        assert not same or is_reported, f"another {dotted} changes nothing"


def test_what_becomes_of_axolotls_qlora():
    result = convert(configs.AXOLOTL_QLORA, "old")
    assert result.run == {
        "run": "./out/qlora", "objective": "chat",
        "data": {
            "sources": [
                {"path": "./texts/support.jsonl", "format": "chat", "converter": "messages",
                 "mapping": {"messages": "dialog", "role": "speaker", "content": "said"}},
                {"path": HUB.format("OWNER/questions", "ru/train"), "format": "chat", "converter": "alpaca",
                 "rows": "[:20%]"},
            ],
            "validation": 0.1, "block": 4096, "store": "prepared", "dedup": {"exact": False}, "packing": "best_fit",
        },
        "model": {"from": "OWNER/base-7b", "quantize": "nf4",
                  "lora": {"rank": 32, "alpha": 16, "dropout": 0.05, "target": ["auto"]}},
        "chat": {"train_on": "assistant", "template": "chatml"},
        "train": {
            "precision": "auto", "batch": 8, "micro_batch": 2, "epochs": 3, "learning_rate": 2e-4,
            "weight_decay": 0.01, "betas": [0.9, 0.999], "optimizer": "adamw", "schedule": "cosine",
            "warmup": 0.1, "activation_checkpointing": "full",
        },
        "validate": {"every": "0.25 epoch"}, "checkpoint": {"every": "0.5 epoch", "keep": 4}, "log": {"every": 1},
        "parallel": {"deepspeed": "deepspeed_configs/zero2.json"}, "track": ["console", "jsonl", "wandb"],
    }  # fmt: skip
    assert reported(result).keys() == {
        "datasets.1.type", "micro_batch_size", "optimizer", "loss_watchdog_threshold",
        "special_tokens.pad_token", "wandb_project",
    }  # fmt: skip
    assert "multiply it by the number of processes" in reported(result)["micro_batch_size"]
    assert "WANDB_PROJECT" in reported(result)["wandb_project"]


AXOLOTL = "base_model: m\ndatasets: [{path: a.jsonl, type: chat_template}]\n"


@pytest.mark.parametrize(
    ("keys", "is_told"),
    [("val_set_size: 0.1", True), ("val_set_size: 0.1\nevals_per_epoch: 4", False), ("val_set_size: 0", False)],
    ids=str,
)
def test_that_axolotl_does_not_validate_by_itself_is_told(keys, is_told):
    result = convert(AXOLOTL + keys, "old")
    assert any("never validate" in line for line in result.differs) == is_told
    assert (result.run["validate"]["every"] == "never") == ("evals_per_epoch" not in keys)


def test_axolotls_tasks_of_the_harness_are_asked_at_the_end():
    plugin = "plugins: [axolotl.integrations.lm_eval.LMEvalPlugin]\nlm_eval_batch_size: 8\nlm_eval_post_train: true\n"
    result = convert(f"{AXOLOTL}{plugin}lm_eval_tasks: [piqa, arc_easy:5, piqa:3]\n", "old")
    assert {key: result.run["validate"][key] for key in ("tasks", "tasks_every")} == {
        "tasks": ["piqa", "arc_easy"], "tasks_every": "never",
    }  # fmt: skip
    assert {"plugins", "lm_eval_batch_size", "lm_eval_post_train"} <= result.same.keys()
    assert "num_fewshot" in reported(result)["lm_eval_tasks"]
    later = convert(AXOLOTL + "lm_eval_tasks: [piqa]\nlm_eval_post_train: false\n", "old")
    assert "tasks" not in later.run["validate"]
    assert "artel evaluate RUN --tasks" in reported(later)["lm_eval_tasks"]


@pytest.mark.parametrize(
    ("keys", "left"),
    [
        ("do_causal_lm_eval: true", "sacrebleu, comet, ter, chrf"),
        ("do_causal_lm_eval: true\neval_causal_lm_metrics: [ter, perplexity]", "not ter of"),
        ("do_causal_lm_eval: true\neval_causal_lm_metrics: [perplexity]", ""),
        ("do_causal_lm_eval: false\neval_causal_lm_metrics: [ter]", ""),
        ("do_bench_eval: true\nbench_dataset: mmlu", "validate.tasks: [mmlu]"),
    ],
    ids=str,
)
def test_what_axolotl_computes_of_written_answers_is_named(keys, left):
    result = convert(AXOLOTL + keys, "old")
    lines = {key: reported(result).get(key, "") for key in (line.partition(":")[0] for line in keys.splitlines())}
    assert all((left in line) if left else not line for line in lines.values()), lines


def test_what_becomes_of_axolotls_preferences_and_texts():
    run = convert(configs.AXOLOTL_DPO, "old").run
    assert run["data"]["sources"] == [
        {"path": "pairs.jsonl", "format": "preference",
         "mapping": {"messages": "talk", "chosen": "better", "rejected": "worse"}}]  # fmt: skip
    assert run["preference"] == {"loss": "dpo", "beta": 0.2}
    assert run["parallel"] == {"data": "fsdp", "offload": "cpu"}
    assert (run["train"]["precision"], run["train"]["steps"], run["train"]["warmup"]) == ("fp16", 500, 20)
    assert (run["train"]["schedule"], run["train"]["batch"], run["validate"]) == ("constant", 8, {"every": "never"})
    assert "lora" not in run["model"]
    run = convert(configs.AXOLOTL_PRETRAIN, "old").run
    assert (run["objective"], run["data"]["packing"], run["train"]["optimizer"]) == ("causal", "best_fit", "muon")
    assert (run["train"]["learning_rate"], run["train"]["muon_learning_rate"]) == (3e-4, 3e-4)
    assert run["data"]["sources"] == [
        {"path": HUB.format("OWNER/pages", "sample-10BT/train"), "format": "parquet", "field": "body"}
    ]


def test_what_becomes_of_trls_grpo():
    result = convert(configs.TRL_GRPO, "old")
    assert result.run["policy"] == {
        "preset": "grpo", "advantage": "deviation", "ratio": "token", "divide_by": "tokens",
        "clip_low": 0.2, "clip_high": 0.2, "answers": 16, "new_tokens": 2048, "temperature": 0.7,
        "rewards": [{"math": {"column": "solution"}, "weight": 1}, {"format": {}, "weight": 0.5},
                    {"function": "my_lib.rewards:tidy", "weight": 0.2}],
    }  # fmt: skip
    assert (result.run["train"]["batch"], result.run["data"]["block"]) == (4, 2560)  # 16 * 4 / 16 prompts
    assert {"per_device_train_batch_size", "max_prompt_length", "reward_funcs", "use_vllm"} <= reported(result).keys()
    result = convert(configs.TRL_GRPO_LORA, "old")
    assert result.run["policy"] == {
        "preset": "cispo", "advantage": "mean", "ratio": "token", "divide_by": "tokens", "clip_low": 1.0,
        "clip_high": 4, "kl": 0.04, "answers": 8, "new_tokens": 512, "temperature": 1, "top_p": 0.95, "top_k": 50,
        "overlong": "punish", "overlong_tokens": 256, "steps": 4, "rewards": [{"model": "./reward"}],
    }  # fmt: skip
    assert {"min_p", "delta", "sync_ref_model", "reward_funcs"} <= reported(result).keys()
    assert "beta" not in reported(result)  # with an adapter, and without the correction, it is the same
    full = configs.TRL_GRPO_LORA.replace("use_peft: true", "use_peft: false").replace("load_in_4bit: true", "")
    assert "beta" not in reported(convert(full, "old"))  # the reference is a second copy of the model


def test_data_files_dtype_and_batch_of_trl():
    text = "model_name_or_path: m\nreward_funcs: [a.b]\nuse_peft: true\ndtype: bfloat16\n"
    data_sets = "datasets: [{path: json, data_files: a.jsonl}, {path: O/b, data_files: c.jsonl}]\n"
    result = convert(text + data_sets, "old")
    assert [source["path"] for source in result.run["data"]["sources"]] == [["a.jsonl"], ["hf://datasets/O/b/c.jsonl"]]
    assert not result.comments
    assert result.run["model"]["lora"]["base"] == "bf16"
    for start in ("read as a configuration of trl grpo", "per_device_train_batch_size is not set: train.batch counts"):
        assert any(line.startswith(start) for line in result.differs)


def test_what_becomes_of_axolotls_grpo():
    result = convert(configs.AXOLOTL_GRPO, "old")
    assert (result.run["objective"], result.run["data"]["sources"][0]["format"]) == ("policy", "prompts")
    assert result.run["policy"] == {
        "preset": "grpo", "advantage": "mean", "ratio": "token", "divide_by": "longest", "clip_low": 0.1,
        "clip_high": 0.28, "kl": 0.001, "answers": 4, "new_tokens": 256, "temperature": 0.9,
        "rewards": [{"function": "rewards:rand_reward_func", "weight": 1}, {"model": "OWNER/reward", "weight": 0.5}],
    }  # fmt: skip
    assert result.run["train"]["batch"] == 2
    assert {"trl.beta", "trl.use_vllm", "trl.reward_funcs", "datasets.0.type"} <= reported(result).keys()
    # The same section has no effect on preferences.
    other = convert(configs.AXOLOTL_DPO + "trl: {num_generations: 4}\n", "old")
    assert "policy" not in other.run
    assert "rl: grpo" in reported(other)["trl.num_generations"]


def test_what_becomes_of_llama_factorys_lora(data_sets):
    result = convert(configs.LLAMA_FACTORY_LORA, "old")
    assert result.run["data"] == {
        "sources": [
            {"path": "data/support.jsonl", "format": "chat", "converter": "messages", "rows": "[:1000]",
             "mapping": {"messages": "dialog", "role": "speaker", "content": "said", "system": "rules"}},
            {"path": HUB.format("OWNER/questions", "ru/train"), "format": "chat", "converter": "alpaca",
             "rows": "[:1000]", "mapping": {"instruction": "question", "input": "context", "output": "answer"}},
        ],
        "validation": 0.1, "block": 2048, "packing": "concatenate", "dedup": {"exact": False},
    }  # fmt: skip
    assert result.run["model"] == {
        "from": "OWNER/base-4b", "quantize": "nf4",
        "lora": {"rank": 8, "alpha": 16, "dropout": 0, "target": ["auto"]},
    }  # fmt: skip
    assert result.run["train"] == {
        "precision": "bf16", "batch": 8, "micro_batch": 1, "epochs": 3, "learning_rate": 1e-4, "weight_decay": 0,
        "betas": [0.9, 0.999], "schedule": "cosine", "warmup": 0.1,
    }  # fmt: skip
    assert result.run["parallel"] == {"deepspeed": "examples/deepspeed/ds_z3_config.json"}
    assert (result.run["validate"], result.run["checkpoint"]) == ({"every": 500}, {"every": 500})
    assert reported(result).keys() == {
        "trust_remote_code", "template", "cutoff_len", "per_device_train_batch_size", "ddp_timeout",
        "overwrite_output_dir",
    }  # fmt: skip


def test_what_becomes_of_llama_factorys_preferences(data_sets):
    result = convert(configs.LLAMA_FACTORY_DPO, "old")
    assert result.run["preference"] == {"loss": "simpo", "beta": 2, "margin": 1.4}
    assert result.run["data"]["sources"] == [
        {"path": "data/pairs.json", "format": "preference",
         "mapping": {"instruction": "question", "chosen": "better", "rejected": "worse"}}]  # fmt: skip
    assert result.run["train"]["precision"] == "fp32"
    assert "artel has no such optimizer" in reported(result)["use_galore"]


def test_a_data_set_that_nobody_describes_is_marked_in_the_run_file():
    result = convert(configs.LLAMA_FACTORY_LORA, "old")
    text = add_comments(result.run, result.comments)
    assert yaml.safe_load(text) == result.run
    lines = text.splitlines()
    at = lines.index("  - path: data/support.json")
    assert lines[at - 1] == "  # your file of the data set support: data/dataset_info.json does not exist"


REWARD_OF_TRL = "reward_funcs: [a.b]\n"
PROMPTS_OF_TRL = f"model_name_or_path: m\n{REWARD_OF_TRL}dataset_name: a.jsonl\n"
TEXTS_OF_AXOLOTL = "base_model: m\ndatasets: [{path: a.txt, type: completion}]\n"


@pytest.mark.parametrize(
    ("text", "run", "told"),
    [
        (f"{configs.AXOLOTL_DPO}trl: {{beta: 0.05, use_vllm: true}}\n",
         {"preference": {"loss": "dpo", "beta": 0.05}},
         {"trl.use_vllm": "applies only with rl: grpo", "rl_beta": "trl.beta is set"}),
        (f"{TEXTS_OF_AXOLOTL}use_mlflow: true\nuse_trackio: true\nmlflow_tracking_uri: http://127.0.0.1:5000\n"
         "trackio_space_id: me/space\n",
         {"track": ["console", "jsonl", "mlflow", "trackio"]},
         {"mlflow_tracking_uri": "MLFLOW_TRACKING_URI", "trackio_space_id": "TRACKIO_SPACE_ID"}),
        (f"{TEXTS_OF_AXOLOTL}lora_modules_to_sav: [a]\nquantize_moe_expert: true\n", {},
         {"quantize_moe_expert": "did you mean quantize_moe_experts?"}),
        (f"{PROMPTS_OF_TRL}dtype: auto\n", {}, {"dtype": "if the model is saved in bf16, write train.weights: bf16"}),
        (f"{PROMPTS_OF_TRL}reward_funcs: get_soft_overlong_punishment\nreward_weights: 1\n".replace(REWARD_OF_TRL, ""),
         {}, {"reward_funcs": "counts from 1,280 tokens"}),
        (f"{PROMPTS_OF_TRL}max_tool_calling_iterations: 3\n", {}, {"max_tool_calling_iterations": "policy.turns"}),
        ("base_model: m\nrl: grpo\ntrl: {rollout_func: a.b, reward_funcs: [a.b]}\ndatasets: [{path: a.jsonl}]\n", {},
         {"trl.rollout_func": "write policy.tools or policy.environment"}),
        ("model_name_or_path: m\ndo_train: true\ndataset: a\nlerning_rate: 3\nplot_los: true\n", {},
         {"lerning_rate": "did you mean learning_rate?"}),
    ],
    ids=["beta of trl", "trackers", "slips in axolotl", "dtype of trl", "weight of the overlong penalty",
         "tool calls of trl", "rollouts of axolotl", "slips in LLaMA-Factory"],
)  # fmt: skip
def test_what_is_carried_and_told(text, run, told):
    result = convert(text, "old")
    assert result.run | run == result.run
    assert all(part in reported(result)[key] for key, part in told.items()), reported(result)


def test_what_becomes_of_a_model_from_scratch():
    result = convert(configs.RUN_MLM, "old")
    assert result.run["model"] == {"config": {
        "model_type": "roberta", "num_hidden_layers": 4, "hidden_dropout_prob": 0.2,
        "tie_word_embeddings": False}}  # fmt: skip
    assert (result.run["objective"], result.run["masked"]) == ("masked", {"rate": 0.3})
    assert result.run["data"]["validation"] == HUB.format("Salesforce/wikitext", "wikitext-103-raw-v1/validation")
    assert (result.run["data"]["packing"], result.run["data"]["block"]) == ("best_fit", 128)
    assert (result.run["train"]["steps"], result.run["train"]["warmup"]) == (5000, 100)
    assert (result.run["train"]["batch"], result.run["checkpoint"]) == (16, {"every": "1 epoch"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("base_model: m\nrl: gdpo\ndatasets: [{path: a, type: b}]\n", r"old:2: rl: 'gdpo' is not supported"),
        ("model_name_or_path: m\nreward_funcs: [a.b]\ndataset_name: a.jsonl\nloss_type: vespo\n", "old:4: loss_type"),
        ("model_name_or_path: m\nreward_funcs: [a.b]\ndataset_name: a.jsonl\nloss_type: cispo\n", "epsilon_high: 5.0"),
        ("model_name_or_path: m\nreward_funcs: [a.b]\nreward_weights: [1, 2]\nscale_rewards: batch\n",
         r"(?s)old:4: scale_rewards.*has no data set.*old:3: reward_weights"),
        (f"{PROMPTS_OF_TRL}normalize_advantages: true\n", "old:4: normalize_advantages: belongs to trl rloo"),
        (f"{PROMPTS_OF_TRL}num_generations: 1\n", "write at least 2"),
        (f"{PROMPTS_OF_TRL}reward_weights: [1, 2]\n", "has 2 weights for 1 reward"),
        ("model_name_or_path: m\nreward_funcs: get_soft_overlong_punishment\ndataset_name: a.jsonl\n"
         "max_completion_length: 0\n", "old:4: max_completion_length"),
        ("base_model: m\nreward_model: true\ndatasets: [{path: a, type: b}]\n", "trains a reward model"),
        ("base_model: m\nsequence_len: 8\n", "no data set is configured"),
        ("model_name_or_path: m\nstage: rm\ndo_train: true\ndataset: a\n", "which is not converted: write"),
        ("model_name_or_path: m\ntemplate: qwen\nexport_dir: out\n", "merges an adapter, but nothing is trained"),
        ("model_name_or_path: m\ntemplate: qwen\ninfer_backend: vllm\n", "nothing is trained"),
        ("model: m\nmodel_class: llm\ntrain_dataset: a.yaml\n", "version 1, which is not supported"),
        ("model:\n  _component_: torchtune.models.llama3.llama3_8b\n", "is a configuration of torchtune"),
        ("base_model: m\ndatasets: [\n", r"old:3: is not valid YAML"),
        ("base_model: m\nlearning_rate: fast\nnum_epochs: 0\ndatasets: [{path: a, type: b}]\n",
         r"(?s)old:2: learning_rate: 'fast'.*old:3: num_epochs: 0 is not above zero"),
        ("python run_plm.py --model_name_or_path m --train_file a\n", r"run_plm\.py is not supported"),
        ("python run_clm.py --train_file 'a\n", r"old:1: is not a valid command: No closing quotation"),
        ("python run_clm.py --train_file a\n", "has no model"),
    ],
)  # fmt: skip
def test_what_is_refused(text, message):
    with pytest.raises(InputError, match=message):
        convert(text, "old")


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("# a comment\nA=1 llamafactory-cli train \\\n  x.yaml --lora_rank 8\n",
         r"old:2: runs LLaMA-Factory \(llamafactory-cli train\)\n.*--lora_rank to it.*artel config convert x\.yaml"),
        ("llamafactory-cli train \\\n  --stage sft\n", r"old:1: runs LLaMA-Factory .*\n.*to a YAML file"),
        ("torchrun --nproc_per_node 2 src/train.py x.yaml\n", r"LLaMA-Factory \(src/train\.py\)\n.*convert x\.yaml"),
        ("axolotl train x.yml\n", r"runs axolotl \(axolotl train\)\n.*artel config convert x\.yml"),
        ("accelerate launch -m axolotl.cli.train x.yml\n", r"runs axolotl \(axolotl\.cli\.train\)\n.*convert x\.yml"),
        ("NPROC_PER_NODE=2 swift sft --model m\n", "runs ms-swift .swift sft., whose configurations artel does not"),
        ("tune run full_finetune_single_device --config x.yaml\n", "runs torchtune .tune run., whose"),
        ("echo 1\nllamafactory-cli export x.yaml\n# axolotl train y.yml\n", "is not a known configuration"),
    ],
)  # fmt: skip
def test_a_script_with_another_tools_command_names_the_tool_and_the_file_to_give(script, told):
    with pytest.raises(InputError, match=told):
        convert(script, "old")


def test_what_does_not_go_together_here_is_changed_and_told():
    """DeepSpeed and shards do not take AdamW of 8 bits, int8 no DoRA; bf16 weights take AdamW alone."""
    result = convert(configs.AXOLOTL_QLORA, "old")
    assert "does not work with DeepSpeed: artel uses adamw" in reported(result)["optimizer"]
    result = convert(configs.AXOLOTL_MORE, "old")
    assert (result.run["train"]["optimizer"], result.run["model"]["quantize"]) == ("adamw", "nf4")
    assert "DoRA cannot use sharded int8 weights: artel uses nf4" in reported(result)["load_in_8bit"]
    assert "adafactor cannot update sharded matrices" in reported(result)["optimizer"]
    assert "quantized matrices cannot be split: parallel.tensor is 1" in reported(result)["tensor_parallel_size"]
    assert (result.run["parallel"]["tensor"], result.run["parallel"]["context"]) == (1, 2)
    data_alone = re.sub(r"(tensor|context|expert)_parallel_size: 2\n|dp_replicate_size: 2\n", "", configs.AXOLOTL_MORE)
    result = convert(data_alone, "old")
    assert (result.run["parallel"]["data"], result.run["model"]["quantize"]) == ("auto", "int8")
    assert "write model.quantize: nf4 to shard them" in reported(result)["dp_shard_size"]
    result = convert(data_alone.replace("peft_use_dora: true\n", ""), "old")
    assert (result.run["parallel"]["data"], result.run["model"]["quantize"]) == ("fsdp", "int8")
    result = convert(configs.LLAMA_FACTORY_MORE.replace("use_muon: true", "optim: sgd"), "old")
    assert result.run["train"]["weights"] == "fp32"
    assert "only adamw supports bf16" in reported(result)["pure_bf16"]


@pytest.mark.parametrize("text", [configs.AXOLOTL_DPO, configs.LLAMA_FACTORY_MORE])
def test_an_odd_value_of_any_key_is_one_clear_message_at_most(text):
    tree = yaml.safe_load(text)
    for key, _ in flatten(tree):
        for odd in ([], {"a": 1}, 3, "9" * 400):
            try:
                result = convert(yaml.safe_dump(changed(tree, key, odd)), "old")
                parse_run(copy.deepcopy(result.run), {}, {(): "old"})
            except InputError as error:
                assert error.problems  # noqa: PT017


def test_other_verbs_say_to_convert_it():
    Path("tune.yaml").write_text("model: {_component_: torchtune.models.llama3.llama3_8b}\n")
    with pytest.raises(InputError, match="is a configuration of torchtune, which is no longer developed"):
        load_run("tune.yaml")
    for name, text in {**YAMLS, "run.sh": configs.RUN_CLM}.items():
        Path(name).write_text(text)
        with pytest.raises(InputError, match=rf"is a configuration of .*not a run file\n.*artel config convert {name}"):
            load_run(name)


def test_the_tables_of_the_page_are_up_to_date():
    root = Path(artel_package.__file__).parents[2]
    sys.path.insert(0, str(root / "scripts"))
    from converted_keys import with_tables

    for name in ("docs/convert.md", "docs/ru/convert.md"):
        page = (root / name).read_text(encoding="utf-8")
        assert page == with_tables(page), "run: python scripts/make_docs.py --run-file"


def test_a_run_file_is_none_of_these():
    assert detect_tool("data: {sources: [{path: a.txt}]}\nmodel: {from: m}\ntrain: {epochs: 1}\n") == ""
    assert detect_tool("# axolotl's base_model: m\nobjective: chat\nmodel: {from: m}\n") == ""


def _data_sets(count):
    fields = "type: chat_template, roles: {user: [a]}, message_property_mappings: {role: r, content: c}"
    return "".join(f"  - {{path: d{number}.jsonl, {fields}}}\n" for number in range(count))


@pytest.mark.parametrize("text", [
    lambda count: f"base_model: m\ndatasets:\n{_data_sets(count)}",
    lambda count: "base_model: m\ndatasets:\n" + "  - {path: 3}\n" * count,
    lambda count: "base_model: m\ndatasets: [{path: a}]\n" + "".join(f"a_{number}: 1\n" for number in range(count)),
    lambda count: f"model_name_or_path: m\ndo_train: true\ndataset: {','.join(map(str, range(count)))}\n",
    lambda count: f"{configs.RUN_CLM_MORE} " + " \\\n".join(f"--a_{number} $A" for number in range(count)),
    lambda count: "lr = 3\n" + "".join(f"a_{number} = 1\n" for number in range(count)),
    lambda count: "llamafactory-cli train x.yaml\n" * count,
], ids=["data sets", "wrong data sets", "unknown keys", "names", "arguments", "cfg", "commands"])  # fmt: skip
def test_twice_as_much_takes_twice_the_work(text):
    few, many = (operations(lambda count=count: convert(text(count), "old")) for count in (80, 160))
    assert 0 < many < 2.1 * few


@pytest.mark.parametrize("line", ["a_{}: 1\n", "run_{}: 1\n", "seed_{}: [1]\n"])
def test_many_unknown_keys_of_a_run_file_are_not_all_guessed(line):
    def read(count):
        tree = yaml.safe_load("".join(line.format(number) for number in range(count)))
        return lambda: parse_run(tree, {}, {(): "old"})

    few, many = operations(read(200)), operations(read(400))
    assert 0 < many < 2 * few


@pytest.mark.slow
def test_the_command_reads_files_and_standard_input():
    Path("old.yml").write_text(configs.AXOLOTL_QLORA)
    done = succeed("config", "convert", "old.yml")
    Path("run.yaml").write_text(done.stdout)
    run = load_run("run.yaml")
    assert (run.train.batch, run.model.quantize, run.data.block) == (8, "nf4", 4096)
    lines = configs.AXOLOTL_QLORA.splitlines()
    at = lines.index("loss_watchdog_threshold: 5.0") + 1
    assert f"not carried over: old.yml:{at}: loss_watchdog_threshold = 5.0: " in done.stderr
    at = lines.index("micro_batch_size: 2") + 1
    assert f"differs: old.yml:{at}: micro_batch_size = 2: " in done.stderr
    done = succeed(
        "config", "convert", "-", "--json", input="python run_clm.py --model_name_or_path gpt2 --train_file a"
    )
    printed = json.loads(done.stdout)
    assert printed["run"]["data"]["sources"] == [{"path": "a"}]
    assert printed["carried"]["model_name_or_path"] == ["model.from"]


def test_a_converter_may_write_any_section():
    conversion = Conversion.from_yaml("kind: number\n", "old.yaml", KeyTable())
    conversion.put("classification.kind", conversion.raw_value("kind"), "kind")
    assert conversion.finish().run == {"classification": {"kind": "number"}}
