"""Texts written for texts: the losses and the words of transformers, chrF by sacrebleu, languages, what is cut."""

import asyncio
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    BartConfig,
    BartForConditionalGeneration,
    M2M100Config,
    M2M100ForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    MBart50Tokenizer,
    MBartConfig,
    MBartForConditionalGeneration,
    MBartTokenizer,
    T5Config,
    T5ForConditionalGeneration,
    T5ForTokenClassification,
)
from transformers.trainer_pt_utils import LabelSmoother

import artel
from artel.config import RunConfig, TokenizerTraining
from artel.errors import InputError
from artel.generation.encoder_decoder import decoder_inputs
from artel.generation.generate import Sampling
from artel.inference.serve.app import Limits
from artel.models.attention_switch import use_artel_attention
from artel.models.output_head import output_head
from artel.objectives import DocumentSamples
from artel.objectives.seq2seq import SequenceToSequence, chrf
from artel.parallel import DataParallel, World
from artel.text import Document, DroppedRecord, Pair, Record
from artel.tokens import Tokenizer, evaluation_rows, train_tokenizer, training_rows
from support import WORKERS
from support.chat_models import saved
from support.objectives import SMALL_BART, SMALL_T5, objective_run
from support.ranks import run_ranks
from support.serving import app_of, ask_and_leave, client_of, served_model

PAIRS = [Pair(f"{'one two ' * count}three", f"three{' two one' * count}") for count in (1, 9, 2, 6, 3, 1, 12, 4, 5)]
TEXTS = [pair.input for pair in PAIRS[:4]]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(iter(TEXTS * 20), TokenizerTraining(vocab=270), encoder=True)


def build_objective(tokenizer, block=64, **more):
    run = RunConfig.model_validate({"objective": "seq2seq", "data": {"block": block}, "seq2seq": more})
    return SequenceToSequence(run, tokenizer)


def made_of(objective, pairs, split="train"):
    return list(objective.samples([Document(Record(pair.output, "a:1", "a", pair), split) for pair in pairs]))


class Samples:
    """What the objective makes of pairs."""

    def __init__(self, objective, pairs=PAIRS):
        self.samples = [made.samples[0] for made in made_of(objective, pairs)]

    def __len__(self):
        return len(self.samples)

    def read(self, index):
        return self.samples[index]


def model_of(kind, tokenizer):
    """A tiny model without dropout."""
    ids = {"vocab_size": tokenizer.vocabulary, "pad_token_id": tokenizer.pad_id, "eos_token_id": tokenizer.end_id}
    start, still = {"decoder_start_token_id": tokenizer.pad_id}, {"dropout": 0, "attention_dropout": 0}
    still |= {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}
    bart = SMALL_BART | ids | still | {"max_position_embeddings": 64}
    t5 = SMALL_T5 | ids | start | {"dropout_rate": 0}
    torch.manual_seed(1)
    return {
        "t5": lambda: T5ForConditionalGeneration(T5Config(**t5)),
        "t5, scaled otherwise": lambda: T5ForConditionalGeneration(
            T5Config(**t5, tie_word_embeddings=False, feed_forward_proj="gated-gelu")
        ),
        "bart": lambda: BartForConditionalGeneration(BartConfig(**bart, decoder_start_token_id=tokenizer.end_id)),
        "mbart": lambda: MBartForConditionalGeneration(MBartConfig(**bart)),
        "marian": lambda: MarianMTModel(MarianConfig(**bart, **start)),
        "m2m": lambda: M2M100ForConditionalGeneration(M2M100Config(**bart, **start, activation_dropout=0)),
    }[kind]()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["t5", "t5, scaled otherwise", "bart", "mbart", "marian", "m2m"])
