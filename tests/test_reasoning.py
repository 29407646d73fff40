"""Thoughts: which stay in a conversation, what of them is learned; impruver's configurations of calls and thoughts."""

import json

import pytest
import yaml

from artel.config import RunConfig, TokenizerTraining
from artel.objectives import Chat, DocumentSamples
from artel.text import Conversation, Document, Message, Record, ToolCall
from artel.tokens import train_tokenizer
from support.chat_models import learned_texts
from support.chat_templates import FAMILIES
from support.reading import rows_of
from support.runs import metrics, succeed
from support.templates import QWEN

TALK = (
    Message("user", "a"),
    Message("assistant", "One.", "first"),
    Message("user", "b"),
    Message("assistant", "", "second", None, (ToolCall("f", {}),)),
    Message("tool", "result"),
    Message("assistant", "Two.", "third"),
)
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


def thinks(thought, content):
    return f"<think>\n{thought}\n</think>\n\n{content}<|im_end|>"


@pytest.fixture(scope="module")
def tokenizer():
    texts = ["One. Two. first second third result think tool_call name arguments\n\n" * 40]
    return train_tokenizer(iter(texts), TokenizerTraining(vocab=280, special=["<|im_start|>", "<|im_end|>"]))


def made_of(tokenizer, tmp_path, messages, template="chatml", **chat):
    if "{" in template:
        (tmp_path / "template.jinja").write_text(template)
        template = str(tmp_path / "template.jinja")
    run = {"objective": "chat", "data": {"block": 10_000}, "chat": {"template": template, **chat}}
    record = Record("", "a.jsonl:1", "a", Conversation(tuple(messages)))
    (made,) = Chat(RunConfig.model_validate(run), tokenizer).samples([Document(record, "train")])
    assert isinstance(made, DocumentSamples), made
    return made


@pytest.mark.parametrize(
    ("reasoning", "turns", "left_out"),
    [
        ("keep", [thinks("first", "One."), thinks("second", CALL), thinks("third", "Two.")], 0),
        ("last", ["One.<|im_end|>", thinks("second", CALL), thinks("third", "Two.")], 1),
        ("drop", ["One.<|im_end|>", f"{CALL}<|im_end|>", "Two.<|im_end|>"], 3),
    ],
)
def test_which_thoughts_stay(tokenizer, tmp_path, reasoning, turns, left_out):
    made = made_of(tokenizer, tmp_path, TALK, reasoning=reasoning)
    assert learned_texts(made, tokenizer) == turns
    assert made.counts == ({"thoughts_left_out": left_out} if left_out else {})


@pytest.mark.parametrize("said", ["", "Let me see."])
def test_a_thought_before_a_call_is_written_as_qwen_3_does(tokenizer, tmp_path, said):
    talk = [TALK[0], Message("assistant", said, "second", None, (ToolCall("f", {}), ToolCall("f", {})))]
    template = FAMILIES["qwen3"].template
    ours, theirs = (learned_texts(made_of(tokenizer, tmp_path, talk, name), tokenizer) for name in ("chatml", template))
    assert ours == theirs


def test_thoughts_that_the_template_leaves_out_are_counted(tokenizer, tmp_path):
    talk = [TALK[0], TALK[1], TALK[2], Message("assistant", "Two.", "third")]
    made = made_of(tokenizer, tmp_path, talk, QWEN)
    assert learned_texts(made, tokenizer) == ["One.<|im_end|>", thinks("third", "Two.")]
    assert made.counts == {"thoughts_left_out": 1}


def test_tags_of_an_empty_thought_are_learned_only_with_the_whole_text(tokenizer, tmp_path):
    talk = [Message("user", "a"), Message("assistant", "One.")]
    made = made_of(tokenizer, tmp_path, talk, QWEN)
    assert learned_texts(made, tokenizer) == ["One.<|im_end|>"]
    assert "<think>\n\n</think>\n\n" in tokenizer.decode(made.samples[0].ids)  # they stay in the text
    assert learned_texts(made_of(tokenizer, tmp_path, talk, QWEN, train_on="all"), tokenizer) == [
        tokenizer.decode(made.samples[0].ids)
    ]


