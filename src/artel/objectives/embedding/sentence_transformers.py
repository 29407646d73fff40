"""The files of a sentence-transformers folder, written and read.

https://sbert.net/docs/sentence_transformer/usage/custom_models.html: `modules.json` lists the modules: the transformer
in the folder itself, then pooling, then normalization.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from artel.config import EmbeddingConfig
from artel.errors import InputError
from artel.models.text_vectors import find_model_folder

_MODULES = "modules.json"
_POOLING = "1_Pooling"
_SETTINGS = "sentence_bert_config.json"
_MODES = {"mean": "mean_tokens", "cls": "cls_token", "last": "lasttoken"}
_OTHER_MODES = ("max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens")
_ALL_MODES = [f"pooling_mode_{name}" for name in (*_MODES.values(), *_OTHER_MODES)]
_NO_LIMIT = 10**8  # tokenizers without a limit write 10**30
_MODULE_TYPES = ("Transformer", "Pooling", "Normalize")


def folder_files(embedding: EmbeddingConfig, size: int, block: int) -> dict[str, bytes]:
    """Return the files, by path in the folder, of a model with vectors of `size` numbers.

    They have the format of versions before 6, which newer versions also read.
    """
    paths = ("", _POOLING, "2_Normalize")[: 3 if embedding.normalize else 2]
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{module_type}"}
        for index, (path, module_type) in enumerate(zip(paths, _MODULE_TYPES, strict=False))
    ]
    pooling = {
        "word_embedding_dimension": size,
        **{f"pooling_mode_{name}": mode == embedding.pooling for mode, name in _MODES.items()},
        **{f"pooling_mode_{name}": False for name in _OTHER_MODES},
        "include_prompt": True,
    }
    metadata: dict[str, Any] = {
        "model_type": "SentenceTransformer",
        "prompts": embedding.prompts.model_dump(),
        "default_prompt_name": None,
        "similarity_fn_name": "cosine",
    }
    files = {
        _MODULES: modules,
        f"{_POOLING}/config.json": pooling,
        _SETTINGS: {"max_seq_length": block, "do_lower_case": False},
        "config_sentence_transformers.json": metadata,
    }
    return {name: json.dumps(content, indent=2, ensure_ascii=False).encode() for name, content in files.items()}


def read_folder(folder: str) -> dict[str, Any]:
    """Return keys of the run file that fit a folder. Raise InputError for unsupported settings."""
    path = find_model_folder(folder)
    modules = _read_json(path / _MODULES)
    types = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    if types[:2] != list(_MODULE_TYPES[:2]) or types[2:] not in ([], ["Normalize"]):
        what = f"passes a text through {', '.join(types)}"
        raise InputError.at(str(path / _MODULES), what, f"artel has {', then '.join(_MODULE_TYPES)}; use it as it is")
    pooling = _read_json(path / str(modules[1]["path"]) / "config.json")
    modes = [
        name.removeprefix("pooling_mode_") for name, value in pooling.items() if value is True and name in _ALL_MODES
    ]
    if "pooling_mode" in pooling:  # from version 6 on
        mode = str(pooling["pooling_mode"])
        modes = [_MODES.get(mode, mode)]
    known = {name: mode for mode, name in _MODES.items()}
    if len(modes) != 1 or modes[0] not in known:
        what = f"pools by {' and '.join(modes) or 'nothing'}"
        raise InputError.at(str(path / str(modules[1]["path"])), what, f"artel pools by one of {', '.join(_MODES)}")
    metadata, tokenizer = (
        _read_json(path / f"{name}.json") for name in ("config_sentence_transformers", "tokenizer_config")
    )
    settings = _read_json(path / _SETTINGS)
    if settings.get("do_lower_case") and not tokenizer.get("do_lower_case"):
        what = "do_lower_case: true lower-cases texts, but the tokenizer does not"
        raise InputError.at(str(path / _SETTINGS), what, "artel does not change the text; use the model without artel")
    longest = settings.get("max_seq_length") or tokenizer.get("model_max_length")
    saved_prompts = metadata.get("prompts") or {}
    prompts = {
        "query": saved_prompts.get("query") or "",
        "document": saved_prompts.get("document") or saved_prompts.get("passage") or "",
    }
    if pooling.get("include_prompt") is False and any(prompts.values()):
        what = "include_prompt: false leaves the prompt before a text out of its vector"
        raise InputError.at(str(path / str(modules[1]["path"])), what, "artel pools both; use it as it is")
    values: dict[str, Any] = {
        "embedding": {"pooling": known[modes[0]], "normalize": "Normalize" in types, "prompts": prompts}
    }
    if isinstance(longest, int) and longest < _NO_LIMIT:
        values["data"] = {"block": longest}
    return values


def _read_json(file: Path) -> Any:
    """Return the content of a JSON file; {} if it does not exist. Raise InputError if it is not JSON."""
    if not file.is_file():
        return {}
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError.at(str(file), f"is not JSON: {error}", "download the folder again") from None
