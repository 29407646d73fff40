"""`artel serve` as a server of its own: OpenAI's client, clients that vanish, signals, what it refuses."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from shutil import which
from urllib.parse import urlsplit

import openai
import pytest
import torch
from openai.types.responses import Response
from pydantic import BaseModel

from support.chat_models import user
from support.hub import Hub, Repo
from support.runs import artel, refused
from support.serving import server_of, tiny_model

pytestmark = pytest.mark.processes
ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def server(folder):
    with server_of(folder, "--api-key", "secret", "--requests", "4") as server:
        yield server


def figures(server) -> dict[str, float]:
    """Prometheus's figures by name."""
    request = urllib.request.Request(f"{server.url}/metrics", headers={"authorization": "Bearer secret"})
    with urllib.request.urlopen(request) as response:
        lines = [line for line in response.read().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


QUESTION = {"model": "tiny", "messages": user("Who are you?"), "temperature": 0, "max_tokens": 12}


@pytest.mark.ci
def test_openais_client_gets_answers_whole_and_streamed(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret") as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        assert client.models.retrieve("tiny").id == "tiny"
        whole = client.chat.completions.create(**QUESTION, logprobs=True, top_logprobs=2)
        text = whole.choices[0].message.content
        assert (whole.choices[0].finish_reason, whole.usage.completion_tokens) == ("length", 12)
        assert len(whole.choices[0].logprobs.content) == 12
        parts = list(client.chat.completions.create(**QUESTION, stream=True, stream_options={"include_usage": True}))
        streamed = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
        assert (streamed, parts[-1].usage.completion_tokens) == (text, 12)
        with client.chat.completions.stream(**QUESTION, stop=text[-3:]) as stream:  # it raises for what is cut off
            assert text.startswith(stream.get_final_completion().choices[0].message.content)
        written = client.completions.create(
            model="tiny", prompt=["the of", "and"], n=2, seed=1, max_tokens=5, logprobs=1
        )
        assert [choice.index for choice in written.choices] == [0, 1, 2, 3]
        short = {"model": "tiny", "prompt": "the", "max_tokens": 5}
        extra = client.completions.create(**short, temperature=9, extra_body={"top_k": 1, "min_p": 0.1})
        assert extra.choices[0].text == client.completions.create(**short, temperature=0).choices[0].text
        with pytest.raises(openai.NotFoundError, match="served: tiny"):
            client.chat.completions.create(**QUESTION | {"model": "gpt-5"})
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong") as other,
        pytest.raises(openai.AuthenticationError),
    ):
        other.models.list()


@pytest.mark.ci
def test_openais_client_gets_responses_whole_and_streamed(server):
    request = {"model": "tiny", "input": "Who are you?", "temperature": 0, "max_output_tokens": 12}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret") as client:
        chat = client.chat.completions.create(**QUESTION)
        whole = client.responses.create(**request)
        Response.model_validate(whole.model_dump())  # the client itself takes anything
        assert whole.output_text == chat.choices[0].message.content
        assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert (whole.usage.input_tokens, whole.usage.output_tokens) == (chat.usage.prompt_tokens, 12)
        events = list(client.responses.create(**request, stream=True))
        for event in events:
            type(event).model_validate(event.model_dump())
        assert [event.sequence_number for event in events] == list(range(len(events)))
        kinds = list(dict.fromkeys(event.type.removeprefix("response.") for event in events))
        assert kinds == [
            "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta",
            "output_text.done", "content_part.done", "output_item.done", "incomplete",
        ]  # fmt: skip
        streamed = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert streamed == events[-1].response.output_text == whole.output_text
        with client.responses.stream(**request, extra_body={"stop": whole.output_text[-3:]}) as stream:
            final = stream.get_final_response()
        assert (final.status, final.incomplete_details) == ("completed", None)
        assert whole.output_text.startswith(final.output_text)

        # The next turn, with the output as the client has it, is that of the same conversation in the chat.
        sent = [{"role": "user", "content": [{"type": "input_text", "text": "Who are you?"}]}, *final.output]
        sent.append({"role": "user", "content": "And who am I?"})
        turn = client.responses.create(**request | {"input": sent, "instructions": "Be brief."}, tools=[])
        spoken = [("system", "Be brief."), ("user", "Who are you?"), ("assistant", final.output_text)]
        spoken.append(("user", "And who am I?"))
        messages = [{"role": role, "content": content} for role, content in spoken]
        chat = client.chat.completions.create(**QUESTION | {"messages": messages})
        expected = (chat.choices[0].message.content, chat.usage.prompt_tokens)
        assert (turn.output_text, turn.usage.input_tokens) == expected


class City(BaseModel):
    name: str
    days: int


@pytest.mark.ci
def test_openais_client_gets_responses_that_fit_a_class(server):
    request = {"model": "tiny", "input": "Who are you?", "extra_body": {"seed": 1}}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret") as client:
        whole = client.responses.parse(**request, text_format=City)
        assert isinstance(whole.output_parsed, City)
        assert (whole.text.format.type, whole.text.format.name) == ("json_schema", "City")
        with client.responses.stream(**request, text_format=City) as stream:
            assert stream.get_final_response().output_parsed == whole.output_parsed
        any_object = client.responses.create(**request, text={"format": {"type": "json_object"}}, max_output_tokens=20)
        assert any_object.output_text.startswith("{")
        wrong = {"type": "json_schema", "name": "a", "schema": {"type": "nothing"}}
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(**request, text={"format": wrong})
        assert refused.value.param == "text"


def test_lm_evals_loglikelihoods_are_those_of_transformers(server, folder, monkeypatch):
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI
    from transformers import AutoModelForCausalLM

    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    api = LocalCompletionsAPI(
        base_url=f"{server.url}/v1/completions", model="tiny", tokenizer=str(folder), tokenizer_backend="huggingface",
        tokenized_requests=True, max_length=512, batch_size=2,
    )  # fmt: skip
    pairs = [("the of", " and"), ("and", " the of the"), ("of the", " of")]
    found = api.loglikelihood([Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(pairs)])
    model = AutoModelForCausalLM.from_pretrained(folder)
    for (context, continuation), (logprob, _) in zip(pairs, found, strict=True):
        before, after = api._encode_pair(context, continuation)
        with torch.no_grad():
            rows = model(torch.tensor([before + after])).logits[0].log_softmax(-1)
        expected = sum(float(rows[len(before) - 1 + at, token]) for at, token in enumerate(after))
        assert logprob == pytest.approx(expected, rel=1e-3)


async def many_at_once(server, count):
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0) as client:

        async def ask(number):
            if number % 2:
                return (await client.chat.completions.create(**QUESTION)).choices[0].message.content
            stream = await client.chat.completions.create(**QUESTION, stream=True)
            return "".join([part.choices[0].delta.content or "" async for part in stream])

        return await asyncio.gather(*map(ask, range(count)))


