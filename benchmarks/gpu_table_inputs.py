"""What the contestants of a case of gpu_table.py read: a model with random weights, and random tokens or texts.

    python gpu_table_inputs.py CASE.json FOLDER

FOLDER gets work.json, about.json, model/ (a link, since cases share models) and what the objective learns from: store/,
inputs.npy and targets.npy (train_speed.py), or chat.jsonl, preferences.jsonl, prompts.jsonl and rewards.py.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from train_speed import SPECIAL, WARM_UP, write_rows
from transformers import AutoConfig, PreTrainedConfig, PreTrainedTokenizerFast

from artel.models.flops import estimate_flops_per_token
from artel.registry import OBJECTIVES
from artel.tokens import Tokenizer, load_tokenizer

sys.path.append(str(Path(__file__).parent / "peers"))

from contestant import Work
from measured import PROFILED

TEMPLATE = """{% for message in messages %}{{ '<s> ' + message['role'] + ' ' }}\
{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + ' </s> ' }}{% endgeneration %}\
{% else %}{{ message['content'] + ' </s> ' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<s> assistant ' }}{% endif %}"""
REWARDS = '''
def score(completions, **_):
    """Rewards that differ within a group: no model can learn them, and none needs to."""
    texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
    return [sum(map(ord, text)) % 97 / 97 for text in texts]
'''


def main() -> None:
    case, folder = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2])
    folder.mkdir(parents=True)
    work = Work(
        folder=str(folder),
        device="cuda" if torch.cuda.is_available() else "cpu",
        precision="bf16",
        optimizer="adamw",
        threads=torch.get_num_threads(),
        **case["work"],
    )
    tokenizer = make_tokenizer(case["model"]["vocab_size"], folder / "store" / "tokenizer")
    auto_class = OBJECTIVES[work.objective].auto_class
    config = make_model(work, case["model"], case["weights"], auto_class, tokenizer)
    steps = 1 + WARM_UP + case["steps"] + 1 + PROFILED
    per_sample: int | None = work.length
    if work.objective in ("causal", "masked"):
        write_rows(work, tokenizer, case["model"]["vocab_size"], steps)
    else:
        per_sample = write_texts(work, case["model"]["vocab_size"], steps * work.batch, tokenizer)
    flops = None if work.objective == "policy" else estimate_flops_per_token(config, auto_class, work.length)
    about = {"flops_per_token": flops, "tokens_per_sample": per_sample, "vocabulary": config.vocab_size}
    (folder / "about.json").write_text(json.dumps(about), encoding="utf-8")
    (folder / "work.json").write_text(json.dumps(asdict(work)), encoding="utf-8")  # last: its presence says whole


def make_tokenizer(vocabulary: int, folder: Path) -> Tokenizer:
    """Return a tokenizer of words: SPECIAL, the two roles, then t7, t8 and so on."""
    known = [*SPECIAL.values(), "user", "assistant"]
    words = [*known, *(f"t{at}" for at in range(len(known), vocabulary))]
    backend = Backend(WordLevel({word: at for at, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = WhitespaceSplit()
    backend.post_processor = TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=TEMPLATE, **SPECIAL)
    fast.save_pretrained(folder)
    return load_tokenizer(str(folder))


def make_model(
    work: Work, model: dict[str, Any], weights: str, auto_class: str, tokenizer: Tokenizer
) -> PreTrainedConfig:
    """Write a model with random weights beside the folders of cases, once, and link to it. Made on the device."""
    key = hashlib.sha256(json.dumps([model, weights, auto_class], sort_keys=True).encode()).hexdigest()[:12]
    path, partial = Path(work.folder).parent / f"model-{key}", Path(work.folder) / "partial"
    ids = {
        name: list(SPECIAL).index(name.replace("_id", "")) for name in ("bos_token_id", "pad_token_id", "eos_token_id")
    }
    config = AutoConfig.for_model(**(model | ids))
    if not path.exists():
        torch.manual_seed(0)
        with torch.device(work.device):
            built = getattr(transformers, auto_class).from_config(config, dtype=getattr(torch, weights))
        built.save_pretrained(partial)
        tokenizer.save(partial)
        partial.rename(path)
    Path(work.model).symlink_to(path, target_is_directory=True)
    return config


def write_texts(work: Work, vocabulary: int, samples: int, tokenizer: Tokenizer) -> int | None:
    """Write the texts of an objective. Return the tokens of a sample if all have as many."""
    folder, draw = Path(work.folder), random.Random(0)

    def message(role: str, words: int) -> dict[str, str]:
        return {"role": role, "content": " ".join(f"t{draw.randrange(7, vocabulary)}" for _ in range(words))}

    def write(name: str, rows: list[dict[str, Any]]) -> None:
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    frame = 3  # <s>, the role and </s> of a message
    if work.objective == "chat":  # a fifth of a block on average
        least, most = work.length // 50, work.length // 6
        rows = [
            {"messages": [message(role, draw.randint(least, most)) for role in ("user", "assistant")]}
            for _ in range(5 * samples)
        ]
        write("chat.jsonl", rows)
        return None
    if work.objective == "preference":
        prompt, answer = work.length * 2 // 5, work.length // 2
        rows = [
            {
                "prompt": [message("user", prompt)],
                "chosen": [message("assistant", answer)],
                "rejected": [message("assistant", answer)],
            }
            for _ in range(samples)
        ]
        write("preferences.jsonl", rows)
        return prompt + 2 * answer + 3 * frame  # the prompt once
    prompt = work.length - work.new_tokens - 2 * frame
    write("prompts.jsonl", [{"prompt": [message("user", prompt)]} for _ in range(samples)])
    (folder / "rewards.py").write_text(REWARDS, encoding="utf-8")
    return prompt + frame + work.new_tokens


if __name__ == "__main__":
    main()
