"""Loading a tokenizer from a folder or a hub id.

Code in a repository (`auto_map`) runs only if `model.trust_remote_code` names that repository. Code in another
repository never runs, even if this one refers to it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from artel.errors import InputError
from artel.storage import check_regular_in
from artel.storage.panics import hide_panics
from artel.tokens.tokenizer.fast_encoder import first_line
from artel.tokens.tokenizer.tokenizer import Tokenizer, mask_token

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

KEY = "model.trust_remote_code"
_ROLES = ("bos_token", "eos_token", "pad_token")
_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_MAX_IDS = 2**24  # sixty times the largest vocabularies
_TEST_TEXT = "a word, \U00010fff"  # with a character that no word-level vocabulary has
_MAX_TEST_TOKENS = 1200  # a hundred times its bytes

_TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "tokenizer.model", "vocab.txt", "spiece.model", _FILES[1])


def load_tokenizer(name: str, where: str = "tokenizer.from", *, runs_code: bool = False) -> Tokenizer:
    """Load a tokenizer from a folder (tokenizer.json, or vocab.json + merges.txt) or a hub id.

    Its own code runs only with `runs_code`. Raise InputError if there is no tokenizer, or if it cannot be loaded.
    """
    folder = Path(name)
    check_regular_in(folder)
    if folder.is_dir() and not any((folder / file).exists() for file in _TOKENIZER_FILES):
        raise _missing_tokenizer_error(where, folder)
    if not folder.is_dir() and (folder.exists() or name.startswith((".", "/", "~"))):
        raise InputError.at(where, f"{name} is not a folder", "use a folder with a tokenizer, or a hub id")
    try:
        with hide_panics():
            hf = _open_with_code(name) if runs_code else _open(name, folder)
    except (InputError, KeyboardInterrupt):
        raise
    except BaseException as error:  # from the hub, the file system, JSON or Rust, whose panics are BaseExceptions
        fix = trust_fix(name) if "trust_remote_code" in str(error) else _find_fix(folder)
        raise InputError.at(where, f"{name} cannot be opened: {first_line(error)}", fix) from None
    if not hasattr(hf, "backend_tokenizer"):
        raise InputError.at(where, f"{name} has no fast tokenizer", "convert it to tokenizer.json with transformers")
    tokenizer = Tokenizer(hf, where)
    if tokenizer.vocabulary > _MAX_IDS:  # Rust would abort the process when it lists all ids
        what = f"{name} has a token with the id {tokenizer.vocabulary - 1:,}; a model needs a row for each id below"
        raise InputError.at(where, what, f"write ids below {_MAX_IDS:,} into its tokenizer.json")
    try:
        with hide_panics():
            ids = tokenizer.exact_ids([_TEST_TEXT])[0]
            tokenizer.decode(ids)
            frame = tokenizer.frame(required=False)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        fix = "check that its vocabulary has the unknown token that it names, and the tokens of its post_processor"
        raise InputError.at(where, f"{name} cannot encode any text: {first_line(error)}", fix) from None
    invalid_ids = [token for token in (*frame.before, *frame.after) if token >= tokenizer.vocabulary]
    if invalid_ids:
        largest_id = tokenizer.vocabulary - 1
        what = f"{name} puts the id {invalid_ids[0]:,} around each text, but its largest id is {largest_id:,}"
        raise InputError.at(where, what, "write the ids of its own tokens into post_processor in its tokenizer.json")
    if not 0 < len(ids) <= _MAX_TEST_TOKENS:
        what = f"{name} makes {len(ids):,} tokens of {_TEST_TEXT!a}"
        raise InputError.at(where, what, "check its vocabulary, its normalizer and its post_processor")
    return tokenizer


def _missing_tokenizer_error(where: str, folder: Path) -> InputError:
    subject = "" if where == str(folder) else f"{folder} "  # `where` already names the folder
    gguf = min((file.name for file in folder.glob("*.gguf")), default=None)
    if gguf is None:
        fix = "it needs tokenizer.json, or vocab.json and merges.txt"
        return InputError.at(where, f"{subject}holds no tokenizer", fix)
    fix = f"use the model in Hugging Face's format, or run the file with llama.cpp: llama-cli -m {folder / gguf}"
    return InputError.at(where, f"{subject}holds no tokenizer, but {gguf}, which artel does not open", fix)


def _open(name: str, folder: Path) -> PreTrainedTokenizerFast:
    names = {file.name for file in folder.iterdir()} if folder.is_dir() else set()
    if {"tokenizer.json", "tokenizer_config.json"} <= names and "config.json" not in names:
        # AutoTokenizer imports torch to find the class. These files, which artel writes too, name it.
        class_name = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get("tokenizer_class")
        if class_name in ("PreTrainedTokenizerFast", "TokenizersBackend"):
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(name)
    from transformers import AutoTokenizer, GPT2Tokenizer, RobertaTokenizer

    if {"vocab.json", "merges.txt"} <= names and not names & {"tokenizer.json", "tokenizer_config.json"}:
        # Older folders (fairseq's RoBERTa, OpenAI's GPT-2) do not name the class, but the vocabulary tells: RoBERTa's
        # has <s> and </s>, GPT-2's only <|endoftext|>.
        words = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
        if {"<s>", "</s>"} <= words.keys() and not uses_gpt2_tokenizer(folder):
            return RobertaTokenizer.from_pretrained(name, mask_token=mask_token("<mask>"))
        hf = GPT2Tokenizer.from_pretrained(name)
    else:
        hf = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    roles = roles_by_config(hf, name)
    return type(hf).from_pretrained(name, **roles) if roles else hf


def _open_with_code(name: str) -> PreTrainedTokenizerFast:
    """Open a tokenizer with its own code, and return it without the code, so that saved files open everywhere."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    check_code_owner(get_tokenizer_config(name), name)
    hf = AutoTokenizer.from_pretrained(name, trust_remote_code=True)
    if not type(hf).__module__.startswith("transformers_modules.") or not hasattr(hf, "backend_tokenizer"):
        return hf
    return PreTrainedTokenizerFast(
        tokenizer_object=hf.backend_tokenizer, chat_template=hf.chat_template, **hf.special_tokens_map
    )


