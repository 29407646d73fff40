"""What printed commands read, made under the names that are printed: small, made up, and of the right kind.

A hub's models lie where the hub's client keeps what it has downloaded, so that a command that names one runs without a
network: `with_hub` makes tiny ones of the right architecture.
"""

from __future__ import annotations

import gzip
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from printed.commands import ROOT

Make = Callable[[Path], None]

_SUBJECTS = "Старый князь|Наташа|Левин|Анна|Пьер|Доктор|Кучер|Хозяйка|Её брат|Молодой офицер".split("|")
_VERBS = "увидел письмо|вошёл в комнату|молчал у окна|вспомнил лето|ждал гостей|читал вслух|смотрел на снег".split("|")
_TAILS = "когда стемнело|потому что было холодно|хотя никто не звал|чтобы все слышали|как всегда".split("|")


def _sentences(seed: int, count: int) -> list[str]:
    """Different ones, each with a comma."""
    draw = random.Random(seed)
    made = [
        f"{draw.choice(_SUBJECTS)} {draw.choice(_VERBS)} {number} раз, {draw.choice(_TAILS)}."
        for number in range(count)
    ]
    return made


def story(seed: int) -> list[str]:
    """Paragraphs of three sentences."""
    sentences = _sentences(seed, 150)
    return [" ".join(sentences[at : at + 3]) for at in range(0, 150, 3)]


def novel(name: str = "novel.txt") -> Make:
    """A paragraph a line."""

    def make(folder: Path) -> None:
        lines = ["Все счастливые семьи похожи друг на друга.", *story(1), *story(2), *story(3)]
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("\n".join(lines) + "\n", "utf-8")

    return make


def texts(folder: Path) -> None:
    """texts/*.txt, one of them in windows-1251."""
    (folder / "texts").mkdir()
    for number, encoding in enumerate(("utf-8", "windows-1251", "utf-8")):
        (folder / f"texts/{number}.txt").write_text("\n\n".join(story(10 + number)), encoding)


def sentences(folder: Path) -> None:
    (folder / "sentences.txt").write_text("\n".join(_sentences(2, 300)), "utf-8")


def good_and_bad(folder: Path) -> None:
    """good.txt and bad.txt: sentences in order, and their words in none."""
    good = _sentences(11, 300)
    generator = random.Random(3)
    bad = [" ".join(generator.sample(words, len(words))) for words in map(str.split, _sentences(12, 300))]
    (folder / "good.txt").write_text("\n".join(good))
    (folder / "bad.txt").write_text("\n".join(bad))


def labeled(name: str) -> Make:
    """A csv of pairs: a sentence without its commas, and the sentence."""

    def make(folder: Path) -> None:
        rows = [f'"{line.replace(",", "")}","{line}"' for line in _sentences(3, 200)]
        (folder / name).write_text("input,output\n" + "\n".join(rows) + "\n", "utf-8")

    return make


def masked_lm_json(folder: Path) -> None:
    """The seven keys of the CPU script, with what they name."""
    labeled("labeled_dataset.csv")(folder)
    roberta("model")(folder)
    keys = {"inputs_path": "labeled_dataset.csv", "outputs_path": "labeled_dataset.csv", "model_path": "model",
            "epochs": 1, "batch_size": 16, "learning_rate": 5e-5, "world_size": 2}  # fmt: skip
    (folder / "masked_lm_cpu.json").write_text(json.dumps(keys))


def squad(*names: str) -> Make:
    """Questions about made-up sentences in SQuAD's json."""

    def make(folder: Path) -> None:
        for seed, name in enumerate(names):
            paragraphs = []
            for number, sentence in enumerate(_sentences(20 + seed, 60)):
                answer = sentence.split(",")[0]
                question = {"id": f"{name}-{number}", "question": f"Что было {number} раз?",
                            "answers": [{"text": answer, "answer_start": 0}]}  # fmt: skip
                paragraphs.append({"context": sentence, "qas": [question]})
            data = {"version": "1.1", "data": [{"title": "made up", "paragraphs": paragraphs}]}
            (folder / name).write_text(json.dumps(data, ensure_ascii=False), "utf-8")

    return make


