"""Nothing runs that was not asked for, nothing leads out of its folder, and no secret is written down."""

import base64
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import parse_qs, urlsplit

import orjson
import pytest
import torch
import xxhash
from transformers import GPT2Config, GPT2LMHeadModel

import artel as package
from artel.config import ModelConfig, Overrides, load_run, result_differences
from artel.errors import InputError, Problem
from artel.inference import open_model
from artel.models.loading.build import build_model
from artel.models.loading.check import check_model
from artel.models.loading.request import ModelRequest
from artel.secrets import hide_secrets
from artel.storage import checksum, fetch
from artel.tokens import Sample, StoreWriter, TokenStore
from artel.training.checkpoint.format import CheckpointContent, Progress, load_checkpoint, write_full
from artel.training.checkpoint.items import checkpoint_items
from support.chat_models import saved
from support.runs import write_run
from support.servers import QuietHandler, http_server
from support.waiting import LIMIT

TINY = {"vocab_size": 300, "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}


@pytest.fixture
def folder(tmp_path, tokenizer):
    """A small GPT-2 with a tokenizer."""
    return saved(tmp_path / "model", GPT2LMHeadModel(GPT2Config(**TINY)), tokenizer)


# Names in what is read


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/../../b", "..", ".", "", "a\\b", "a\0b", "a//b"])
def test_names_in_a_manifest_stay_in_the_store(tmp_path, name):
    writer = StoreWriter(tmp_path / "store", vocabulary=300)
    writer.add("train", [Sample(torch.arange(5).numpy())], 5, "a.txt:1")
    manifest = writer.close({})
    file = tmp_path / "store" / "manifest.json"
    TokenStore(tmp_path / "store").verify()
    for place in ("shard", "samples", "beside"):
        changed = json.loads(file.read_text())
        del changed["checksum"]
        shard = changed["parts"]["train"]["shards"][0]
        if place == "shard":
            shard["name"] = name
            shard["files"] = {f"{name}{key.removeprefix('00000')}": entry for key, entry in shard["files"].items()}
        elif place == "samples":
            shard["files"][name] = shard["files"]["00000.ends"]
        else:
            changed["files"][name] = shard["files"]["00000.ends"]
        changed["checksum"] = xxhash.xxh3_128_hexdigest(orjson.dumps(changed, option=orjson.OPT_SORT_KEYS))
        (tmp_path / "store" / "manifest.json").write_bytes(orjson.dumps(changed))
        with pytest.raises(InputError, match=r"manifest\.json: is invalid at"):
            TokenStore(tmp_path / "store")
        file.write_bytes(orjson.dumps(manifest, option=orjson.OPT_INDENT_2))


@pytest.mark.parametrize("name", ["../step-000000001/state.json", "/etc/hostname", "a/state.json"])
def test_names_in_a_checkpoint_stay_in_it(tmp_path, name):
    content = CheckpointContent(
        {"model": {"w": torch.zeros(2)}, "optimizer": {"w|m": torch.zeros(2)}}, Progress(step=2), "run: x\n"
    )
    path = tmp_path / "step-000000002"
    write_full(path, content)
    shutil.copytree(path, tmp_path / "step-000000001")
    target = path / name
    target.parent.mkdir(exist_ok=True)
    if not target.exists():
        shutil.copy(path / "state.json", target)
    sums = json.loads((path / "checksums.json").read_text())
    (path / "checksums.json").write_text(json.dumps({**sums, name: checksum(target)}))
    shutil.rmtree(tmp_path / "step-000000001")
    with pytest.raises(InputError, match="which it does not contain"):
        load_checkpoint(tmp_path, checkpoint_items(SimpleNamespace(saves_collectively=False)))


@pytest.mark.parametrize("place", ["index", "config"])
def test_weights_lie_beside_their_configuration(folder, tokenizer, place):
    (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
    (folder / "other.safetensors").write_bytes(b"")
    if place == "index":
        names = dict.fromkeys(GPT2LMHeadModel(GPT2Config(**TINY)).state_dict(), "../outside.safetensors")
        index = {"metadata": {}, "weight_map": names}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        change(folder, transformers_weights="../outside.safetensors")
    with pytest.raises(InputError, match="not a file next to"):
        check_model(ModelConfig.model_validate({"from": str(folder)}), "AutoModelForCausalLM")


# Pickles


class _Evil:
    """Unpickling this writes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("old", [False, True], ids=["zip", "of-2019"])
@pytest.mark.parametrize("decoy", [False, True], ids=["alone", "beside-safetensors"])
def test_a_pickle_with_code_is_not_run(folder, tokenizer, tmp_path, old, decoy):
    weights = GPT2LMHeadModel(GPT2Config(**TINY)).state_dict()
    evil = {**weights, "transformer.wte.weight": _Evil(tmp_path / "executed")}
    torch.save(evil, folder / "pytorch_model.bin", _use_new_zipfile_serialization=not old)
    (folder / "model.safetensors").unlink()
    if decoy:
        (folder / "other.safetensors").write_bytes(b"")
    model_config = ModelConfig.model_validate({"from": str(folder)})
    with pytest.raises(InputError, match=r"tensors only|cannot be loaded"):
        build_model(ModelRequest(model_config, "AutoModelForCausalLM", block=8, seed=0), tokenizer)
    assert not (tmp_path / "executed").exists()
    torch.load(folder / "pytorch_model.bin", weights_only=False)["transformer.wte.weight"].close()
    assert (tmp_path / "executed").exists()


def test_no_place_unpickles_more_than_tensors():
    import peft.utils.save_and_load
    import transformers.modeling_utils

    for file in Path(package.__file__).parent.rglob("*.py"):
        code = file.read_text(encoding="utf-8")
        assert not re.search(r"^\s*(import|from) (pickle|dill|joblib|shelve)\b", code, re.MULTILINE), file
        assert not re.search(r"allow_pickle=True|yaml\.(unsafe_|full_)?load\(", code), file
        calls = re.findall(r"torch\.load\((?:[^()]|\([^()]*\))*\)", code)
        assert len(calls) == code.count("torch.load("), file
        assert all("weights_only=True" in call for call in calls), file
    for loader in (transformers.modeling_utils.load_state_dict, peft.utils.save_and_load.torch_load):
        assert inspect.signature(loader).parameters["weights_only"].default is True


# Code of others

CONFIGURATION = """import os
from transformers import GPT2Config
open(os.environ["OWN_CODE_RAN"], "a").close()
class TinyConfig(GPT2Config):
    model_type = "tiny_own"
"""
MODELING = """from transformers import GPT2LMHeadModel
from .configuration_tiny import TinyConfig
class TinyLM(GPT2LMHeadModel):
    config_class = TinyConfig
"""


@pytest.fixture
def own_code(folder, tmp_path, monkeypatch):
    """The same model by code of its own, and the file that this code writes when it is run."""
    import transformers.dynamic_module_utils

    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setenv("OWN_CODE_RAN", str(tmp_path / "ran"))
    (folder / "configuration_tiny.py").write_text(CONFIGURATION)
    (folder / "modeling_tiny.py").write_text(MODELING)
    code = {"AutoConfig": "configuration_tiny.TinyConfig", "AutoModelForCausalLM": "modeling_tiny.TinyLM"}
    change(folder, model_type="tiny_own", architectures=["TinyLM"], auto_map=code)
    yield folder, tmp_path / "ran"
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        del sys.modules[name]


def change(folder, **values):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def own_run(tmp_path, folder, **model) -> Path:
    return write_run(
        tmp_path / "run.yaml",
        model={"config": None, "from": str(folder), **model},
        tokenizer={"train": None, "from": str(folder)},
        train={"steps": 2},
        data={"sources": [{"format": "dummy", "documents": 80}], "block": 16},
    )


def test_code_of_a_model_is_run_by_a_run_that_names_its_repository(own_code, tmp_path, command):
    folder, ran = own_code
    run = own_run(tmp_path, folder)
    status, _, said = command("train", run)
    assert (status, ran.exists()) == (2, False)
    assert f"model.trust_remote_code: {folder}" in said
    for other in ("someone/else", str(folder.parent)):
        status, _, said = command("train", run, f"model.trust_remote_code={other}")
        assert (status, ran.exists()) == (2, False)
        assert f"trust_remote_code is {other}" in said
    status, _, said = command("train", run, f"model.trust_remote_code={folder}")
    assert (status, ran.exists()) == (0, True), said
    assert type(open_model(str(tmp_path / "run")).model).__name__ == "TinyLM"


def test_code_that_lies_in_another_repository_is_not_run(own_code, tmp_path, command):
    folder, ran = own_code
    change(folder, auto_map={"AutoConfig": "someone/else--configuration_tiny.TinyConfig"})
    run = own_run(tmp_path, folder, trust_remote_code=str(folder))
    status, _, said = command("train", run)
    assert (status, ran.exists()) == (2, False)
    assert "is in another repository, someone/else" in said


def test_code_that_is_not_needed_is_not_run(own_code, tokenizer):
    folder, ran = own_code
    change(folder, model_type="gpt2")
    model_config = ModelConfig.model_validate({"from": str(folder)})
    model = build_model(ModelRequest(model_config, "AutoModelForCausalLM", block=8, seed=0), tokenizer).model
    assert (type(model).__name__, ran.exists()) == ("GPT2LMHeadModel", False)


# Secrets

PASSWORD, TOKENS = "pass-5f3a", ("token-9c1b", "token-77e0")


@pytest.fixture
def guarded():
    """The address (host:port) of a server that gives a text to who has the password and one of the tokens."""

    class Handler(QuietHandler):
        def do_GET(self):
            asked = urlsplit(self.path)
            given = base64.b64decode(self.headers.get("Authorization", "").removeprefix("Basic ")).decode()
            right = given == f"reader:{PASSWORD}" and parse_qs(asked.query).get("token", [""])[0] in TOKENS
            body = "".join(json.dumps({"text": f"text {n} of them"}) + "\n" for n in range(200)).encode()
            self.send_response(200 if right and asked.path == "/a.jsonl" else 403)
            self.send_header("CheckpointContent-Length", str(len(body) if right else 0))
            self.end_headers()
            self.wfile.write(body if right else b"")

    with http_server(Handler) as address:
        yield address.removeprefix("http://")


def test_secrets_in_addresses_are_written_nowhere(guarded, tmp_path, monkeypatch, command):
    monkeypatch.setenv("ARTEL_CACHE", str(tmp_path / "cache"))
    addresses = [f"http://reader:{PASSWORD}@{guarded}/a.jsonl?token={token}&part=1" for token in TOKENS]
    source = {"path": addresses[0]}
    run = write_run(
        tmp_path / "run.yaml", data={"sources": [source]}, train={"steps": 2}, tokenizer={"train": {"vocab": 280}}
    )
    status, _, said = command("train", run)
    assert status == 0, said
    assert "write ${NAME} instead" in said
    run.unlink()
    for place in ("run", "stores", "cache"):
        assert (tmp_path / place).is_dir()
        for file in (tmp_path / place).rglob("*"):
            content = file.read_bytes() if file.is_file() else b""
            assert not any(secret.encode() in content for secret in (PASSWORD, *TOKENS)), file
    assert not any(secret in said for secret in (PASSWORD, *TOKENS))
    before = load_run(str(tmp_path / "run"))
    hidden = f"http://reader:***@{guarded}/a.jsonl?token=***&part=1"
    assert before.data.sources[0].path == [hidden]
    assert hidden in json.loads((tmp_path / "run" / "ledger.json").read_text())["sets"]
    overrides = [f"data.sources.0.path={addresses[1]}"]
    assert not result_differences(before, load_run(str(tmp_path / "run"), Overrides.parse(overrides)))
    with pytest.raises(InputError, match="its secret was not saved"):
        fetch(hidden, tmp_path / "other")


def test_secrets_come_from_the_environment(guarded, tmp_path, monkeypatch):
    address = f"http://reader:${{TEXT_PASSWORD}}@{guarded}/a.jsonl?token=${{TEXT_TOKEN}}"
    monkeypatch.setenv("TEXT_PASSWORD", PASSWORD)
    with pytest.raises(InputError, match="there is no TEXT_TOKEN in the environment"):
        fetch(address, tmp_path)
    monkeypatch.setenv("TEXT_TOKEN", "wrong")
    with pytest.raises(InputError, match="403") as refused:
        fetch(address, tmp_path)
    assert PASSWORD not in str(refused.value)
    monkeypatch.setenv("TEXT_TOKEN", TOKENS[0])
    assert fetch(address, tmp_path).path.read_bytes().count(b"\n") == 200
    monkeypatch.delenv("TEXT_TOKEN")
    assert fetch(address, tmp_path).path.is_file()  # what is there needs no secret
    assert hide_secrets(address) == address


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:word@host/a?b=1", "https://me:***@host/a?b=1"),
        ("https://tokenastheuser@host/a", "https://***@host/a"),
        ("s3://bucket/a@b.txt", "s3://bucket/a@b.txt"),
        ("https://h/a?X-Amz-Signature=ab12&X-Amz-Date=3", "https://h/a?X-Amz-Signature=***&X-Amz-Date=3"),
        ("https://h/a?sv=1&sig=a%2Bb&se=2", "https://h/a?sv=1&sig=***&se=2"),
        ("https://h/a?author=x&api_key=y", "https://h/a?author=x&api_key=***"),
        ("log in with hf_" + "a1B2" * 8 + " please", "log in with *** please"),
        ("Authorization: Bearer abcdefgh.12345", "Authorization: Bearer ***"),
        ("texts/hf_data/key=3.txt", "texts/hf_data/key=3.txt"),
    ],
)
def test_what_counts_as_a_secret(text, shown):
    assert hide_secrets(text) == shown
    assert hide_secrets({"a": [text, 3]}) == {"a": [shown, 3]}
    assert text in (shown, "") or text not in str(Problem(text, text, text))


@pytest.mark.ci
@pytest.mark.processes
@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_no_library_downloads_kernels_or_says_that_it_lacks_one(tmp_path):
    """bitsandbytes asks the package `kernels` for code of a hub while it is imported, on processors with bf16."""
    (tmp_path / "kernels.py").write_text("import pathlib\npathlib.Path('loaded').touch()\n")
    script = (
        "from artel.launching.quiet_libraries import quiet_libraries\n"
        "quiet_libraries()\n"
        "import logging\n"
        "import bitsandbytes\n"
        "from transformers.utils import is_kernels_available\n"
        "assert not is_kernels_available()\n"
        "try:\n"
        "    import kernels\n"
        "except ImportError:\n"
        "    print('not there')\n"
        "print(logging.getLogger('bitsandbytes.backends.cpu.ops').isEnabledFor(logging.WARNING))\n"
    )
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "not there\nFalse\n"
    assert "kernels" not in done.stderr
    assert not (tmp_path / "loaded").exists()