def test_loss_and_gradients_are_those_of_the_model_itself(tokenizer, kind, smoothing):
    """Of pairs of unequal length, in groups and with rows of padding, as model(labels=…) has them of one batch."""
    objective, model = build_objective(tokenizer, smoothing=smoothing), model_of(kind, tokenizer)
    use_artel_attention(model)
    objective.check(model)
    rows = training_rows(Samples(objective), np.arange(len(PAIRS)), len(PAIRS) + 9)
    batch = objective.batch(rows)
    loss = objective.loss(model, batch)[0] / batch.targets
    loss.backward()
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    inputs = tokenizer.hf([pair.input for pair in PAIRS], padding=True, return_tensors="pt")
    outputs = tokenizer.hf(text_target=[pair.output for pair in PAIRS], padding=True, return_tensors="pt")
    labels = outputs["input_ids"].masked_fill(outputs["attention_mask"] == 0, -100)
    read = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    if smoothing:
        expected = LabelSmoother(smoothing)(model(**read, decoder_input_ids=decoder_inputs(model, labels)), labels)
    else:
        expected = model(**read, labels=labels).loss
    expected.backward()
    assert len(batch.groups) == 2
    assert batch.tokens == int(inputs["attention_mask"].sum() + outputs["attention_mask"].sum())
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    learned = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    assert learned.keys() == gradients.keys()
    largest = max(float(grad.abs().max()) for grad in learned.values())
    for name, grad in learned.items():
        torch.testing.assert_close(gradients[name], grad, rtol=1e-4, atol=1e-5 * largest)
    # Of T5 the logits of all positions are never held.
    assert (output_head(model) is not None) == (kind in ("t5", "t5, scaled otherwise", "m2m"))


def test_outputs_are_kept_of_the_pairs_that_are_written(tokenizer):
    objective, model = build_objective(tokenizer, generate=3, target=8), model_of("t5", tokenizer)
    samples = Samples(objective)
    batches = [
        (objective.batch(evaluation_rows(samples, indices, 2)), indices)
        for indices in np.split(np.arange(len(PAIRS)), range(2, len(PAIRS), 2))
    ]
    strategy = DataParallel(model, objective, World(0, 1, 0, torch.device("cpu")), "fp32")
    totals, outputs = strategy.evaluate(batches, len(PAIRS))
    assert (outputs.shape, outputs.dtype) == ((3, 8), np.float32)
    asked = [{"text": pair.input, "sampling": Sampling(8, temperature=0.0)} for pair in PAIRS[:3]]
    expected = [answer["text"] for answer in objective.run_task(model, "generate", asked)]
    written = [row[row >= 0].astype(int).tolist() for row in outputs]
    assert [tokenizer.hf.decode(ids, skip_special_tokens=True).strip() for ids in written] == expected
    assert totals["targets"] == sum(len(sample.ids) - sample.numbers[0] for sample in samples.samples)


@pytest.mark.parametrize("beams", [1, 3])
def test_writing_ends_when_nobody_waits(tokenizer, beams):
    objective, model = build_objective(tokenizer, target=20), model_of("t5", tokenizer)
    sampling, seen = Sampling(20, temperature=0.0, beams=beams), []

    def should_stop():
        seen.append(True)
        return len(seen) == 4

    (whole,) = objective.run_task(model, "generate", [{"text": "one", "sampling": sampling}])
    (part,) = objective.run_task(model, "generate", [{"text": "one", "sampling": sampling, "should_stop": should_stop}])
    assert (part["tokens"], part["finish_reason"]) == (4, "length")
    assert whole["tokens"] > 4


def test_an_encoder_of_t5_keeps_its_positions_in_training(tokenizer):
    config = T5Config(**SMALL_T5, vocab_size=tokenizer.vocabulary, dropout_rate=0)
    model = T5ForTokenClassification(config).eval()
    ids = torch.arange(20, 40).view(2, 10)
    mask = (torch.arange(10) < torch.tensor([[10], [6]])).long()
    expected = model(input_ids=ids, attention_mask=mask).logits
    use_artel_attention(model)
    actual = model(input_ids=ids, attention_mask=mask).logits
    torch.testing.assert_close(actual[mask > 0], expected[mask > 0])