def natural_questions(name: str) -> Make:
    """Natural Questions in the simplified form: a row has a document, a question and one annotation."""

    def make(folder: Path) -> None:
        rows = []
        for number, sentence in enumerate(_sentences(5, 120)):
            words = ["<P>", *sentence.split(), "</P>"]
            answer = {"start_token": 1, "end_token": 3} if number % 3 else None
            rows.append(
                {
                    "example_id": number,
                    "question_text": f"who did it {number} times",
                    "document_text": " ".join(words),
                    "document_url": "http://example.org",
                    "long_answer_candidates": [{"start_token": 0, "end_token": len(words), "top_level": True}],
                    "annotations": [
                        {
                            "annotation_id": number,
                            "yes_no_answer": "NONE",
                            "long_answer": {"start_token": 0, "end_token": len(words), "candidate_index": 0},
                            "short_answers": [answer] if answer else [],
                        }
                    ],
                }
            )
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / name).write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())

    return make


def neuro_cfg(folder: Path) -> None:
    """A config of the distributed Natural Questions recipe."""
    lines = """model=bert-base-uncased
        vocab_file=./data/bert-base-uncased-vocab.txt
        lowercase=True
        dump_dir=./results
        experiment_name=test
        gpu=True
        n_epochs=2
        train_batch_size=256
        batch_split=128
        loss = smooth
        smooth_alpha = 0.01
        warmup_coef=0.6
        lr=1e-5
        weight_decay=1e-4
        data_path=./data/simplified-nq-train.jsonl
        best_metric=map
        max_seq_len=512
        max_question_len=64
        doc_stride=15"""
    (folder / "neuro_test_bert.cfg").write_text("# model\n" + "\n".join(line.strip() for line in lines.splitlines()))


def conversations(folder: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": f"Who are you, {number}?"},
                          {"role": "assistant", "content": f"I am the model of number {number}."}]}
            for number in range(90)]  # fmt: skip
    (folder / "conversations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "questions.txt").write_text("Who are you?\n/set new_tokens 5\nWhat is your number?\n")


def instructions(name: str) -> Make:
    """Rows of instruction, input and output."""

    def make(folder: Path) -> None:
        rows = [{"instruction": f"Сосчитай до {number}.", "input": "", "output": sentence}
                for number, sentence in enumerate(_sentences(6, 120))]  # fmt: skip
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / name).write_text(text, "utf-8")

    return make


def impruver(folder: Path) -> None:
    """A config as impruver ships them."""
    config = {
        "output_dir": "./models/scratch",
        "train_path": "./train.jsonl",
        "val_path": "./val.jsonl",
        "datasets": [{"name": "./conversations.jsonl", "converter": "impruver.instruction_to_messages"}],
        "model": {"class": "transformers.AutoModelForCausalLM", "name": "./FOLDER", "load_in_4bit": False},
        "lora": {"r": 16, "lora_alpha": 16, "task_type": "CAUSAL_LM"},
        "tokenizer": {"class": "transformers.AutoTokenizer", "name": "./FOLDER", "max_tokens_count": 1024},
        "trainer": {"eval_strategy": "steps", "eval_steps": 100, "learning_rate": 2e-4, "num_train_epochs": 2,
                    "per_device_train_batch_size": 1, "gradient_accumulation_steps": 128, "optim": "adamw_8bit"},
    }  # fmt: skip
    (folder / "impruver.yaml").write_text(yaml.safe_dump(config, sort_keys=False))


def axolotl(folder: Path) -> None:
    """A configuration of axolotl, for the conversations and the model that lie here."""
    config = {
        "base_model": "./FOLDER",
        "datasets": [{"path": "./conversations.jsonl", "type": "chat_template"}],
        "val_set_size": 0.1,
        "output_dir": "./outputs/lora",
        "sequence_len": 128,
        "adapter": "lora", "lora_r": 8, "lora_alpha": 16, "lora_target_linear": True,
        "micro_batch_size": 2, "gradient_accumulation_steps": 4, "num_epochs": 1,
        "optimizer": "adamw_torch_fused", "lr_scheduler": "cosine", "learning_rate": 2e-4, "warmup_ratio": 0.1,
        "bf16": "auto", "flash_attention": True, "sample_packing": True,
    }  # fmt: skip
    (folder / "axolotl.yml").write_text(yaml.safe_dump(config, sort_keys=False))


