"""Rounds whose answers a server writes (`policy.engine`): weights arrive, ids stay ids, differences are corrected."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import yaml

from artel.config.schema.engine import EngineConfig
from artel.objectives.policy.config import PolicyConfig
from artel.objectives.policy.losses import corrections
from artel.objectives.policy.policy_objective import PolicyOptimization
from artel.objectives.rollouts import Rollout, Segment
from artel.storage import ApiFailure, request_json
from artel.training.remote_engine import RemoteEngine
from support.runs import (
    TINY,
    artel,
    kill,
    losses,
    merged,
    metrics,
    read_rollouts,
    refused,
    start,
    succeed,
    torchrun,
    write_run,
)
from support.servers import QuietHandler, http_server
from support.serving import error_of, server_of, tiny_model
from support.waiting import wait_until

httpx = pytest.importorskip("httpx")

VOWELS = """
def vowels(completion):
    return sum(letter in "aeiou" for letter in completion) / 10
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"Number {number} is written as"} for number in range(60)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rewards.py").write_text(VOWELS)
    succeed("train", write_run(tmp_path / "base.yaml", merged(TINY, {"data": {"block": 48}, "train": {"steps": 1}})))
    return tmp_path


def remote_run(url, name="run", model=None, **changes):
    """A run that trains `base` further. Its steps are long, so that answers of earlier weights would be noticed."""
    run = {
        "run": name,
        "data": {"sources": [{"path": "prompts.jsonl", "format": "prompts"}], "validation": 0, "block": 48},
        "model": {"from": "base/model", **(model or {})},
        "objective": "policy",
        "policy": {"answers": 4, "new_tokens": 10, "rewards": ["rewards.py:vowels"], "engine": url},
        "train": {**TINY["train"], "batch": 8, "steps": 3, "learning_rate": 1e-2, "warmup": 0},
        "log": {"every": 1},
        "checkpoint": {"every": 1},
    }
    Path(f"{name}.yaml").write_text(yaml.safe_dump(merged(run, changes)))
    return f"{name}.yaml"


def lines_of(name):
    return [line for line in metrics(Path(name)) if "loss" in line]


def check_rounds(name, steps=3):
    """The answers are those of the present weights, each prompt has all of them, and none is missing."""
    lines = lines_of(name)
    assert len(lines) == steps
    for line in lines:
        assert line["mismatch"] <= 1e-5
        assert line["engine_mismatch"] <= 1e-5
        assert line["engine_limited"] == 0
    rollouts = [rollout for lines in read_rollouts(Path(name)) for rollout in lines]
    assert [(rollout["number"], rollout["answer"]) for rollout in rollouts] == [
        (number, answer) for number in range(8 * steps) for answer in range(4)
    ]
    assert all(len(rollout["engine_log_probs"]) == len(rollout["log_probs"]) for rollout in rollouts)
    return rollouts


@pytest.mark.ci
@pytest.mark.parametrize(
    "model",
    [{}, {"lora": {"rank": 4}}, pytest.param({"lora": {"rank": 4, "save": ["ln_f"]}}, marks=pytest.mark.long)],
    ids=["weights", "adapter", "adapter-and-module"],
)
def test_a_server_writes_with_the_weights_of_the_run(folder, model):
    with server_of("base/model", "--reload-from", "run") as server:
        succeed("train", remote_run(server.url, model=model))
    rollouts = check_rounds("run")
    assert len({rollout["text"] for rollout in rollouts}) > len(rollouts) / 2
    assert not (folder / "run" / "engine").exists()