def test_what_is_cut_is_counted(tokenizer):
    objective = build_objective(tokenizer, block=12, target=8)
    made = made_of(objective, PAIRS[:2])
    assert [one.counts for one in made] == [{}, {"input_truncated": 1, "output_truncated": 1}]
    (sample,) = made[1].samples
    assert (sample.numbers, len(sample.ids), sample.ids[-1]) == ((12,), 20, tokenizer.end_id)
    dropped = made_of(build_objective(tokenizer, block=12, target=64, too_long="drop"), PAIRS[:2])
    assert isinstance(dropped[0], DocumentSamples)
    assert dropped[1] == DroppedRecord("longer_than_block")
    dropped = made_of(build_objective(tokenizer, block=64, target=8, too_long="drop"), PAIRS[1:2])
    assert dropped == [DroppedRecord("longer_than_target")]
    assert made_of(objective, PAIRS[:1], "validation")[0].reference == {"input": TEXTS[0], "output": PAIRS[0].output}
    with pytest.raises(InputError, match="leaves no room between 2 special tokens"):
        build_objective(tokenizer, target=2)
    with pytest.raises(InputError, match=r"^seq2seq\.target: 80 tokens are more than the model's 64 positions"):
        build_objective(tokenizer, target=80).check(model_of("bart", tokenizer))


def test_a_prefix_is_a_part_of_the_text_and_its_special_tokens_are_tokens(tokenizer):
    for prefix in ("count: ", "<mask>", "<mask>count: "):
        objective = build_objective(tokenizer, prefix=prefix)
        sample = Samples(objective).read(0)
        assert sample.ids[: sample.numbers[0]].tolist() == tokenizer.hf(prefix + TEXTS[0])["input_ids"]
        assert repr(prefix + "He come home yesterday.")[1:-1] in objective.model_card_code()
    plain = train_tokenizer(iter(TEXTS * 20), TokenizerTraining(vocab=265))  # puts nothing around a text
    sample = Samples(build_objective(plain)).read(0)
    assert sample.ids[: sample.numbers[0]].tolist() == plain.hf(TEXTS[0])["input_ids"]
    assert sample.ids[-1] == plain.end_id


def several_languages(kind):
    """A tokenizer of mBART of a few pieces."""
    pieces = ["<s>", "<pad>", "</s>", "<unk>", "▁", *"abcdefghijklmnopqrstuvwxyz"]
    return Tokenizer(kind(vocab=[(piece, -float(number)) for number, piece in enumerate(pieces)]), "languages")


@pytest.mark.parametrize("kind", [MBartTokenizer, MBart50Tokenizer])
def test_languages_stand_where_the_tokenizer_puts_them_and_begin_what_is_written(kind):
    tokenizer = several_languages(kind)
    objective = build_objective(tokenizer, source_language="ru_RU", target_language="en_XX")
    samples = Samples(objective)
    hf = several_languages(kind).hf
    hf.src_lang, hf.tgt_lang = "ru_RU", "en_XX"
    for sample, pair in zip(samples.samples, PAIRS, strict=True):
        read, written = np.split(sample.ids, sample.numbers)
        assert read.tolist() == hf(pair.input, truncation=True, max_length=64)["input_ids"]
        assert written.tolist() == hf(text_target=pair.output, truncation=True, max_length=64)["input_ids"]
    model = model_of("mbart", tokenizer).eval()
    model.config.vocab_size = tokenizer.vocabulary
    (text,) = objective.run_task(model, "generate", [{"text": "one", "sampling": Sampling(6, temperature=0.0)}])
    settings = json.loads(objective.model_files(model)["generation_config.json"])
    english = hf.convert_tokens_to_ids("en_XX")
    began = [settings["decoder_start_token_id"], settings.get("forced_bos_token_id")]
    assert began == ([english, None] if kind is MBartTokenizer else [tokenizer.end_id, english])
    expected = model.generate(**hf("one", return_tensors="pt"), max_new_tokens=6, do_sample=False,
                              decoder_start_token_id=began[0], forced_bos_token_id=began[1])  # fmt: skip
    assert text["text"] == hf.decode(expected[0], skip_special_tokens=True).strip()
    with pytest.raises(InputError, match="has no language 'xx'"):
        build_objective(several_languages(kind), source_language="xx")


def test_chrf_is_that_of_sacrebleu():
    metrics = pytest.importorskip("sacrebleu.metrics", reason="sacrebleu is not installed")
    chance = np.random.default_rng(0)
    for size in (1, 3, 30):
        pairs = [["".join(chance.choice(list("абв где"), chance.integers(0, 12))) for _ in "ab"] for _ in range(size)]
        written, expected = zip(*pairs, strict=True)
        assert chrf(pairs) == pytest.approx(metrics.CHRF().corpus_score(list(written), [list(expected)]).score)
    assert chrf([("мир", "мир")]) == pytest.approx(100)
    assert chrf([]) == 0