def run_clm(folder: Path) -> None:
    """A shell script that runs transformers' run_clm.py."""
    (folder / "train.sh").write_text(
        "MODEL=./FOLDER\n"
        "torchrun --nproc_per_node=2 run_clm.py \\\n"
        "    --model_name_or_path $MODEL --train_file novel.txt --do_train \\\n"
        "    --per_device_train_batch_size 4 --num_train_epochs 3 --output_dir $OUTPUT\n"
    )


def preferences(folder: Path) -> None:
    rows = [{"prompt": f"What is {number} and 1?", "chosen": f"It is {number + 1}.", "rejected": "I will not say."}
            for number in range(120)]  # fmt: skip
    (folder / "preferences.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rated = [{"prompt": row["prompt"], "completion": row["chosen" if at % 2 else "rejected"], "label": bool(at % 2)}
             for at, row in enumerate(rows)]  # fmt: skip
    (folder / "rated.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rated))


def sums(folder: Path) -> None:
    """prompts.jsonl: questions with an answer. Some of its letters occur in what an untrained model writes."""
    rows = [{"question": f"What is {number} and 1?", "answer": f"{number + 1} а е и о"} for number in range(120)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def matches(folder: Path) -> None:
    """Queries with a document that matches, and more texts beside them."""
    rows = [
        {"query": f"Where is number {number}?", "positive": f"The number {number} is here."} for number in range(120)
    ]
    (folder / "matches.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "texts.txt").write_text("".join(f"The number {number} is there.\n" for number in range(40)))


def names(folder: Path) -> None:
    """Texts with names: names.jsonl, train.conll and dev.conll; ru.conllu has parts of speech."""
    draw = random.Random(0)
    rows, sentences, parts = [], [], []
    for number in range(160):
        person, place = draw.choice(("Анна Каренина", "Пьер", "Левин")), draw.choice(("Москву", "Нижний Новгород"))
        words = [str(number), "раз", *person.split(), "едет", "в", *place.split(), "."]
        tags = ["O", "O", *_bio(person, "PER"), "O", "O", *_bio(place, "LOC"), "O"]
        rows.append({"tokens": words, "tags": tags})
        sentences.append("".join(f"{word} {tag}\n" for word, tag in zip(words, tags, strict=True)))
        upos = [
            "NUM",
            "NOUN",
            *["PROPN"] * len(person.split()),
            "VERB",
            "ADP",
            *["PROPN"] * len(place.split()),
            "PUNCT",
        ]
        lines = (f"{at}\t{word}\t_\t{tag}" for at, (word, tag) in enumerate(zip(words, upos, strict=True), 1))
        parts.append("".join(line + 6 * "\t_" + "\n" for line in lines))
    written = {
        "names.jsonl": "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows),
        "train.conll": "\n".join(sentences[:120]),
        "dev.conll": "\n".join(sentences[120:]),
        "ru.conllu": "\n".join(parts),
    }
    for name, content in written.items():
        (folder / name).write_text(content, "utf-8")


def _bio(name: str, label: str) -> list[str]:
    return [f"{'I' if at else 'B'}-{label}" for at in range(len(name.split()))]


def reviews(folder: Path) -> None:
    """reviews.csv and test.csv with a label each, topics.jsonl with several, pairs.csv of texts with a label."""
    chance = random.Random(4)
    labels = ("хорошо", "плохо", "никак")
    for name, seed in (("reviews.csv", 30), ("test.csv", 31)):
        rows = [f'"{line}",{labels[number % 3]}' for number, line in enumerate(_sentences(seed, 120))]
        (folder / name).write_text("text,label\n" + "\n".join(rows) + "\n", "utf-8")
    topics = [{"text": line, "label": chance.sample(labels, number % 3)} for number, line in enumerate(story(32))]
    lines = [json.dumps(row, ensure_ascii=False) for row in topics]
    (folder / "topics.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
    pairs = [f'"{one}","{other}",{labels[number % 2]}' for number, (one, other) in
             enumerate(zip(_sentences(33, 120), _sentences(34, 120), strict=True))]  # fmt: skip
    (folder / "pairs.csv").write_text("text,other,label\n" + "\n".join(pairs) + "\n", "utf-8")


def run_yaml(**changes: Any) -> Make:
    """A run file `run.yaml` of a user's own: a small GPT-2 on made-up documents, and nothing that is not needed."""

    def make(folder: Path) -> None:
        gpt2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2}
        run = {"data": {"sources": [{"format": "dummy", "documents": 200}], "validation": 0.1, "block": 32},
               "tokenizer": {"train": {"vocab": 400}}, "model": {"config": gpt2},
               "train": {"steps": 2, "batch": 8}}  # fmt: skip
        (folder / "run.yaml").write_text(yaml.safe_dump(run | changes))

    return make


# Models --------------------------------------------------------------------------------------------------------------

_CHATML = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' \
+ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
_ENCODER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
            "max_position_embeddings": 600}  # fmt: skip
_DECODER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
            "head_dim": 16, "intermediate_size": 64, "max_position_embeddings": 2048,
            "tie_word_embeddings": True}  # fmt: skip
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4, "decoder_start_token_id": 1}
_GPT2 = {"n_layer": 2, "n_embd": 32, "n_head": 2}