async def in_turn(server, count, at_once=16):
    """So many short requests, whole and streamed, and a few that are refused."""
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0) as client:
        numbers = iter(range(count))

        async def ask():
            for number in numbers:
                wanted = {"model": "tiny", "prompt": f"to {number}", "max_tokens": 1 + number % 7, "logprobs": 1}
                if number % 50 == 0:
                    with pytest.raises(openai.BadRequestError):
                        await client.completions.create(**wanted | {"max_tokens": 10_000})
                elif number % 2:
                    await client.completions.create(**wanted)
                else:
                    assert [part async for part in await client.completions.create(**wanted, stream=True)]

        await asyncio.gather(*(ask() for _ in range(at_once)))


def resident(server) -> int:
    """Bytes."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return 1024 * int(re.search(r"VmRSS:\s+(\d+)", status)[1])


@pytest.mark.long
def test_memory_does_not_grow_with_requests(server):
    asyncio.run(in_turn(server, 500))
    before = resident(server)
    asyncio.run(in_turn(server, 2000))
    assert resident(server) - before < 2000 * 8 * 1024


def run_of_page(page, pattern, key, server, program):
    """Run what the page prints between its ```, with the address, the key and the model of this server."""
    (code,) = re.findall(rf"```{pattern}```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    for printed, here in (("http://127.0.0.1:8000", server.url), key, ("chat-lora", "tiny")):
        assert printed in code
        code = code.replace(printed, here)
    done = subprocess.run([program, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("page", ["docs/serve.md", "docs/ru/serve.md"])
def test_the_program_of_the_page_gets_an_answer(server, page):
    assert run_of_page(page, r"python\n(.*?)", ('"-"', '"secret"'), server, sys.executable).strip()


@pytest.mark.skipif(which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("page", ["docs/serve.md", "docs/ru/serve.md"])
def test_the_curl_of_the_page_gets_an_answer(server, page):
    answered = run_of_page(page, r"sh\n(curl .*?)", ("KEY", "secret"), server, "bash")
    assert json.loads(answered)["choices"][0]["message"]["role"] == "assistant"


@pytest.mark.parametrize("stream", ["true", "false"])
def test_clients_that_vanish_free_their_places(server, stream):
    """More of them than there are places, each with an answer as long as the model can write."""
    address = urlsplit(server.url)
    body = (
        f'{{"messages": [{{"role": "user", "content": "of"}}], "seed": 1, "stream": {stream}, '
        '"logit_bias": {"0": -100, "1": -100, "2": -100}}'
    ).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {address.netloc}\r\nAuthorization: Bearer secret\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    written = 'artel_tokens_total{kind="answer"}'  # it is there from the first answer on
    for _ in range(4):
        before = figures(server).get(written)
        with ThreadPoolExecutor(20) as pool:
            sockets = list(pool.map(lambda _: socket.create_connection((address.hostname, address.port)), range(20)))
        for each in sockets:
            each.sendall(head.encode() + body)
        while figures(server).get(written) == before:
            pass
        for each in sockets:
            each.close()
        while figures(server)["artel_answers"]:
            pass
    answers = asyncio.run(many_at_once(server, 40))
    assert (len(answers), len(set(answers))) == (40, 1)


@pytest.mark.ci
def test_running_answers_finish_when_the_server_is_asked_to_end(folder):
    with server_of(folder) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="-") as client:
        long = QUESTION | {"max_tokens": 300, "logit_bias": {"0": -100, "1": -100, "2": -100}}
        stream = client.chat.completions.create(**long, stream=True, stream_options={"include_usage": True})
        next(iter(stream))
        server.process.send_signal(signal.SIGTERM)
        assert list(stream)[-1].usage.completion_tokens == 300
        assert server.process.wait(60) in (0, -signal.SIGTERM)
    assert "Traceback" not in "".join(server.said)


@pytest.mark.ci
def test_weights_that_are_written_over_end_it_with_the_files_name(tmp_path):
    folder = tiny_model(tmp_path)
    weights = folder / "model.safetensors"
    with server_of(folder) as server:
        os.truncate(weights, 0)
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client:
            with suppress(openai.APIConnectionError):
                client.chat.completions.create(**QUESTION)
            assert server.process.wait(60) == 1
        server.reader.join()
    assert f"{weights} became shorter" in "".join(server.said)


@pytest.mark.ci
def test_weights_that_are_written_over_at_the_same_length_are_noticed(tmp_path):
    folder = tiny_model(tmp_path)
    weights = folder / "model.safetensors"
    with server_of(folder) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client:
        other = folder / "other"
        other.write_bytes(weights.read_bytes())
        other.replace(weights)  # another file: what was loaded stays as it is
        assert client.chat.completions.create(**QUESTION).choices
        server.end()
    with server_of(folder) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client:
        assert client.chat.completions.create(**QUESTION).choices
        with weights.open("r+b") as file:
            file.seek(-1000, os.SEEK_END)
            file.write(bytes(1000))
        for _ in range(2):
            with pytest.raises(openai.InternalServerError, match="was overwritten") as refused:
                client.chat.completions.create(**QUESTION)
        assert (refused.value.status_code, refused.value.code) == (503, "weights_changed")
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(f"{server.url}/health")
        server.end()
        server.reader.join()
    assert "".join(server.said).count(f"tiny: {weights} was overwritten while the server was running") == 1


@pytest.mark.parametrize(
    ("arguments", "where", "said"),
    [
        (["--host", "0.0.0.0", "--port", "0"], "--host", "there is no key"),
        (["--host", "no.such.host.invalid"], "--host", "no.such.host.invalid"),
        (["--context", "1000000000", "--port", "0"], "--context", "use at most"),
        (["--precision", "fp64", "--port", "0"], "--precision", "bf16"),
        (["--engine", "vllm"], "--engine", "pip install vllm"),
        (["--engine", "llama"], "--engine", "artel or vllm"),
    ],
)
def test_what_it_cannot_do_is_one_message(folder, arguments, where, said):
    done = refused("serve", folder, *arguments)
    assert where in done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_that_is_taken_and_a_folder_without_a_model_are_said(folder, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = artel("serve", folder, "--port", str(port))
    assert (done.returncode, f"127.0.0.1:{port}" in done.stderr) == (2, True)
    (tmp_path / "empty").mkdir()
    done = refused("serve", "empty", "--port", "0")
    assert "empty" in done.stderr


def asked(server, model, key="-") -> str:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key) as client:
        assert [each.id for each in client.models.list()] == [model]
        return client.chat.completions.create(**QUESTION | {"model": model}).choices[0].message.content


def test_a_model_of_the_hub_is_served_and_a_hub_that_refuses_is_one_message(server, folder, tmp_path):
    hub = Hub()
    try:
        hub.repos["me/tiny"] = repo = Repo(private=False)
        repo.commit("main", "a model", {file.name: file.read_bytes() for file in folder.iterdir()})
        with server_of("me/tiny", **hub.environment(tmp_path / "hub")) as of_hub:
            assert asked(of_hub, "me/tiny") == asked(server, "tiny", "secret")
        for method in ("GET", "HEAD"):
            hub.refuse(method, "me/tiny", 403, "you may not")
        done = artel("serve", "me/tiny", "--port", "0", env=hub.environment(tmp_path / "other"))
    finally:
        hub.close()
    assert done.returncode == 2
    assert "me/tiny" in done.stderr
    assert "Traceback" not in done.stderr


def test_vllm_gets_its_arguments_and_what_it_cannot_limit_is_said_once(folder, tmp_path):
    """A program by its name that prints them: vLLM itself needs a GPU."""
    program = tmp_path / "vllm"
    program.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    program.chmod(0o755)
    environment = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    given = ("--queue", "3", "--timeout", "5", "--cors", "https://my.page")
    done = artel("serve", folder, "--engine", "vllm", *given, env=environment)
    arguments = done.stdout.splitlines()
    assert json.loads(arguments[arguments.index("--allowed-origins") + 1]) == ["https://my.page"]
    assert done.stderr.count("vLLM's server has no such limit") == 1
    assert "--queue, --timeout: " in done.stderr
