"""What the server computes with: the same tokens as `artel generate`, whatever is computed beside them; adapters."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import artel
from artel.errors import InputError
from artel.generation.base import concurrent_requests
from artel.generation.make import SequentialEngine
from artel.generation.slot_model import SlotModel
from artel.generation.slots import SlotEngine
from artel.inference import open_model
from artel.inference.serve.app import Limits
from artel.inference.serve.served import ServedModel
from artel.inference.serve.server import Precision, ServerOptions, cast_weights, open_models, vllm_arguments
from support.chat_models import MARKS, llama, saved, trained_tokenizer
from support.runs import write_run
from support.saved_models import memory_status
from support.serving import QUESTION, answer, client_of, error_of, greedy, served_model, texts


def written(client, prompt, count, **more):
    """The tokens that a server writes after a prompt at temperature 0."""
    body = {"prompt": prompt, "temperature": 0, "max_tokens": count, "logprobs": 0} | more
    return client.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]["tokens"]


def named(served, ids):
    return [served.token_name(token) for token in ids]


def test_prompts_of_all_lengths_at_once_get_the_tokens_that_generate_writes(served, client):
    assert isinstance(served.engine, SlotEngine)
    texts = [f"{'the of and ' * (number % 7)}to {number}" for number in range(12)]
    expected = [greedy(served, served.opened.tokenizer.prompt(text), 10 + number) for number, text in enumerate(texts)]
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda number: written(client, texts[number], 10 + number), range(12)))
    assert answers == [named(served, ids) for ids in expected]


def test_many_at_once_and_longer_ones_among_them_get_the_tokens_of_each_alone(served_folder):
    """More than the slots that are taken first; a slot is doubled while most are still empty."""
    with served_model(served_folder, requests=None) as many, client_of(many) as client:
        assert (many.requests, many.engine.requests) == (64, 64)
        texts = ("the of and to " * (75 if number == 7 else number % 5) for number in range(24))
        prompts = [many.opened.tokenizer.prompt(text)[:300] for text in texts]
        assert max(map(len, prompts)) == 300
        expected = [greedy(many, ids, 6) for ids in prompts]
        with ThreadPoolExecutor(24) as pool:
            answers = list(pool.map(lambda ids: written(client, ids, 6), prompts))
        assert answers == [named(many, ids) for ids in expected]


@pytest.mark.parametrize(("hidden", "answers"), [(64, 64), (1024, 32), (4096, 16)])
def test_how_many_answers_at_once_follows_the_size_of_the_model(hidden, answers):
    sizes = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": 20, "vocab_size": 1000}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=8))
    assert torch.get_num_threads() == 1
    assert concurrent_requests(model) == answers


def test_vllm_is_given_the_model_and_an_adapter_over_its_base(served_folder, tmp_path):
    options = ServerOptions(port=9000, context=300, precision=Precision.BF16)
    said = " ".join(vllm_arguments(str(served_folder), options))
    assert said.startswith(
        f"serve {served_folder} --served-model-name tiny --host 127.0.0.1 --port 9000 --dtype bfloat16"
    )
    assert said.endswith("--max-num-seqs 16 --allowed-origins [] --max-model-len 300")
    model = AutoModelForCausalLM.from_pretrained(served_folder)
    model.name_or_path = str(served_folder)
    get_peft_model(model, LoraConfig(r=12, target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    said = " ".join(vllm_arguments(str(tmp_path / "adapter"), ServerOptions()))
    assert said.startswith(
        f"serve {served_folder} --enable-lora --max-lora-rank 16 --lora-modules adapter={tmp_path / 'adapter'}"
    )


def adapter_over(served_folder, place, seed):
    """An adapter with weights of its own, which artel opens over the model in `served_folder`."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(served_folder)
    model.name_or_path = str(served_folder)
    config = LoraConfig(r=4, lora_alpha=64, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    get_peft_model(model, config).save_pretrained(place)
    trained_tokenizer(MARKS).save(place)
    return place


def test_adapters_over_one_model_take_turns_and_each_writes_as_it_does_alone(served_folder, tmp_path):
    names = ("poet", "clerk")
    places = {name: str(adapter_over(served_folder, tmp_path / name, seed)) for seed, name in enumerate(names)}
    models = open_models(str(served_folder), ServerOptions(adapters=places))
    expected = {}
    for name, place in {"tiny": str(served_folder), **places}.items():
        with served_model(place) as alone, client_of(alone) as client:
            expected[name] = written(client, "the of and", 15)
    assert len({*map(str, expected.values())}) == 3
    try:
        with client_of(*models) as client, ThreadPoolExecutor(12) as pool:
            assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["tiny", "poet", "clerk"]
            names = ["tiny", "poet", "clerk", "poet", "tiny", "clerk", "clerk", "poet"] * 3
            answers = list(pool.map(lambda name: written(client, "the of and", 15, model=name), names))
        assert answers == [expected[name] for name in names]
    finally:
        models[0].close()


@pytest.mark.parametrize("wrong", ["base", "itself", "none", "name"])
def test_what_is_no_adapter_is_refused(served_folder, tmp_path, wrong):
    adapter = str(adapter_over(served_folder, tmp_path / "poet", 0))
    label = served_folder.name if wrong == "name" else "poet"
    name = adapter if wrong == "itself" else str(served_folder)
    place = {"base": str(served_folder), "none": "no"}.get(wrong, adapter)
    with pytest.raises(InputError) as error:
        open_models(name, ServerOptions(adapters={label: place}))
    assert error.value.problems[0].where == "--adapter"


def test_a_model_that_cannot_be_batched_answers_one_request_after_another(served, served_folder):
    with served_model(served_folder) as other:
        other.engine.close()
        other.engine = SequentialEngine(other.opened.model, other.opened.tokenizer, "one after another")
        with client_of(other, limits=Limits(queue=0)) as client, client_of(served) as batching:
            assert texts(answer(client, max_tokens=20)) == texts(answer(batching, max_tokens=20))
            two = answer(client, n=2, temperature=1, seed=3)
            assert texts(two) == texts(answer(batching, n=2, temperature=1, seed=3))


def test_weights_in_bf16_give_the_same_tokens_at_once_as_alone(served_folder):
    opened = open_model(str(served_folder))
    cast_weights(opened.model, Precision.BF16, "tiny")
    model = ServedModel(opened, "tiny", 4, None)
    try:
        assert {parameter.dtype for parameter in opened.model.parameters()} == {torch.bfloat16}
        ids = model.opened.tokenizer.prompt("the of and")
        with client_of(model) as client:
            body = {"prompt": ids, "temperature": 0, "max_tokens": 20, "logprobs": 1}
            logprobs = client.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
        alone = named(model, greedy(model, ids, 20))
        place = next((place for place, token in enumerate(alone) if logprobs["tokens"][place] != token), 20)
        if place < 20:  # two tokens that are equally likely in bf16
            top = logprobs["top_logprobs"][place]
            assert max(top.values()) - logprobs["token_logprobs"][place] < 0.05
        assert place > 3
    finally:
        model.close()


@pytest.mark.parametrize("more", ["tokens", "rows"])
def test_a_tokenizer_and_a_model_of_unequal_sizes(tmp_path, more):
    """Marks that were added for another use have no row; rows that fill up a size have no token."""
    tokenizer = trained_tokenizer(MARKS)
    known = tokenizer.vocabulary
    model = llama(tokenizer, vocab_size=known + (70 if more == "rows" else 0))
    if more == "tokens":
        tokenizer.hf.add_tokens([f"<|mark {number}|>" for number in range(70)], special_tokens=True)
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
    response_format = {"type": "json_schema", "json_schema": {"schema": schema | {"additionalProperties": False}}}
    with served_model(saved(tmp_path / "tiny", model, tokenizer)) as served, client_of(served) as client:
        for sampled in ({"temperature": 1, "seed": 0}, {"temperature": 1, "seed": 1}):
            assert answer(client, logit_bias={str(known - 1): 1}, **sampled)["usage"]["completion_tokens"] > 0
            made = texts(answer(client, response_format=response_format, max_tokens=200, **sampled))[0]
            assert json.loads(made)["a"] in ("x", "y")
        response = client.post("/v1/chat/completions", json=QUESTION | {"logit_bias": {str(known): 1}})
        assert error_of(response) == (400, "logit_bias", None)
        assert f"use 0 to {known - 1}" in response.json()["error"]["message"]


@pytest.mark.slow
@pytest.mark.parametrize("quantize", ["int8", "nf4"])
def test_a_base_in_8_or_4_bits_gives_the_tokens_of_generate(served_folder, quantize):
    pytest.importorskip("bitsandbytes")
    model = {"config": None, "from": str(served_folder), "lora": {"rank": 4}, "quantize": quantize}
    run = write_run(Path("run.yaml").absolute(), model=model, tokenizer={"train": None}, train={"steps": 2})
    folder = artel.train(run).folder
    with served_model(folder) as served, client_of(served) as client:
        assert served.opened.model.quantization_method == "bitsandbytes"
        ids = served.opened.tokenizer.prompt("the of and")
        assert written(client, ids, 12) == named(served, greedy(served, ids, 12))


def test_slots_that_grow_take_a_layer_more_and_not_the_cache_twice():
    """Tensors of 36 MiB: smaller ones the C library may keep when they are freed."""
    tokenizer = trained_tokenizer(MARKS)
    slots = SlotModel(llama(tokenizer, num_hidden_layers=4), 100_000)
    try:
        slots.resize([None] * 4, 36_864)
        Path("/proc/self/clear_refs").write_text("5")  # the peak is what is taken from now on
        before = memory_status("VmHWM")
        slots.resize([0, 1], 73_728)
        assert memory_status("VmHWM") - before < 2 * 72  # of 4 layers with 72 MiB each
    finally:
        slots.close()