async def answered_after_leaving(app, body):
    """The status that a client of /v1/completions is given who left at once."""
    gone = asyncio.Event()
    gone.set()
    return await ask_and_leave(app, "/v1/completions", body, gone)


def streamed(client, body):
    """The parts of each text of a stream, and its last one says why it ended."""
    events = client.post(
        "/v1/completions", json=body | {"stream": True, "stream_options": {"include_usage": True}}
    ).text
    *parts, usage, done = events.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    assert json.loads(usage.removeprefix("data: "))["usage"]["completion_tokens"] > 0
    choices = [json.loads(part.removeprefix("data: "))["choices"][0] for part in parts]
    ends = [choice["finish_reason"] for choice in choices]
    texts = [[choice["text"] for choice in choices if choice["index"] == index] for index in range(len(body["prompt"]))]
    assert [choice["index"] for choice in choices] == sorted(choice["index"] for choice in choices)
    assert len(ends) - ends.count(None) == len(texts)
    return texts


@pytest.mark.slow
def test_the_run_writes_what_transformers_writes(capsys):
    run = objective_run(Path("run.yaml").absolute(), "seq2seq", train={"steps": 4, "batch": 8})
    folder = artel.train(run).folder
    model = artel.open(folder)
    plain, tokenizer = (kind.from_pretrained(folder / "model") for kind in (AutoModelForSeq2SeqLM, AutoTokenizer))

    def written(text, **settings):
        inputs = tokenizer("count: " + text, return_tensors="pt")
        return tokenizer.decode(plain.generate(**inputs, **settings)[0], skip_special_tokens=True).strip()

    texts = ["one two three", "ten", "four five six seven eight nine ten one two"]
    expected = [written(text) for text in texts]
    assert [model.generate(text) for text in texts] == expected
    assert model.generate(texts[0], beams=3) == written(texts[0], num_beams=3)
    assert model.generate(texts[0], beams=2, temperature=0) == written(texts[0], num_beams=2)
    out_of_range = [({"beams": beams}, f"beams: {beams} is out of range") for beams in (0, -2, 101)]
    for wrong, message in (
        *out_of_range,
        ({"beams": 4, "temperature": 0.7}, "beams: cannot be combined with a temperature"),
    ):
        with pytest.raises(InputError, match=message):
            model.generate(texts[0], **wrong)
    before = torch.random.get_rng_state()
    sampled = [model.generate(texts[0], temperature=1.0, seed=seed) for seed in (1, 1, 2)]
    assert torch.equal(before, torch.random.get_rng_state())
    assert sampled[0] == sampled[1] != sampled[2]
    with pytest.raises(InputError, match=r"use generate$"):
        model.fill("one")
    # The folder alone, which knows nothing of the prefix.
    alone = artel.open(folder / "model")
    assert (alone.objective, alone.generate("count: " + texts[1])) == ("seq2seq", expected[1])
    assert len(tokenizer(alone.generate("count: ten", temperature=9.0, top_k=0))["input_ids"]) < 60
    # Many together.
    Path("prompts.txt").write_text("\n".join(texts))
    with served_model(folder) as served, client_of(served) as client:
        body = {"prompt": texts, "n": 1}
        answer = client.post("/v1/completions", json=body).json()
        assert [choice["text"] for choice in answer["choices"]] == expected
        assert answer["usage"]["completion_tokens"] > 0
        assert ["".join(parts) for parts in streamed(client, body)] == expected
        sampled = body | {"temperature": 3, "top_k": 0, "seed": 5}
        parts = streamed(client, sampled)
        assert max(map(len, parts)) > 2
        whole = client.post("/v1/completions", json=sampled).json()["choices"]
        assert ["".join(said) for said in parts] == [choice["text"] for choice in whole]
        said: list[str] = []
        asked = {"text": texts[1], "sampling": Sampling(10, temperature=0.0, beams=2), "on_text": said.append}
        served.opened.decoding.run_task(served.opened.model, "generate", [asked])
        assert said == []  # no beam is the text before the end
        assert client.get("/v1/models").json()["data"][0]["endpoints"] == ["/v1/completions"]
        neutral = {"presence_penalty": 0, "frequency_penalty": 0.0, "min_p": 0, "stop": [], "logit_bias": {}}
        answer = client.post("/v1/completions", json={"prompt": texts[1]} | neutral)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == expected[1]
        hasty = client_of(served, limits=Limits(seconds=0.0)).post("/v1/completions", json={"prompt": texts[1]}).json()
        assert (hasty["usage"]["completion_tokens"], hasty["choices"][0]["finish_reason"]) == (1, "length")
        assert asyncio.run(answered_after_leaving(app_of(served), {"prompt": texts[1]})) == 499
        one = {"prompt": "one"}
        for wrong in (
            one | {"stop": ["x"]},
            one | {"presence_penalty": 0.5},
            {"prompt": [1, 2]},
            {"prompt": "one " * 250},
        ):
            assert client.post("/v1/completions", json=wrong).status_code == 400
            assert client.post("/v1/completions", json=wrong | {"stream": True}).status_code == 400
        assert asyncio.run(answered_after_leaving(app_of(served), {"prompt": texts[1], "stream": True})) == 499
        assert client.post("/v1/embeddings", json={"input": "one"}).status_code == 400
        talk = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "one"}]}).json()
        assert "it writes a text for a text" in talk["error"]["message"]
        assert talk["error"]["message"].endswith("use /v1/completions")
    result = model.evaluate()
    assert {"loss", "perplexity", "accuracy", "exact_match", "chrf"} == result.metrics.keys()
    (table,) = result.details["tables"].values()
    assert len(table) == 4
    assert all(model.generate(row["input"]).startswith(row["written"].rstrip("…")) for row in table)