def _save_model(folder: Path, model_type: str, auto_class: str, sizes: dict[str, Any], *, template: str = "") -> None:
    """Random weights and a tokenizer trained on a few sentences, as `from_pretrained` opens them."""
    import torch
    import transformers

    from artel.config import TokenizerTraining
    from artel.tokens import train_tokenizer

    special = ["<|im_start|>", "<|im_end|>"] if template else []
    lines = iter([" ".join(_sentences(7, 400)), "user assistant system Who are you? I am the model of number."] * 3)
    training = TokenizerTraining(vocab=600, special=special)
    tokenizer = train_tokenizer(lines, training, encoder=auto_class == "AutoModelForMaskedLM")
    if template:
        tokenizer.hf.chat_template = template
    config = transformers.AutoConfig.for_model(
        model_type, vocab_size=tokenizer.vocabulary, bos_token_id=tokenizer.hf.bos_token_id,
        eos_token_id=tokenizer.end_id, pad_token_id=tokenizer.hf.pad_token_id, **sizes
    )  # fmt: skip
    torch.manual_seed(0)
    folder.mkdir(parents=True)
    getattr(transformers, auto_class).from_config(config).save_pretrained(folder)
    tokenizer.save(folder)


def roberta(name: str = "FOLDER") -> Make:
    return lambda folder: _save_model(folder / name, "roberta", "AutoModelForMaskedLM", _ENCODER)


def bert(name: str = "FOLDER") -> Make:
    return lambda folder: _save_model(folder / name, "bert", "AutoModelForMaskedLM", _ENCODER)


def chat_model(name: str = "FOLDER", *, tools: bool = False) -> Make:
    """With `tools` its chat template writes functions and calls."""
    from artel.tokens.tokenizer.chat_template import CHATML

    template = CHATML if tools else _CHATML
    return lambda folder: _save_model(folder / name, "qwen3", "AutoModelForCausalLM", _DECODER, template=template)


def image_model(name: str = "FOLDER") -> Make:
    """A model that takes images, with a chat template."""
    vision = {"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
              "num_attention_heads": 2, "head_dim": 8, "image_size": 16, "patch_size": 8}  # fmt: skip
    sizes = {"text_config": {"model_type": "mistral", "vocab_size": 600, **_DECODER}, "vision_config": vision}
    return lambda folder: _save_model(folder / name, "mistral3", "AutoModelForImageTextToText", sizes, template=_CHATML)


def t5(name: str = "FOLDER") -> Make:
    return lambda folder: _save_model(folder / name, "t5", "AutoModelForSeq2SeqLM", _T5)


def inputs_alone(name: str) -> Make:
    """A text with an input a line."""

    def make(folder: Path) -> None:
        (folder / name).write_text("\n".join(_sentences(5, 6)), "utf-8")

    return make


def gpt2(name: str = "FOLDER") -> Make:
    return lambda folder: _save_model(folder / name, "gpt2", "AutoModelForCausalLM", _GPT2)


