"""A run of every objective with a tiny model, on records made for it."""

import json
import random
from functools import partial
from pathlib import Path

import torch
import yaml
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

from artel.config import TokenizerTraining, load_run
from artel.objectives import build_objective
from artel.parallel import World
from artel.preparing import prepare
from artel.tokens import train_tokenizer
from artel.tokens.tokenizer.chat_template import CHATML_TOKENS
from artel.training.teacher import set_teacher
from support.runs import merged, write_run

ENCODER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
OBJECTIVES = {
    "masked": {"objective": "masked", "masked": {"whole_words": True}, "model": "modernbert", "data": {"block": 48}},
    "restoring": {"objective": "masked", "model": "roberta",
                  "data": {"block": 200, "sources": [{"format": "dummy", "documents": 300, "pairs": "commas"}]}},
    "span_qa": {"objective": "span_qa", "model": "bert", "tokenizer": {"train": {"vocab": 380}},
                "span_qa": {"question": 16, "stride": 8, "heads": "five", "class_weights": "balanced",
                            "class_loss": "smooth", "balanced_sampling": True},
                "data": {"block": 64, "sources": [{"format": "dummy", "kind": "questions", "documents": 200}]}},
    "tokens": {"objective": "tokens", "model": "bert", "tokenizer": {"train": {"vocab": 380}},
               "data": {"block": 48, "sources": [{"format": "dummy", "kind": "entities", "documents": 200}]}},
    "chat": {"objective": "chat", "model": "llama", "data": {"block": 96}},
    "dpo": {"objective": "preference", "model": "llama", "data": {"block": 96}, "tokenizer": {"train": {"vocab": 300}}},
    "kto": {"objective": "preference", "model": "llama", "data": {"block": 96}, "tokenizer": {"train": {"vocab": 300}},
            "preference": {"loss": "kto"}},
    "labels_of_pairs": {"objective": "classification", "model": "bert", "tokenizer": {"train": {"vocab": 300}},
                        "classification": {"class_weights": "balanced", "balanced_sampling": True, "smoothing": 0.1},
                        "data": {"block": 300}},
    "several_labels": {"objective": "classification", "model": "roberta", "tokenizer": {"train": {"vocab": 300}},
                       "classification": {"kind": "multi", "loss": "focal"}, "data": {"block": 300}},
    "reward": {"objective": "reward", "model": "llama", "data": {"block": 96}, "tokenizer": {"train": {"vocab": 300}},
               "reward": {"center": 0.01}},
    "rerank": {"objective": "rerank", "model": "bert", "data": {"block": 48}, "tokenizer": {"train": {"vocab": 300}},
               "rerank": {"negatives": 3}},
    "embedding": {"objective": "embedding", "model": "bert", "tokenizer": {"train": {"vocab": 300}},
                  "embedding": {"matryoshka": [32, 16], "negatives": 2}, "data": {"block": 24}},
    "triplet": {"objective": "embedding", "model": "llama", "tokenizer": {"train": {"vocab": 300}},
                "embedding": {"loss": "triplet", "pooling": "last", "margin": 2.5}, "data": {"block": 24}},
    "cosent": {"objective": "embedding", "model": "bert", "tokenizer": {"train": {"vocab": 300}},
               "embedding": {"loss": "cosent"}, "data": {"block": 24}},
    "seq2seq": {"objective": "seq2seq", "model": "t5", "tokenizer": {"train": {"vocab": 300}},
                "seq2seq": {"prefix": "count: ", "target": 24, "generate": 4}, "data": {"block": 200},
                "validate": {"prompts": ["one two"], "new_tokens": 4}},
    "translation": {"objective": "seq2seq", "model": "bart", "tokenizer": {"train": {"vocab": 300}},
                    "seq2seq": {"smoothing": 0.1, "beams": 2, "generate": 2}, "data": {"block": 32}},
    "distill": {"objective": "distill", "model": "llama", "tokenizer": {"train": None},
                "data": {"block": 48, "packing": "best_fit"}, "distill": {"top_k": 8, "temperature": 2.0}},
    "distill_beside": {"objective": "distill", "model": "llama", "tokenizer": {"train": None}, "data": {"block": 96},
                       "distill": {"on": "chat", "loss": "js", "beta": 0.3, "top_k": None,
                                   "hidden": {"layers": "even"}}},
}  # fmt: skip
# Other losses and samples of the same objectives.
KINDS = {
    "number": {"objective": "classification", "model": "roberta", "tokenizer": {"train": {"vocab": 300}},
               "classification": {"kind": "number"}, "data": {"block": 200}},
    "one_label": {"objective": "classification", "model": "roberta", "tokenizer": {"train": {"vocab": 300}},
                  "data": {"block": 200}},
    "bilou": {"objective": "tokens", "model": "bert", "tokenizer": {"train": {"vocab": 380}},
              "tokens": {"scheme": "bilou"},
              "data": {"block": 48, "sources": [{"format": "dummy", "kind": "entities", "documents": 200}]}},
    "words": {"objective": "tokens", "model": "bert", "tokenizer": {"train": {"vocab": 300}}, "data": {"block": 32}},
    "cosine": {"objective": "embedding", "model": "bert", "tokenizer": {"train": {"vocab": 300}},
               "embedding": {"loss": "cosine"}, "data": {"block": 24}},
    "listwise": {"objective": "rerank", "model": "bert", "data": {"block": 48}, "tokenizer": {"train": {"vocab": 300}},
                 "rerank": {"loss": "listwise", "negatives": 3},
                 "config": {"initializer_range": 0.2}},  # of scores that are nearly alike the gradient is rounding
    "scored": {"objective": "rerank", "model": "bert", "data": {"block": 48}, "tokenizer": {"train": {"vocab": 300}},
               "rerank": {"negatives": 3}},
    "distill_masked": {"objective": "distill", "model": "bert", "tokenizer": {"train": None}, "data": {"block": 48},
                       "distill": {"on": "masked", "loss": "reverse_kl", "top_k": None}},
    "distill_by_text": {"objective": "distill", "model": "llama", "tokenizer": {"train": {"vocab": 290}},
                        "data": {"block": 48, "packing": "best_fit"},
                        "distill": {"top_k": 8, "temperature": 2.0, "tokenizer": "by_text"}},
}  # fmt: skip
OFF = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
SMALL_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
SMALL_BART = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
              "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}  # fmt: skip
