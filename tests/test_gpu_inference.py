"""Answers on one GPU: those of a CPU, many at once as each alone; labels and vectors; the first commands."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import GPT2Config, LlamaConfig, MistralConfig, Qwen3MoeConfig

import artel
from artel.generation.make import make_engine
from artel.generation.paged import BatchingEngine
from artel.inference import open_model
from artel.inference.serve.served import ServedModel
from support.chat_models import CONVERSATIONS, MARKS, learned_by_heart, trained_tokenizer, user
from support.engines import CONTEXT, ROWS, SIZES, alone, made, prompt_of, together
from support.objectives import objective_run
from support.runs import TINY, losses, merged, succeed, write_run
from support.runs import artel as command
from support.serving import client_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
GPU = torch.device("cuda")
OWN_PROCESS = {"OMP_NUM_THREADS": "4"}
"""A command with a variable of its own is no fork of a process, in which CUDA could not be used."""
CONFIGS = [
    LlamaConfig(**SIZES),
    GPT2Config(vocab_size=ROWS, n_embd=64, n_layer=2, n_head=4, n_positions=CONTEXT),
    Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    MistralConfig(**SIZES, sliding_window=8),
]


@pytest.fixture(scope="module")
def tokenizer():
    return trained_tokenizer([])


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_answers_together_are_those_of_each_prompt_alone_and_of_a_cpu(config, tokenizer):
    model = made(config)
    prompts = [prompt_of(length, length) for length in (1, 40, 7, 130, 40, 3, 300, 12)]
    on_cpu = [alone(model, tokenizer, prompt, 12) for prompt in prompts]
    model = model.to(GPU)
    expected = [alone(model, tokenizer, prompt, 12) for prompt in prompts]
    assert expected == on_cpu
    engine = make_engine(model, tokenizer, 4, CONTEXT)
    try:
        assert isinstance(engine, BatchingEngine), engine.note
        assert together(engine, tokenizer, prompts, 12) == expected
    finally:
        engine.close()


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    return learned_by_heart(tmp_path_factory.mktemp("chat") / "model", MARKS, None)


def test_a_server_answers_many_at_once(chat_model):
    """Streamed and whole, with a schema, and the embeddings that it refuses."""
    served = ServedModel(open_model(str(chat_model)), "tiny", 8, None)
    print(served.engine.note)
    assert served.opened.model.device.type == "cuda"
    with client_of(served) as client:

        def ask(number):
            body = {"messages": user("Who are you?"), "temperature": 0, "max_tokens": 30, "stream": number % 2 == 1}
            answer = client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            if not body["stream"]:
                return answer.json()["choices"][0]["message"]["content"]
            lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
            deltas = [json.loads(line)["choices"] for line in lines]
            return "".join(choice[0]["delta"].get("content") or "" for choice in deltas if choice)

        with ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(ask, range(32)))
        assert set(answers) == {CONVERSATIONS[0][1][1]}
        schema = {"enum": ["yes", "no"]}
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        body = {"messages": user("Who are you?"), "max_tokens": 60, "response_format": form, "temperature": 0}
        answer = client.post("/v1/chat/completions", json=body)
        assert json.loads(answer.json()["choices"][0]["message"]["content"]) in ("yes", "no"), answer.text
        sampled = {"messages": user("Who are you?"), "max_tokens": 20, "seed": 3, "n": 3, "logprobs": True}
        assert len(client.post("/v1/chat/completions", json=sampled).json()["choices"]) == 3


def test_the_commands_of_a_first_evening(tmp_path):
    """Each as a user types it."""
    write_run(tmp_path / "run.yaml", **merged(TINY, {"train": {"steps": 12, "compile": "auto", "precision": "auto"}}))
    for words in (
        "train run.yaml",
        "evaluate run",
        "generate run --prompt one --max-new-tokens 8",
        "plan run.yaml",
        "doctor",
        "report run",
    ):
        done = command(*words.split(), cwd=tmp_path, env=OWN_PROCESS)
        print(f"$ artel {words}\n{done.stdout[-1500:]}{done.stderr[-1500:]}")
        assert done.returncode == 0, words
    assert losses(tmp_path / "run").keys() == set(range(1, 13))


@pytest.mark.parametrize("name", ["labels_of_pairs", "tokens", "embedding", "rerank", "span_qa"])
def test_what_a_trained_encoder_says_is_what_it_says_on_a_cpu(tmp_path, name):
    run = objective_run(tmp_path / "run.yaml", name, train={"steps": 5, "batch": 16})
    succeed("train", run, env=OWN_PROCESS)
    model = artel.open(str(tmp_path / "run"))
    assert model.model.device.type == "cuda"
    says = {
        "labels_of_pairs": lambda: model.classify(["one two", "three"]),
        "tokens": lambda: model.entities("Where is number one?"),
        "embedding": lambda: torch.as_tensor(model.embed(["What is one?", "two is what it is"])),
        "rerank": lambda: [each.score for each in model.rerank("Where is number 4?", ["No.", "The number 4 is here."])],
        "span_qa": lambda: model.answer("who?", "one two three"),
    }[name]
    on_gpu = says()
    model.model.to("cpu")
    on_cpu = says()
    if name == "embedding":
        assert torch.allclose(on_gpu, on_cpu, atol=1e-3)
    elif name == "rerank":
        assert on_gpu == pytest.approx(on_cpu, abs=1e-3)
    else:
        assert str(on_gpu)[:20] == str(on_cpu)[:20]


@pytest.mark.parametrize(("name", "says"), [
    ("seq2seq", lambda model: model.generate("one two three", beams=2)),
    ("masked", lambda model: model.fill("one <mask> three").text),
    ("reward", lambda model: model.score("Where is number 4?", ["It is here.", "No."])),
    ("dpo", lambda model: model.generate("Where?", max_new_tokens=5, seed=1, repetition_penalty=1.2)),
])  # fmt: skip
def test_what_a_model_of_another_kind_says(tmp_path, name, says):
    run = objective_run(tmp_path / "run.yaml", name, train={"steps": 2, "batch": 16})
    succeed("train", run, env=OWN_PROCESS)
    model = artel.open(str(tmp_path / "run"))
    assert model.model.device.type == "cuda"
    assert says(model)


@pytest.mark.parametrize("quantize", ["none", "int8", "nf4"])
def test_an_adapter_writes(tmp_path, quantize):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    pytest.importorskip("peft", reason="peft is not installed")
    base = merged(TINY, {"train": {"steps": 2}})
    succeed("train", write_run(tmp_path / "base.yaml", **base), env=OWN_PROCESS)
    model = {"config": None, "from": str(tmp_path / "base" / "model"), "lora": {"rank": 4}, "quantize": quantize}
    tuned = write_run(tmp_path / "tuned.yaml", **{**base, "model": model, "tokenizer": {"train": None}})
    succeed("train", tuned, env=OWN_PROCESS)
    opened = artel.open(str(tmp_path / "tuned"))
    assert opened.model.device.type == "cuda"
    assert opened.generate("one", max_new_tokens=4, temperature=0)
