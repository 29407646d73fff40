"""`artel push` to a hub on this machine: what comes back by `from_pretrained` is the model, bit for bit."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

import artel as api
from artel.errors import InputError
from artel.inference.push.hub import Hub as HubClient
from support.hub import TOKEN, ByXet, Hub
from support.messages import logged
from support.runs import ENVIRONMENT, artel, succeed, write_run
from support.servers import answering, http_server
from support.sockets import free_ports
from support.waiting import wait_until

pytestmark = pytest.mark.processes

BY_XET = ("model.safetensors", "tokenizer.json")

# For each model of the hub: its logits by transformers, beside those of a folder here.
COMPARE = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer

def logits(name, **revision):
    tokenizer = AutoTokenizer.from_pretrained(name, **revision)
    inputs = tokenizer("Say it again, and again.", return_tensors="pt")
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(name, **revision)(**inputs).logits

for repo, revision, folder in json.loads(sys.argv[1]):
    assert torch.equal(logits(repo, revision=revision), logits(folder)), (repo, revision)
first = [logits(repo, revision=revision) for repo, revision, _ in json.loads(sys.argv[1])]
assert not any(torch.equal(first[0], other) for other in first[1:])
print(len(first), "are equal")
"""


@pytest.fixture
def hub():
    hub = Hub()
    yield hub
    hub.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """A run with checkpoints, and adapters for its model."""
    folder = tmp_path_factory.mktemp("runs")
    sources = [{"format": "dummy", "documents": 100}]
    base = write_run(folder / "base.yaml", data={"sources": sources}, checkpoint={"every": 2, "keep": 5})
    start = {"from": str(folder / "base" / "model")}
    adapted = start | {"config": None, "lora": {"rank": 4}}
    lora = write_run(folder / "lora.yaml", data={"sources": sources}, model=adapted, tokenizer=start | {"train": None})
    for run in (base, lora):
        succeed("train", run)
    return folder