SIZES = {"t5": SMALL_T5, "bart": SMALL_BART}
NO_DROPOUT = {"roberta": OFF, "bert": OFF, "modernbert": {}, "llama": {}, "t5": {"dropout_rate": 0},
              "bart": {"dropout": 0}}  # fmt: skip
DROPOUT = {"modernbert": {"mlp_dropout": 0.1, "embedding_dropout": 0.1}, "llama": {"attention_dropout": 0.1}}


def conversations(folder):
    """A source of conversations of one to three exchanges."""
    chance = random.Random(0)
    words = "one two three four five six seven eight nine ten".split()
    rows = []
    for number in range(200):
        turns = []
        for word in (chance.choice(words) for _ in range(chance.randint(1, 3))):
            turns.append({"role": "user", "content": f"What is after {word} in row {number}?"})
            turns.append({"role": "assistant", "content": f"After {word} comes {chance.choice(words)}."})
        rows.append({"messages": turns})
    return written(folder / "conversations.jsonl", rows, "chat")


def preferences(folder):
    """A source of questions with two answers of unequal length."""
    chance = random.Random(0)
    answers = ["It is here.", "It may be there, or there.", "No.", "I do not know what you mean by that."]
    rows = []
    for number in range(200):
        chosen, rejected = chance.sample(answers, 2)
        rows.append({"prompt": f"Where is number {number}?", "chosen": chosen, "rejected": rejected})
    return written(folder / "preferences.jsonl", rows, "preference")


