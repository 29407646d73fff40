"""Named pipes and devices in place of files that a run reads: refused in words, where reading them would never end."""

import json
import os

import pytest

from artel.errors import InputError
from artel.models.loading.model_folder import read_config
from artel.preparing.run_mark import check_checkpoint_ownership, claim_folder
from artel.storage import lock
from artel.tokens import TokenStore, load_tokenizer
from artel.training.checkpoint.format import read_progress


def to_a_device(path):
    path.symlink_to("/dev/zero")


def locked(path):
    with lock(path):
        pass


@pytest.fixture(params=[(os.mkfifo, "a named pipe"), (to_a_device, "a device")], ids=["pipe", "device"])
def special(request):
    return request.param


@pytest.mark.parametrize(
    ("name", "read"),
    [("config.json", read_config), ("generation_config.json", read_config), ("model.safetensors", read_config),
     ("tokenizer.json", load_tokenizer), ("chat_template.jinja", load_tokenizer)],
)  # fmt: skip
def test_in_a_model_folder(tmp_path, special, name, read):
    make, kind = special
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / name).unlink(missing_ok=True)
    make(tmp_path / name)
    with pytest.raises(InputError, match=rf"{name}: is {kind}, not a regular file"):
        read(str(tmp_path))


def test_in_a_store_and_as_a_lock(tmp_path, special):
    make, kind = special
    for name, read in (("manifest.json", lambda path: TokenStore(path.parent)), (".lock", locked)):
        make(tmp_path / name)
        with pytest.raises(InputError, match=f"{name}: is {kind}, not a regular file"):
            read(tmp_path / name)


def test_in_a_checkpoint(tmp_path, special):
    make, kind = special
    claim_folder(tmp_path)
    step = tmp_path / "checkpoints" / "step-000000001"
    step.mkdir(parents=True)
    make(step / "state.json")
    with pytest.raises(InputError, match=f"state.json: is {kind}, not a regular file"):
        read_progress(step)
    check_checkpoint_ownership(tmp_path, [step])  # it names no other run


@pytest.mark.parametrize(
    ("change", "says"),
    [(lambda tree: tree["model"].update(vocab={}, merges=[]), "makes 0 tokens"),
     (lambda tree: tree.update(normalizer={"type": "Replace", "pattern": {"String": "o"}, "content": "xyz" * 9999}),
      r"makes \d+,\d+ tokens"),
     (lambda tree: tree.update(post_processor={
         "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<none>", "type_id": 0}}], "pair": [],
         "special_tokens": {}}), "cannot encode any text: no entry found for key")],
)  # fmt: skip
def test_a_tokenizer_that_makes_nothing_of_a_text_or_a_book_or_fails(tmp_path, tokenizer, change, says):
    tokenizer.save(tmp_path)
    file = tmp_path / "tokenizer.json"
    tree = json.loads(file.read_text())
    change(tree)
    file.write_text(json.dumps(tree))
    with pytest.raises(InputError, match=says):
        load_tokenizer(str(tmp_path))
