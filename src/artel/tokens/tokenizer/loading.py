"""Loading a tokenizer from a folder or a hub id."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from artel.errors import InputError
from artel.storage import check_regular_in
from artel.storage.panics import hide_panics
from artel.tokens.tokenizer.missing_roles import is_of_gpt2, roles_by_config
from artel.tokens.tokenizer.remote_code import check_whose, remedy
from artel.tokens.tokenizer.tokenizer import Tokenizer, first_line, mask_token

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_MAX_IDS = 2**24  # sixty times the largest vocabularies
_TEST_TEXT = "a word, \U00010fff"  # with a character that no vocabulary of words has
_MAX_TEST_TOKENS = 1200  # a hundred times its bytes

_TOKENIZER_FILES = (
    "tokenizer.json",
    "vocab.json",
    "tokenizer.model",
    "vocab.txt",
    "spiece.model",
    "tokenizer_config.json",
)


def load_tokenizer(name: str, where: str = "tokenizer.from", *, runs_code: bool = False) -> Tokenizer:
    """Load a tokenizer from a folder (tokenizer.json, or vocab.json + merges.txt) or a hub id.

    Its own code runs only with `runs_code`. Raises InputError where there is no tokenizer, no fast form of it, or no
    end token.
    """
    folder = Path(name)
    check_regular_in(folder)
    if folder.is_dir() and not any((folder / file).exists() for file in _TOKENIZER_FILES):
        raise _no_tokenizer(where, folder)
    if not folder.is_dir() and (folder.exists() or name.startswith((".", "/", "~"))):
        raise InputError.at(where, f"{name} is not a folder", "give a folder with a tokenizer, or a hub id")
    try:
        with hide_panics():
            hf = _open_own(name) if runs_code else _open(name, folder)
    except (InputError, KeyboardInterrupt):
        raise
    except (
        BaseException
    ) as error:  # the hub, the file system, JSON and Rust raise their own (a panic is a BaseException)
        fix = remedy(name) if "trust_remote_code" in str(error) else _remedy(folder)
        raise InputError.at(where, f"{name} cannot be opened: {first_line(error)}", fix) from None
    if not hasattr(hf, "backend_tokenizer"):
        raise InputError.at(where, f"{name} has no fast tokenizer", "convert it to tokenizer.json with transformers")
    tokenizer = Tokenizer(hf, where)
    if tokenizer.vocabulary > _MAX_IDS:  # Rust would end the process when it lists all ids up to it
        what = f"{name} has a token with the id {tokenizer.vocabulary - 1:,}; a model needs a row for each id below"
        raise InputError.at(where, what, f"write ids below {_MAX_IDS:,} into its tokenizer.json")
    try:
        ids = tokenizer.exact_ids([_TEST_TEXT])[0]
        tokenizer.decode(ids)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        fix = "check that its vocabulary has the unknown token that it names"
        raise InputError.at(where, f"{name} cannot encode any text: {first_line(error)}", fix) from None
    frame = tokenizer.frame(needed=False)
    beyond = [token for token in (*frame.before, *frame.after) if token >= tokenizer.vocabulary]
    if beyond:
        what = f"{name} puts the id {beyond[0]:,} around each text, and its largest id is {tokenizer.vocabulary - 1:,}"
        raise InputError.at(where, what, "write the ids of its own tokens into post_processor in its tokenizer.json")
    if not 0 < len(ids) <= _MAX_TEST_TOKENS:
        what = f"{name} makes {len(ids):,} tokens of {_TEST_TEXT!a}"
        raise InputError.at(where, what, "check its vocabulary, its normalizer and its post_processor")
    return tokenizer


def _no_tokenizer(where: str, folder: Path) -> InputError:
    subject = "" if where == str(folder) else f"{folder} "  # the place names the folder already
    gguf = min((file.name for file in folder.glob("*.gguf")), default=None)
    if gguf is None:
        return InputError.at(
            where, f"{subject}holds no tokenizer", "it needs tokenizer.json, or vocab.json and merges.txt"
        )
    fix = f"give the model in Hugging Face's format, or run the file with llama.cpp: llama-cli -m {folder / gguf}"
    return InputError.at(where, f"{subject}holds no tokenizer, but {gguf}, which artel does not open", fix)


def _open(name: str, folder: Path) -> PreTrainedTokenizerFast:
    names = {file.name for file in folder.iterdir()} if folder.is_dir() else set()
    if {"tokenizer.json", "tokenizer_config.json"} <= names and "config.json" not in names:
        # AutoTokenizer imports torch to find the class, which these, artel's own among them, name plainly.
        kind = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get("tokenizer_class")
        if kind in ("PreTrainedTokenizerFast", "TokenizersBackend"):
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(name)
    from transformers import AutoTokenizer, GPT2Tokenizer, RobertaTokenizer

    if {"vocab.json", "merges.txt"} <= names and not names & {"tokenizer.json", "tokenizer_config.json"}:
        # Older folders (fairseq's RoBERTa, GPT-2 as OpenAI gave it) do not say whose tokenizer this is; the
        # vocabulary does: RoBERTa's has <s> and </s>, GPT-2's has only <|endoftext|>.
        words = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
        if {"<s>", "</s>"} <= words.keys() and not is_of_gpt2(folder):
            return RobertaTokenizer.from_pretrained(name, mask_token=mask_token("<mask>"))
        hf = GPT2Tokenizer.from_pretrained(name)
    else:
        hf = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    roles = roles_by_config(hf, name)
    return type(hf).from_pretrained(name, **roles) if roles else hf


def _open_own(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer whose own code may be run; without that code, so that what is saved of it opens everywhere."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    check_whose(get_tokenizer_config(name), name)
    hf = AutoTokenizer.from_pretrained(name, trust_remote_code=True)
    if not type(hf).__module__.startswith("transformers_modules.") or not hasattr(hf, "backend_tokenizer"):
        return hf
    return PreTrainedTokenizerFast(
        tokenizer_object=hf.backend_tokenizer, chat_template=hf.chat_template, **hf.special_tokens_map
    )


def _remedy(folder: Path) -> str:
    if folder.is_dir():
        return "check its tokenizer.json, or vocab.json and merges.txt"
    offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
    return f"a hub id needs network{offline}; give a folder, or download it first with: hf download NAME"