_HUB: dict[str, Callable[[str], Make]] = {
    "Qwen/Qwen3-0.6B": chat_model,
    "Qwen/Qwen3-8B": chat_model,
    "Qwen/Qwen3-235B-A22B": chat_model,
    "ai-forever/ruRoberta-large": roberta,
    "openai-community/gpt2": gpt2,
    "ai-forever/rugpt3small_based_on_gpt2": gpt2,
    "ai-forever/ruGPT-3.5-13B": gpt2,
    "ai-forever/rugpt3large_based_on_gpt2": gpt2,
    "google-bert/bert-base-uncased": bert,
    "DeepPavlov/rubert-base-cased": bert,
}


def with_hub(home: Path, name: str) -> None:
    """A tiny model under the name of a hub's, in `home`, as HF_HOME holds one that was downloaded."""
    folder = home / "hub" / f"models--{name.replace('/', '--')}"
    if folder.exists():
        return
    revision = "0" * 40
    (folder / "refs").mkdir(parents=True)
    (folder / "refs/main").write_text(revision)
    (folder / "snapshots").mkdir()
    _HUB[name](revision)(folder / "snapshots")


def task(folder: Path) -> None:
    """The harness's task lambada_openai on a file of one's own."""
    (folder / "tasks").mkdir()
    rows = [{"text": line} for line in _sentences(8, 6)]
    (folder / "tasks/passages.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {"task": "lambada_openai", "dataset_path": "json", "output_type": "loglikelihood", "test_split": "test",
            "dataset_kwargs": {"data_files": {"test": str(folder / "tasks/passages.jsonl")}},
            "doc_to_text": "{{text.split(' ')[:-1]|join(' ')}}", "doc_to_target": "{{' '+text.split(' ')[-1]}}",
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}]}  # fmt: skip
    (folder / "tasks/lambada_openai.yaml").write_text(yaml.safe_dump(task))


def token_file(folder: Path) -> None:
    """corpus.bin as nanoGPT writes it: tokens of 16 bits, the end token behind each document."""
    import numpy as np

    from artel.tokens import load_tokenizer

    tokenizer = load_tokenizer(str(folder / "FOLDER"))
    documents = [np.append(ids, tokenizer.end_id) for ids in tokenizer.encode(_sentences(9, 60))]
    np.concatenate(documents).astype("<u2").tofile(folder / "corpus.bin")


def ds_config(folder: Path) -> None:
    config = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
              "gradient_accumulation_steps": "auto", "zero_optimization": {"stage": 1}}  # fmt: skip
    (folder / "ds_config.json").write_text(json.dumps(config))


def written(page: str, name: str) -> Make:
    """A file that a page has its readers write: the block that begins with its name."""

    def make(folder: Path) -> None:
        text = (ROOT / page).read_text(encoding="utf-8")
        block = re.search(rf"^```\w+\n(# {re.escape(name)}\n.*?)^```", text, re.MULTILINE | re.DOTALL)
        assert block is not None, f"{page} has no {name}"
        (folder / name).write_text(block[1], "utf-8")

    return make


def answers(folder: Path) -> None:
    """answers.jsonl, conversations; and questions.txt, a question a line."""
    conversations(folder)
    (folder / "conversations.jsonl").rename(folder / "answers.jsonl")


def pile(folder: Path) -> None:
    """pile/*.jsonl.zst in the form of The Pile."""
    import zstandard

    (folder / "pile").mkdir()
    for number in range(2):
        rows = [{"text": text, "meta": {"pile_set_name": "Wikipedia (en)" if at % 2 else "Pile-CC"}}
                for at, text in enumerate(story(30 + number) * 4)]  # fmt: skip
        for at, row in enumerate(rows):
            row["text"] = f"{at}: {row['text']}"
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / f"pile/0{number}.jsonl.zst").write_bytes(zstandard.compress(text.encode()))


def own_task(folder: Path) -> None:
    """The task of lm-evaluation-harness that docs/evaluate.md prints, and its rows."""
    page = (ROOT / "docs/evaluate.md").read_text(encoding="utf-8")
    for block, name in (("yml", "counting.yaml"), ("json", "counting.jsonl")):
        (printed,) = re.findall(rf"^```{block}\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
        (folder / name).write_text(printed, "utf-8")
