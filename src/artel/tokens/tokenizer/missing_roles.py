"""Special tokens of tokenizers whose files name none, such as ruGPT-3's: vocab.json and merges.txt alone.

transformers then takes the defaults of the class (GPT-2's <|endoftext|>), and adds them to the vocabulary as new tokens
that the model never saw. Its config.json knows which tokens of the vocabulary it was trained with.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_ROLES = ("bos_token", "eos_token", "pad_token")
_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


def roles_by_config(hf: PreTrainedTokenizerFast, name: str) -> dict[str, str]:
    """Return the special tokens that config.json names, if the tokenizer's end token is in none of its own files.

    Empty if the end token is the tokenizer's own, or config.json names no token of the vocabulary for it.
    """
    vocabulary = hf.backend_tokenizer.get_vocab(with_added_tokens=False)
    invented = {token for token in hf.all_special_tokens if token not in vocabulary}
    if hf.eos_token not in invented or any(hf.eos_token in text for text in _texts(name)):
        return {}
    from transformers import PreTrainedConfig

    try:
        ids: dict[str, Any] = PreTrainedConfig.get_config_dict(name)[0]
    except OSError:  # a tokenizer alone
        return {}
    tokens = {number: token for token, number in vocabulary.items()}
    named = {role: tokens[ids[f"{role}_id"]] for role in _ROLES if ids.get(f"{role}_id") in tokens}
    if "eos_token" not in named:
        return {}
    roles = {role: named.get(role, named["eos_token"]) for role in ("bos_token", "eos_token")}
    if hf.unk_token in invented:
        roles["unk_token"] = "<unk>" if "<unk>" in vocabulary else named["eos_token"]
    return roles | ({"pad_token": named["pad_token"]} if "pad_token" in named else {})


def is_of_gpt2(folder: Path) -> bool:
    """True if config.json names a model whose tokenizer in transformers is GPT-2's, as ruGPT-3's does."""
    from transformers import PreTrainedConfig
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    if not (folder / "config.json").is_file():
        return False
    model_type = PreTrainedConfig.get_config_dict(str(folder))[0].get("model_type")
    return TOKENIZER_MAPPING_NAMES.get(model_type) == "GPT2Tokenizer"


def _texts(name: str) -> list[str]:
    """The files of a tokenizer, apart from its vocabulary, that may name special tokens."""
    from transformers.utils import cached_file

    found = (cached_file(name, file, _raise_exceptions_for_missing_entries=False) for file in _FILES)
    return [Path(file).read_text(encoding="utf-8") for file in found if file is not None]