def labels(folder):
    """A source of pairs of texts of unequal length with one label of three, one of them rare."""
    chance = random.Random(0)
    words = "one two three four five six seven eight nine ten".split()
    rows = []
    for number in range(200):
        first, second = (" ".join(chance.choices(words, k=chance.randint(1, 12))) for _ in range(2))
        label = "rare" if number % 20 == 0 else "same" if "one" in first.split() else "other"
        rows.append({"text": f"{first} {number}", "other": second, "label": label})
    return {**written(folder / "labels.jsonl", rows, "labels"), "second": "other"}


def one_label(folder):
    """The same, each without its second text."""
    return {**labels(folder), "second": ""}


def numbers(folder):
    """A source of texts of unequal length with a number: how often a word stands in them."""
    rows = [json.loads(line) for line in Path(several_labels(folder)["path"]).read_text().splitlines()]
    rows = [{"text": row["text"], "label": row["text"].split().count("one") / 4} for row in rows]
    return written(folder / "numbers.jsonl", rows, "labels")


def tagged_words(folder):
    """A source of sentences of unequal length with a tag for each word, by its length."""
    chance = random.Random(0)
    words = "one two three four five six seven eight nine well-known".split()
    rows = []
    for number in range(200):
        chosen = [*chance.choices(words, k=chance.randint(1, 12)), str(number)]
        rows.append({"tokens": chosen, "upos": ["ABCDEFGHIJ"[len(word) - 1] for word in chosen]})
    return {**written(folder / "words.jsonl", rows, "entities"), "kind": "words"}


def several_labels(folder):
    """A source of texts with none to three labels: the words that stand in them."""
    chance = random.Random(0)
    words = "one two three four five six seven eight nine ten".split()
    rows = []
    for number in range(200):
        text = chance.choices(words, k=chance.randint(1, 20))
        rows.append({"text": f"{' '.join(text)} {number}", "label": sorted({"one", "two", "three"} & set(text))})
    return written(folder / "several-labels.jsonl", rows, "labels")


def judgements(folder):
    """Preferences, some with a margin, and answers with a label."""
    rows = [json.loads(line) for line in Path(preferences(folder)["path"]).read_text().splitlines()]
    for number, row in enumerate(rows):
        if number % 3 == 0:
            row["margin"] = 0.5
        elif number % 3 == 1:
            row |= {"completion": row.pop("chosen"), "label": number % 2 == 0}
            row.pop("rejected")
    return written(folder / "judgements.jsonl", rows, "preference")


def ranked(folder):
    """Queries, each with a document that matches it; some with one that does not."""
    rows = []
    for number in range(200):
        row = {"query": f"Where is number {number}?", "positive": f"The number {number} is here, " * (1 + number % 3)}
        rows.append(row | ({"negative": f"No {number} is there."} if number % 4 == 0 else {}))
    return written(folder / "matches.jsonl", rows, "matches")


def scored(folder):
    """The same; of every third its document has a score, and stands alone."""
    rows = [json.loads(line) for line in Path(ranked(folder)["path"]).read_text().splitlines()]
    for number, row in enumerate(rows):
        if number % 3 == 0:
            rows[number] = {"query": row["query"], "document": row["positive"], "score": number % 5 / 4}
    return written(folder / "scored.jsonl", rows, "matches")


def matches(folder, scored=False):
    """A source of questions with the texts that answer them: some equal, of unequal length; or pairs with a score."""
    chance = random.Random(0)
    words = "one two three four five six seven eight nine ten".split()
    rows = []
    for number in range(200):
        word, *others = chance.sample(words, 4)
        positives = [f"{word} is what it is", f"the answer to {number} is {word}"][: chance.randint(1, 2)]
        row = {"query": f"What is {word}?", "pos": positives, "neg": [f"{other} is not" for other in others]}
        pair = {"sentence1": f"{word} and {others[0]}", "sentence2": f"only {word}", "score": chance.randint(0, 4) / 4}
        rows.append(pair if scored else row)
    return written(folder / f"matches-{scored}.jsonl", rows, "matches")