def push(hub: Hub, *arguments, status: int = 0, **environment):
    done = artel("push", *arguments, env={**hub.environment(Path.cwd() / "hub-cache"), **environment})
    assert done.returncode == status, done.stderr
    assert TOKEN not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def compared(hub: Hub, *models) -> str:
    environment = {**ENVIRONMENT, **hub.environment(Path.cwd() / "other-cache")}
    command = [sys.executable, "-c", COMPARE, json.dumps(models)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_comes_back_gives_the_same_logits_bit_for_bit(runs, hub):
    """A whole model in parts, an adapter over it, and the model of an earlier step on a branch."""
    pushed = json.loads(push(hub, runs / "base", "tiny", "--license", "apache-2.0", "--json").stdout)
    assert (pushed["repo"], pushed["revision"], pushed["private"]) == ("me/tiny", "main", True)
    assert pushed["url"] == f"{hub.address}/me/tiny"
    assert hub.repos["me/tiny"].private
    assert sum("/" in part for part in hub.sent) > 1  # model.safetensors came in parts
    push(hub, runs / "lora", "me/lora", "--base-model", "me/tiny", "--public")
    assert not hub.repos["me/lora"].private
    step = push(hub, runs / "base", "me/tiny", "--step", 2)
    assert f"{hub.address}/me/tiny/tree/step-2" in step.stderr
    tiny = hub.repos["me/tiny"]
    assert set(tiny.branches) == {"main", "step-2"}
    assert tiny.commits[tiny.branches["step-2"]][0] == "After two steps"
    assert pushed["files"] == {name: len(data) for name, data in hub.files("me/tiny").items() if name[0] != "."}
    assert not list(runs.glob("base/.push*"))

    succeed("push", runs / "base", "me/tiny", "--step", 2, "--dry-run", "step-2")
    of_main = [
        (f"me/{repo}", "main", str(runs / name / "model")) for repo, name in (("tiny", "base"), ("lora", "lora"))
    ]
    equal = compared(hub, *of_main, ("me/tiny", "step-2", "step-2"))
    assert equal == "3 are equal\n"
    card = ModelCard(hub.files("me/tiny")["README.md"].decode())
    assert (card.data.license, card.data.model_name) == ("apache-2.0", "tiny")
    assert {result.metric_type for result in card.data.eval_results} >= {"loss", "perplexity"}


def test_by_xet_it_is_the_same(runs, tmp_path):
    """As the hub takes large files from who has hf_xet: what hf_xet keeps of them is what comes back."""
    hf_xet = pytest.importorskip("hf_xet")
    (tmp_path / "xet").mkdir()
    hub = Hub(xet=tmp_path / "xet")
    push(hub, runs / "base", "me/tiny")
    assert not hub.sent
    assert {name for name, data in hub.files("me/tiny").items() if isinstance(data, ByXet)} == {*BY_XET}
    files = [runs / "base" / "model" / name for name in BY_XET]
    for file, info in zip(files, hf_xet.hash_files(list(map(str, files))), strict=True):
        hub.xet_hashes[hashlib.sha256(file.read_bytes()).hexdigest()] = (info.hash, file.stat().st_size)
    assert compared(hub, ("me/tiny", "main", str(runs / "base" / "model"))) == "1 are equal\n"
    assert "nothing has changed" in push(hub, runs / "base", "me/tiny").stderr
    hub.close()


def test_an_upload_that_was_cut_goes_on_where_it_ended(runs, hub):
    """artel is killed while the hub has one of two large files whole, and the other in part."""
    model, words = ((runs / "base" / "model" / name).read_bytes() for name in ("model.safetensors", "tokenizer.json"))
    of_model, of_words = (hashlib.sha256(data).hexdigest() for data in (model, words))
    hub.hold(of_model, 2)
    environment = {**ENVIRONMENT, **hub.environment(Path.cwd() / "hub-cache")}
    command = [sys.executable, "-m", "artel", "push", str(runs / "base"), "me/tiny"]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: hub.held.is_set() and of_words in hub.objects, lambda: f"{hub.sent} are sent")
    finally:
        process.kill()
        process.wait()
    hub.free.set()
    assert "model.safetensors" not in hub.files("me/tiny")  # a commit is whole or absent
    hub.hold("", 0)
    hub.free.set()
    push(hub, runs / "base", "me/tiny")
    assert hub.files("me/tiny")["model.safetensors"] == model
    assert hub.files("me/tiny")["tokenizer.json"] == words
    assert hub.sent[of_words] == 1
    assert not list(runs.glob("base/.push*"))  # what the killed one left is removed

    commits = len(hub.repos["me/tiny"].commits)
    again = push(hub, runs / "base", "me/tiny")
    assert "nothing has changed" in again.stderr
    assert (len(hub.repos["me/tiny"].commits), hub.sent[of_words]) == (commits, 1)


def test_weights_of_an_earlier_model_are_removed_and_other_files_stay(runs, hub):
    push(hub, runs / "base", "me/tiny")
    repo = hub.repos["me/tiny"]
    more = {"model-00001-of-00002.safetensors": b"old", "pytorch_model.bin": b"old", "LICENSE": b"mine",
            "onnx/model.safetensors": b"mine"}  # fmt: skip
    repo.commit("main", "by hand", {**hub.files("me/tiny"), **more})
    told = push(hub, runs / "base", "me/tiny").stderr
    removed = "model-00001-of-00002.safetensors, pytorch_model.bin"
    assert f"removed from the hub, since they belong to an earlier model: {removed}" in told
    assert {"LICENSE", "onnx/model.safetensors", "model.safetensors"} <= set(hub.files("me/tiny"))
    assert not {"model-00001-of-00002.safetensors", "pytorch_model.bin"} & set(hub.files("me/tiny"))
    said = push(hub, runs / "base", "me/tiny", "--public", status=2).stderr
    assert "me/tiny: already exists and is private" in said


