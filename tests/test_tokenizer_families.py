"""One way from text to ids, in training and in every command: that of transformers with the saved model."""

import json
import shutil
from contextlib import contextmanager

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import artel
from artel.generation.generate import Sampling
from artel.inference import ChatSession, ChatSettings, open_model
from artel.inference.batch.answers import generate_answers
from artel.inference.batch.files import Prompt
from artel.tokens import load_tokenizer
from support.chat_models import user
from support.messages import logged
from support.serving import client_of, served_model
from support.tokenizer_families import FAMILIES

TEXTS = ["the mill stands by the river", "two  spaces", "Ёлка — 5", "def f(n):\n    return n", "a", "on the hill"]
PROMPTS = [*TEXTS, " a space first", "the mill "]
GREEDY = Sampling(2, temperature=0.0)
CAUSAL = [name for name, family in FAMILIES.items() if family.kind == "causal"]
ENCODERS = [name for name, family in FAMILIES.items() if family.kind == "encoder"]


def trained(family, run, rows, **changes):
    """(its token store, the tokenizer of RUN/model copied elsewhere) of a run that trains a family's model further."""
    family.write(base := run.parent / "base")
    source = run.parent / "rows.jsonl"
    source.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    values = {
        "run": str(run), "model": {"from": str(base)},
        "data": {"sources": [{"path": str(source)}], "validation": 0, "block": 16, "store": str(run.parent / "stores")},
        "train": {"steps": 2, "batch": 2, "precision": "fp32", "threads": 1, "compile": "off"}, "track": ["jsonl"],
    }  # fmt: skip
    for section, more in changes.items():
        values[section] = {**values[section], **more} if isinstance(values.get(section), dict) else more
    artel.train(values)
    elsewhere = shutil.copytree(run / "model", run.parent / "elsewhere")
    return artel.prepare(values).open(), AutoTokenizer.from_pretrained(elsewhere)


@contextmanager
def rows_read_by(model):
    """The rows of ids that a model reads within the block, in order."""
    rows = []

    def note(module, arguments):
        rows.extend(arguments[0].tolist() if arguments[0].dim() > 1 else [arguments[0].tolist()])

    handle = model.get_input_embeddings().register_forward_pre_hook(note)
    try:
        yield rows
    finally:
        handle.remove()


def has(rows, ids):
    """True if one of the rows holds the ids, one after another."""
    return any(row[at : at + len(ids)] == ids for row in rows for at in range(len(row) - len(ids) + 1))


def stored(store):
    return {tuple(part.sample(n).ids.tolist()) for part in (store.train, store.validation) for n in range(part.samples)}


@pytest.mark.slow
@pytest.mark.parametrize("name", CAUSAL)
def test_a_text_has_the_same_ids_in_training_and_in_every_command(tmp_path, name):
    family = FAMILIES[name]
    store, tokenizer = trained(family, tmp_path / "run", [{"text": text} for text in TEXTS])
    end = tokenizer.convert_tokens_to_ids(family.end) if family.end else tokenizer.eos_token_id
    assert tokenizer.eos_token_id == end
    assert stored(store) == {(*tokenizer(text).input_ids, end) for text in TEXTS}
    for folder in ("run", "base", "elsewhere"):
        opened = open_model(str(tmp_path / folder))
        for text in PROMPTS:
            expected = tokenizer(text).input_ids
            with rows_read_by(opened.model) as rows:
                "".join(opened.decoding.reply(opened.model, text, "", GREEDY).pieces)  # artel generate, artel.open
            assert rows[0] == expected
            with rows_read_by(opened.model) as rows:
                list(generate_answers(opened, [Prompt("a.jsonl:1", {}, text)], 0, GREEDY))
            assert has(rows, expected)
        with served_model(tmp_path / folder) as served, rows_read_by(served.opened.model) as rows:
            for text in PROMPTS:
                body = {"model": "tiny", "prompt": text, "max_tokens": 2, "temperature": 0}
                usage = client_of(served).post("/v1/completions", json=body).json()["usage"]
                assert usage["prompt_tokens"] == len(tokenizer(text).input_ids)
            assert has(rows[:1], tokenizer(PROMPTS[0]).input_ids)  # later prompts share beginnings with earlier ones
    (tmp_path / "more.txt").write_text("on the hill\n")
    model = artel.open(tmp_path / "run")
    with rows_read_by(model._opened.model) as rows:
        model.evaluate(tmp_path / "more.txt", {"data.block": 4})
    assert has(rows, tokenizer("on the hill").input_ids[:4])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CAUSAL if name != "ruGPT-3"])