def rewritten(folder):
    """Pairs of words and the same words backwards, of unequal length."""
    chance = random.Random(0)
    words = "one two three four five six seven eight nine ten".split()
    rows = []
    for _ in range(200):
        text = chance.choices(words, k=chance.randint(1, 10))
        rows.append({"input": " ".join(text), "output": " ".join(reversed(text))})
    return written(folder / "pairs.jsonl", rows, "pairs")


def teacher(folder):
    """The folder of a teacher of random weights, wider apart than a new model's, with a tokenizer of its own."""
    path = folder / "teacher"
    if not path.exists():
        texts = (f"What is after {word} in row {number}? After {word} comes {number}. system user assistant" for word
                 in ("one", "two", "three") for number in range(100))  # fmt: skip
        tokenizer = train_tokenizer(texts, TokenizerTraining(vocab=300, special=list(CHATML_TOKENS)), encoder=False)
        tokenizer.save(path)
        torch.manual_seed(0)
        config = LlamaConfig(**{**ENCODER, "num_hidden_layers": 4}, vocab_size=tokenizer.vocabulary,
                             initializer_range=0.2, tie_word_embeddings=False)  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(path)
    return str(path)


def masked_teacher(folder):
    """The same for hidden tokens."""
    path = folder / "masked-teacher"
    if not path.exists():
        tokenizer = train_tokenizer(iter(["a text of few words"] * 50), TokenizerTraining(vocab=270), encoder=True)
        tokenizer.save(path)
        torch.manual_seed(0)
        config = BertConfig(**ENCODER, vocab_size=tokenizer.vocabulary, initializer_range=0.2)
        BertForMaskedLM(config).save_pretrained(path)
    return str(path)


def written(file, rows, kind):
    if not file.exists():
        file.write_text("\n".join(map(json.dumps, rows)))
    return {"path": str(file), "format": kind}


MADE = {"seq2seq": rewritten, "translation": rewritten,
        "distill_beside": conversations,
        "chat": conversations, "dpo": preferences, "kto": preferences, "labels_of_pairs": labels,
        "several_labels": several_labels, "reward": judgements, "rerank": ranked, "embedding": matches,
        "triplet": matches, "cosent": partial(matches, scored=True), "number": numbers, "one_label": one_label,
        "words": tagged_words, "cosine": partial(matches, scored=True), "listwise": ranked,
        "scored": scored}  # fmt: skip
TEACHERS = {"distill": teacher, "distill_beside": teacher, "distill_masked": masked_teacher,
            "distill_by_text": teacher}  # fmt: skip


def objective_run(path, name, *, dropout=False, **changes):
    """A run file of an objective, or a kind of one, with a tiny model."""
    case = dict({**OBJECTIVES, **KINDS}[name])
    model_type = case.pop("model")
    more = DROPOUT.get(model_type, {}) if dropout else NO_DROPOUT[model_type]
    more = {**more, **case.pop("config", {})}
    if name in MADE:
        case["data"] = {**case["data"], "sources": [MADE[name](path.parent)]}
    if name in TEACHERS:
        case["distill"] = {**case["distill"], "teacher": TEACHERS[name](path.parent)}
    run = write_run(path, **merged(case, changes))
    tree = yaml.safe_load(run.read_text())
    sizes = SIZES.get(model_type, ENCODER)
    tree["model"] = {"config": {**sizes, "model_type": model_type, **more}}  # in place of the helpers' GPT-2
    run.write_text(yaml.safe_dump(tree, allow_unicode=True))
    return run


def taught(folder, name, **changes):
    """(run, objective, store) of a run with a teacher, which the objective has as in training."""
    run = load_run(str(objective_run(folder / f"{name}.yaml", name)), changes)
    prepared = prepare(run)
    objective, store = build_objective(prepared.config, prepared.tokenizer()), prepared.open()
    alone = World(0, 1, 0, torch.device("cpu"))
    set_teacher(objective, prepared.config, store, alone, folder / "teacher.json", False)
    return run, objective, store


def student_of(objective):
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    return LlamaForCausalLM(LlamaConfig(vocab_size=objective.tokenizer.vocabulary, **sizes))