def test_a_store_is_of_one_choice():
    settings = [
        Chat.store_settings(RunConfig.model_validate({"objective": "chat", "chat": chat}))
        for chat in ({}, {"reasoning": "drop"})
    ]
    assert settings[0] != settings[1]


# impruver's recipes/configs/*_fc.yaml and *_cot.yaml, with a tiny model and files in place of the hub's.

FUNCTION = {"name": "calculate_square", "description": "Вычислить квадрат числа",
            "parameters": {"type": "object", "properties": {"number": {"type": "number"}}}}  # fmt: skip


def fc_row(number):
    """korotkov/glaive-function-calling-v2-ru-parsed: both fields are JSON in a text."""
    system = "Ты полезный помощник с доступом к следующим функциям. Используй их при необходимости:\n"
    call = {"name": "calculate_square", "arguments": {"number": number}}
    turns = [
        ("system", system + json.dumps(FUNCTION, ensure_ascii=False, indent=4)),
        ("user", f"Каков квадрат числа {number}?"),
        ("function_call", json.dumps(call)),
        ("function_response", json.dumps({"square": number**2})),
        ("assistant", f"Квадрат числа {number} равен {number**2}."),
    ]
    messages = [{"role": role, "content": content} for role, content in turns]
    return {"messages": json.dumps(messages, ensure_ascii=False), "functions": json.dumps([FUNCTION])}


def cot_row(number):
    """evilfreelancer/ru-chain-of-thought-sharegpt."""
    said = [("human", f"Сколько будет {number} + 1?"), ("gpt", f"<think>{number} и 1</think>{number + 1}")]
    return {"conversations": [{"from": role, "value": value} for role, value in said]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "data_set"),
    [(fc_row, {"split": "train"}), (cot_row, {"converter": "impruver.conversations_to_messages"})],
    ids=["fc", "cot"],
)
def test_impruvers_configurations_of_calls_and_of_thoughts_train(tmp_path, shared_data, row, data_set):
    rows_of(tmp_path, [row(number) for number in range(40)], "rows.jsonl")
    old = {
        "output_dir": "./models/small", "train_path": "./train.jsonl", "val_path": "./val.jsonl",
        "datasets": [{"name": "rows.jsonl", **data_set}],
        "model": {"class": "transformers.AutoModelForCausalLM", "dtype": "fp32",
                  "config_class": "transformers.GPT2Config",
                  "config": {"n_layer": 1, "n_head": 2, "n_embd": 32, "n_positions": 1024}},
        "tokenizer": {"class": "transformers.AutoTokenizer", "name": str(shared_data / "tokenizers" / "gpt2"),
                      "max_tokens_count": 1000},
        "trainer": {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 100, "save_steps": 100,
                    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "logging_steps": 1,
                    "learning_rate": 6e-3, "max_steps": 4, "lr_scheduler_type": "cosine", "warmup_steps": 1,
                    "optim": "adamw_torch", "seed": 42, "max_grad_norm": 1.0, "weight_decay": 0.1},
    }  # fmt: skip
    (tmp_path / "old.yaml").write_text(yaml.safe_dump(old))
    converted = succeed("config", "convert", "old.yaml")
    (tmp_path / "run.yaml").write_text(converted.stdout)
    succeed("train", "run.yaml", "data.store=stores", "chat.template=plain", "train.threads=1")
    losses = [line["loss"] for line in metrics(tmp_path / "models" / "small") if "loss" in line]
    assert len(losses) >= 4
    assert losses[-1] < losses[0]
    shown = succeed("data", "show", "run.yaml", "data.store=stores", "chat.template=plain", "--json")
    text = "".join(piece["text"] for piece in json.loads(shown.stdout)["samples"][0]["pieces"] if piece["learned"])
    if row is fc_row:
        assert '<tool_call>\n{"name": "calculate_square", "arguments": {"number": ' in text
        assert "Квадрат числа" in text
        assert '"square"' not in text  # what the tool returned
    else:
        assert "<think>" in text