def test_a_conversation_has_the_ids_of_its_template(tmp_path, name):
    """A template may write the begin token itself: there is one, not two."""
    talk = [*user("the mill"), {"role": "assistant", "content": "stands by the river"}]
    data = {"sources": [{"path": str(tmp_path / "rows.jsonl"), "format": "chat"}], "block": 128}
    store, tokenizer = trained(FAMILIES[name], tmp_path / "run", [{"messages": talk}], objective="chat", data=data)
    whole = tokenizer.apply_chat_template(talk, return_dict=False)
    prompt = tokenizer.apply_chat_template(talk[:1], add_generation_prompt=True, return_dict=False)
    assert stored(store) == {tuple(whole)}
    assert whole[:2].count(tokenizer.bos_token_id) == (tokenizer.bos_token_id is not None)
    for folder in ("run", "elsewhere"):
        opened = open_model(str(tmp_path / folder))
        with rows_read_by(opened.model) as rows:
            "".join(ChatSession(opened, ChatSettings(new_tokens=2), "").answer("the mill"))
        assert has(rows, prompt)
        with rows_read_by(opened.model) as rows:
            list(generate_answers(opened, [Prompt("a.jsonl:1", {}, messages=talk[:1])], 0, GREEDY))
        assert has(rows, prompt)
        with served_model(tmp_path / folder) as served, rows_read_by(served.opened.model) as rows:
            body = {"model": "tiny", "messages": talk[:1], "max_tokens": 2}
            usage = client_of(served).post("/v1/chat/completions", json=body).json()["usage"]
            assert usage["prompt_tokens"] == len(prompt)
            assert has(rows, prompt)


@pytest.mark.slow
@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_reads_what_transformers_gives_it(tmp_path, name):
    rows = [{"text": text, "label": "long" if len(text) > 10 else "short"} for text in TEXTS]
    data = {"sources": [{"path": str(tmp_path / "rows.jsonl"), "format": "labels"}], "block": 64}
    store, tokenizer = trained(FAMILIES[name], tmp_path / "run", rows, objective="classification", data=data)
    assert stored(store) == {tuple(tokenizer(text).input_ids) for text in TEXTS}
    model = artel.open(tmp_path / "run")
    for text in TEXTS:
        with rows_read_by(model._opened.model) as read:
            model.classify(text)
        assert has(read, tokenizer(text).input_ids)


@pytest.mark.slow
def test_t5_reads_and_writes_what_transformers_gives_it(tmp_path):
    pairs = [{"input": "the mill", "output": "on the hill"}, {"input": "a b", "output": "c"}]
    data = {"sources": [{"path": str(tmp_path / "rows.jsonl"), "format": "pairs"}]}
    store, tokenizer = trained(FAMILIES["T5"], tmp_path / "run", pairs, objective="seq2seq", data=data)
    expected = {(*tokenizer(row["input"]).input_ids, *tokenizer(row["output"]).input_ids) for row in pairs}
    assert stored(store) == expected
    model = artel.open(tmp_path / "run")
    with rows_read_by(model._opened.model.get_encoder()) as read:
        model.generate("the mill", max_new_tokens=2)
    assert has(read, tokenizer("the mill").input_ids)


def test_end_tokens_that_no_file_names_are_those_of_the_model(tmp_path):
    FAMILIES["ruGPT-3"].write(tmp_path / "base")
    tokenizer = load_tokenizer(str(tmp_path / "base"))
    assert (tokenizer.hf.bos_token, tokenizer.hf.eos_token, tokenizer.hf.pad_token) == ("<s>", "</s>", "<pad>")
    assert tokenizer.vocabulary == AutoModelForCausalLM.from_pretrained(tmp_path / "base").config.vocab_size


@pytest.mark.slow
def test_the_saved_model_stops_where_its_texts_end(tmp_path):
    """Llama 3's base ends with <|end_of_text|>, this tokenizer with <|eot_id|>: both are saved, and that is logged."""
    FAMILIES["Llama 3"].write(tmp_path / "base")
    (tmp_path / "a.txt").write_text("\n\n".join(TEXTS))
    data = {"sources": [{"path": "a.txt"}], "validation": 0, "block": 16}
    values = {"run": "run", "model": {"from": "base"}, "data": data,
              "train": {"steps": 2, "batch": 2}, "track": ["jsonl"]}  # fmt: skip
    told = logged()
    artel.train(values)
    config = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert config["eos_token_id"] == 2
    assert GenerationConfig.from_pretrained(tmp_path / "run" / "model").eos_token_id == [2, 1]
    assert any("ends texts with '<|eot_id|>' (2), base with '<|end_of_text|>' (1)" in line for line in told)