@pytest.mark.slow
@pytest.mark.long
def test_weights_that_do_not_arrive_would_be_noticed(folder):
    Path("skip_load.py").write_text(
        "from artel.training.remote_engine import RemoteEngine\nRemoteEngine.load = lambda self: None\n"
    )
    with server_of("base/model", "--reload-from", "run") as server:
        succeed("train", remote_run(server.url, plugins=["skip_load"]), env={"PYTHONPATH": str(folder)})
    mismatches = [line["engine_mismatch"] for line in lines_of("run")]
    assert mismatches[0] <= 1e-5
    assert mismatches[-1] > 1e-3


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("data", ["ddp", "fsdp"])
def test_two_processes_share_a_server(folder, data):
    with server_of("base/model", "--reload-from", str(folder)) as server:
        done = torchrun(2, "-m", "artel", "train", remote_run(server.url, parallel={"data": data}))
        assert done.returncode == 0, done.stderr
        succeed("train", remote_run(server.url, "one"))
    check_rounds("run")
    for step, (loss, norm) in losses(Path("one")).items():
        assert (loss, norm) == pytest.approx(losses(Path("run"))[step], rel=1e-3, abs=1e-5)


@pytest.mark.slow
@pytest.mark.long
def test_a_killed_run_goes_on_with_the_server(folder):
    with server_of("base/model", "--reload-from", "run") as server:
        process = start("train", remote_run(server.url))
        file = folder / "run" / "rollouts" / "000001.jsonl.zst"
        wait_until(lambda: file.exists() or process.poll() is not None, lambda: "a round")
        kill(process)
        assert process.returncode not in (0, None)
        before = read_rollouts(Path("run"))
        succeed("train", "run.yaml")
    check_rounds("run")
    assert read_rollouts(Path("run"))[: len(before)] == before