@pytest.mark.ci
@pytest.mark.processes
def test_processes_write_prompts_while_they_train(tmp_path):
    """Under ddp one of them alone; under fsdp all together, since each holds a part of the weights."""
    prompts = ["one two three", "ten"]
    shared = {"train": {"steps": 2, "batch": 4}, "validate": {"every": 2, "prompts": prompts, "new_tokens": 6}}
    files = [
        objective_run(tmp_path / f"{data}.yaml", "seq2seq", parallel={"data": data}, **shared)
        for data in ("ddp", "fsdp")
    ]
    run_ranks(2, WORKERS / "layout_cases.py", "run_files", 400, CASES=os.pathsep.join(map(str, files)))
    ddp, fsdp = (
        [json.loads(line) for line in (tmp_path / name / "samples.jsonl").read_text().splitlines()]
        for name in ("ddp", "fsdp")
    )
    assert [(line["step"], line["prompt"]) for line in ddp] == [(step, prompt) for step in (0, 2) for prompt in prompts]
    assert ddp == fsdp


def test_an_adapter_over_a_pretrained_model(tokenizer, tmp_path):
    pytest.importorskip("peft", reason="peft is not installed")
    saved(tmp_path / "t5", model_of("t5", tokenizer), tokenizer)
    run = objective_run(tmp_path / "run.yaml", "seq2seq", train={"steps": 2, "batch": 4})
    changes = {"model": {"from": str(tmp_path / "t5"), "lora": {"rank": 4}}, "tokenizer": {}, "seq2seq.beams": 2}
    folder = artel.train(run, changes).folder
    config = json.loads((folder / "model" / "adapter_config.json").read_text())
    assert (config["task_type"], sorted(config["target_modules"])[-1]) == ("SEQ_2_SEQ_LM", "wo")
    assert json.loads((folder / "model" / "generation_config.json").read_text())["num_beams"] == 2
    assert isinstance(artel.open(folder).generate("one two"), str)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel.pipeline": 2}, "it has an encoder and a decoder"),
        ({"parallel.context": 2}, "an encoder and a decoder"),
        ({"data.packing": "best_fit"}, "each sample has its own row"),
        ({"model.config": {"model_type": "gpt2"}}, "no head for texts written for texts"),
        ({"seq2seq.generate": 0, "checkpoint.best": "chrf"}, "seq2seq.generate is 0"),
        ({"seq2seq.source_language": "ru_RU"}, "no language tokens"),
    ],
)
def test_what_cannot_be_is_refused_before_the_first_step(tmp_path, changes, message):
    run = objective_run(tmp_path / "run.yaml", "seq2seq", train={"steps": 1})
    with pytest.raises(InputError, match=message):
        artel.train(run, changes)