def _find_fix(folder: Path) -> str:
    if folder.is_dir():
        return "check its tokenizer.json, or vocab.json and merges.txt"
    offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
    return f"a hub id needs network access{offline}; use a folder, or download it first: hf download NAME"


def roles_by_config(hf: PreTrainedTokenizerFast, name: str) -> dict[str, str]:
    """Return the special tokens of config.json for tokenizers whose own files name none, such as ruGPT-3's.

    With only vocab.json and merges.txt, transformers takes the defaults of the class (GPT-2's <|endoftext|>) and adds
    them to the vocabulary as new tokens that the model never saw. Empty if the tokenizer's files name its end token, or
    config.json names none in the vocabulary.
    """
    vocabulary = hf.backend_tokenizer.get_vocab(with_added_tokens=False)
    added = {token for token in hf.all_special_tokens if token not in vocabulary}
    if hf.eos_token not in added or any(hf.eos_token in text for text in _read_config_files(name)):
        return {}
    from transformers import PreTrainedConfig

    try:
        ids: dict[str, Any] = PreTrainedConfig.get_config_dict(name)[0]
    except OSError:  # a tokenizer without a model
        return {}
    tokens = {token_id: token for token, token_id in vocabulary.items()}
    named_roles = {role: tokens[ids[f"{role}_id"]] for role in _ROLES if ids.get(f"{role}_id") in tokens}
    if "eos_token" not in named_roles:
        return {}
    roles = {role: named_roles.get(role, named_roles["eos_token"]) for role in ("bos_token", "eos_token")}
    if hf.unk_token in added:
        roles["unk_token"] = "<unk>" if "<unk>" in vocabulary else named_roles["eos_token"]
    return roles | ({"pad_token": named_roles["pad_token"]} if "pad_token" in named_roles else {})


def uses_gpt2_tokenizer(folder: Path) -> bool:
    """True if config.json names a model whose tokenizer in transformers is GPT-2's, like ruGPT-3's."""
    from transformers import PreTrainedConfig
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    if not (folder / "config.json").is_file():
        return False
    model_type = PreTrainedConfig.get_config_dict(str(folder))[0].get("model_type")
    return TOKENIZER_MAPPING_NAMES.get(model_type) == "GPT2Tokenizer"


def _read_config_files(name: str) -> list[str]:
    """Read the files of a tokenizer that may name special tokens, without its vocabulary."""
    from transformers.utils import cached_file

    files = (cached_file(name, file, _raise_exceptions_for_missing_entries=False) for file in _FILES)
    return [Path(file).read_text(encoding="utf-8") for file in files if file is not None]


def trust_fix(name: str) -> str:
    """Return the fix that makes the code of a repository run."""
    return f"read that code, and if you trust it set {KEY}: {name}"


def check_code_owner(values: dict[str, Any], name: str) -> None:
    """Raise InputError if a configuration of the repository `name` refers to code in another one."""
    for reference in _find_references(values.get("auto_map")):
        owner, dashes, _ = reference.partition("--")
        if dashes and owner != name:
            fix = "use that repository, or put code and model into one folder and set it in model.from"
            raise InputError.at(KEY, f"the code of {name} is in another repository, {owner}", fix)


def _find_references(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _find_references(item)