class Silent(QuietHandler):
    """Answers like a server that knows nothing of token ids."""

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        reply = json.dumps({"choices": [{"index": 0, "text": "a", "finish_reason": "length"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)


def test_a_server_without_token_ids_is_refused(folder):
    with http_server(Silent) as url:
        done = refused("train", remote_run(url))
    assert "policy.engine" in done.stderr
    assert "returns no token ids" in done.stderr


def test_a_server_that_is_not_there_is_refused_before_the_work(folder):
    done = refused("train", remote_run("http://127.0.0.1:9"))
    assert "http://127.0.0.1:9 does not answer" in done.stderr
    assert "Connection refused" in done.stderr


def test_mistakes_in_the_run_file(folder):
    done = refused("config", "check", remote_run("127.0.0.1:9"))
    assert "policy.engine.url" in done.stderr
    done = refused("config", "check", remote_run("http://127.0.0.1:9", policy={"temperature": 0.7}))
    assert "write temperature: 1" in done.stderr


def test_a_server_that_may_not_reload_is_reported(folder):
    with server_of("base/model") as server:
        done = artel("train", remote_run(server.url))
    assert done.returncode == 1, done.stderr
    assert "did not load the weights" in done.stderr
    assert "--reload-from" in done.stderr


def test_the_server_opens_only_what_is_in_its_folder(folder, tmp_path):
    (tmp_path / "allowed").mkdir()
    other = tiny_model(tmp_path / "elsewhere")
    with (
        server_of("base/model", "--reload-from", "allowed") as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        call = {"method": "reload_weights", "kwargs": {"weights_path": str(other)}}
        assert error_of(client.post("/collective_rpc", json=call))[0] == 403
        Path("allowed/link").symlink_to(other)
        for path in ("allowed/link", "allowed/none", "some-owner/a-model-of-the-hub", "allowed/\0"):
            call["kwargs"]["weights_path"] = path
            assert error_of(client.post("/collective_rpc", json=call))[0] == 403
        assert client.post("/collective_rpc", json={**call, "method": "sleep"}).status_code == 422
        adapter = {"lora_name": "a", "lora_path": str(other)}
        assert error_of(client.post("/v1/load_lora_adapter", json=adapter))[0] == 403
        assert error_of(client.post("/v1/unload_lora_adapter", json={"lora_name": "a"}))[0] == 404
        adapter["lora_path"] = "allowed"
        assert error_of(client.post("/v1/load_lora_adapter", json=adapter))[0] == 400


def test_ids_of_a_completion(folder):
    """They are those of the prompt and of the answer, with the token that ended it and its log-probability."""
    with server_of("base/model") as server, httpx.Client(base_url=server.url, timeout=60) as client:
        body = {"prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0, "logprobs": 0, "return_token_ids": True}
        whole = client.post("/v1/completions", json=body).json()["choices"][0]
        assert whole["prompt_token_ids"] == [5, 6, 7]
        assert len(whole["token_ids"]) == len(whole["logprobs"]["token_logprobs"]) == 8
        last = whole["token_ids"][4]
        first = whole["token_ids"].index(last)
        ended = client.post("/v1/completions", json={**body, "stop_token_ids": [last]}).json()["choices"][0]
        assert ended["finish_reason"] == "stop"
        assert ended["token_ids"] == whole["token_ids"][: first + 1]
        assert len(ended["logprobs"]["token_logprobs"]) == first + 1
        assert ended["text"] == "".join(whole["logprobs"]["tokens"][:first])
        assert error_of(client.post("/v1/completions", json={**body, "stream": True}))[:2] == (400, "return_token_ids")


class LikeVllm(QuietHandler):
    """Replies as vLLM does: with plain text to adapters, with nothing to a reset; and it is busy at first."""

    paths: ClassVar[list[str]] = []

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.paths.append(self.path)
        reply = b"Success: LoRA adapter added" if "adapter" in self.path else b""
        self.send_response(503 if len(self.paths) == 1 else 200)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)


def test_replies_of_vllm_that_are_not_json():
    with http_server(LikeVllm) as url:
        engine = RemoteEngine(EngineConfig(url=f"{url}/v1/"), Path("unused"), None, None, None)
        for path in ("/v1/load_lora_adapter", "/reset_prefix_cache"):
            engine._call(path, {})
        engine._unload("artel-1")
        assert LikeVllm.paths == ["/v1/load_lora_adapter"] * 2 + ["/reset_prefix_cache", "/v1/unload_lora_adapter"]
        with pytest.raises(ApiFailure):
            request_json(f"{url}/reset_prefix_cache", {}, timeout=10)


def test_the_model_in_training_counts_more_where_it_finds_tokens_likelier():
    """The factor is p(training) / p(server), over the tokens of all segments of an answer."""
    segments = [Segment([1], [2, 3], [-1.0, None], [-2.0]), Segment([1, 2, 3], [4], [-1.0], [-1.5])]
    first, *restarts = segments
    rollout = Rollout(
        number=0, index=0, epoch=0, answer=0, attempt=0, seed=0, prompt_ids=first.prompt_ids, ids=first.ids,
        log_probs=first.log_probs, engine_log_probs=first.engine_log_probs, text="", cut_off=False, rewards={},
        reward=1.0, failures={}, restarts=restarts,
    )  # fmt: skip
    for kind, expected in {"token_truncate": [np.exp(1), np.exp(0.5)], "sequence_mask": [0.0, 0.0]}.items():
        engine = EngineConfig(url="http://a", correction=kind)
        factors, _ = PolicyOptimization._corrections(SimpleNamespace(_policy=PolicyConfig(engine=engine)), rollout)
        assert factors.tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("kind", "expected", "limited"),
    [
        ("token_truncate", [1.0, 2.0, 3.0], [False, False, True]),
        ("token_mask", [1.0, 2.0, 0.0], [False, False, True]),
        ("sequence_truncate", [3.0] * 3, [True] * 3),
        ("sequence_mask", [0.0] * 3, [True] * 3),
    ],
)
def test_corrections_by_hand(kind, expected, limited):
    factors, is_limited = corrections(np.log([1.0, 2.0, 4.0]), kind, 3.0)
    assert factors.tolist() == pytest.approx(expected)
    assert is_limited.tolist() == limited
    assert corrections(np.log([1.0, 2.0]), "sequence_mask", 3.0)[0].tolist() == pytest.approx([2.0, 2.0])
    assert corrections(np.empty(0), kind, 3.0)[0].shape == (0,)