# A hub that answers one request of each push with an error; what artel raises.
REFUSE = """
import json, os, sys
from pathlib import Path
from support.hub import Hub

hub = Hub()
os.environ |= hub.environment(Path("hub-cache"))
import artel

said = []
for method, path, status in json.loads(sys.argv[2]):
    hub.refusals.clear()
    hub.refuse(method, path, status, "no, for a test")
    try:
        artel.push(sys.argv[1], "me/tiny")
    except artel.ArtelError as error:
        said.append([type(error).__name__, str(error)])
print(json.dumps(said))
"""
REFUSALS = {
    ("GET", "whoami", 401): ("InputError", "the hub does not accept the token (401): "),
    ("GET", "whoami", 503): ("WorkError", "the hub failed (503): "),
    ("GET", "whoami", 429): ("WorkError", "too many requests to the hub (429): "),
    ("POST", "repos/create", 403): ("InputError", "me/tiny: the token has no write access there (403): no, for a test"),
    ("POST", "preupload", 404): ("InputError", "me/tiny: the hub has no such repository or revision (404)"),
    ("POST", "lfs/objects/batch", 403): ("InputError", "me/tiny: the token has no write access there (403)"),
    ("PUT", "lfs", 403): ("InputError", "me/tiny: the token has no write access there (403)"),
    ("POST", "commit", 409): ("WorkError", "me/tiny: the repository is being changed by another process (409)"),
    ("POST", "commit", 500): ("WorkError", "me/tiny: the hub failed (500): no, for a test"),
    ("POST", "commit", 418): ("InputError", "me/tiny: the hub rejected the upload (418): no, for a test"),
}


def test_a_hub_that_refuses(runs):
    command = [sys.executable, "-c", REFUSE, str(runs / "base"), json.dumps(list(REFUSALS))]
    places = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(command, env={**ENVIRONMENT, "PYTHONPATH": places}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for (kind, said), (expected, start) in zip(json.loads(done.stdout), REFUSALS.values(), strict=True):
        assert (kind, start in said) == (expected, True), said


def test_no_token_a_token_that_reads_and_no_network(runs, hub):
    def first(status, **environment):
        return push(hub, runs / "base", "me/tiny", status=status, **environment).stderr.splitlines()[0]

    assert first(2, HF_TOKEN="") == f"artel: {hub.address}: there is no token for the hub"
    hub.role = "read"
    assert first(2) == f"artel: {hub.address}: the token of me has only read access"
    address = f"http://127.0.0.1:{free_ports(1)[0]}"
    assert first(1, HF_ENDPOINT=address).startswith(f"artel: {address}: the hub cannot be reached: ")


def test_a_stored_login_is_taken_and_a_card_that_the_hub_refuses(runs, hub):
    cache = Path("hub-cache")
    cache.mkdir()
    (cache / "token").write_text(TOKEN)
    said = push(hub, runs / "base", "me/tiny", "--license", "no-such-licence", status=2, HF_TOKEN="").stderr
    assert '"license" must be one of [apache-2.0, …]' in said
    assert "model.safetensors" not in hub.files("me/tiny")


@pytest.mark.parametrize("answer", [b"{}", b"[]", b'"x"', b"null", b"<html></html>", b'{"name": "me", "auth": 3}'])
def test_a_server_that_is_no_hub_is_told_to_be_none(monkeypatch, answer):
    with http_server(answering(200, answer)) as address:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        with pytest.raises(InputError, match=f"{address} is not a Hugging Face hub") as raised:
            HubClient()
        assert "HF_ENDPOINT" in raised.value.problems[0].fix


def test_links_in_the_model_of_a_run_are_not_followed(runs):
    shutil.copytree(runs / "base", "run", symlinks=True)
    Path("secret").write_text("my token")
    Path("run/model/README.md").symlink_to(Path("secret").absolute())
    said = logged()
    api.push("run", "me/tiny", dry_run="out")
    assert "my token" not in Path("out/README.md").read_text()
    assert any("left out" in line and "README.md" in line for line in said)
    Path("run/model/tokenizer.json").unlink()
    Path("run/model/tokenizer.json").symlink_to(Path("secret").absolute())
    with pytest.raises(InputError, match=r"tokenizer.json: is a symbolic link, but only files are uploaded"):
        api.push("run", "me/tiny", dry_run="other")
    assert not Path("other").exists()
