"""The key of a run's store: a digest of everything that its content depends on."""

from __future__ import annotations

from typing import Any

import orjson
import xxhash

from artel.config import RunConfig
from artel.objectives import objective_type
from artel.plugins import code_digest
from artel.preparing.mixture import depends_on_seed
from artel.preparing.run_tokenizer import tokenizer_files
from artel.registry import FORMATS, OBJECTIVES
from artel.secrets import hide_secrets
from artel.text import source_fingerprint
from artel.text.classifier.model import classifier_digest
from artel.text.decontamination.index import benchmark_fingerprint
from artel.text.dedup.shingles import SHINGLE_VERSION
from artel.text.pipeline import TEXT_VERSION
from artel.tokens.store.manifest import FORMAT


def store_key(run: RunConfig) -> str:
    """A digest of everything that the store's content depends on. It is cheap: no file is read."""
    files: dict[str, Any] = {"files": source_fingerprint(run.data), "tokenizer_files": tokenizer_files(run)}
    if run.data.decontaminate is not None:
        files["benchmarks"] = benchmark_fingerprint(run.data)
    if run.data.clean.classifier is not None:
        files["classifier"] = classifier_digest(run.data.clean.classifier)
    return _digest({**_settings(run), **files})


def settings_digest(run: RunConfig) -> str:
    """A digest of the settings of the run file that shape the store, whatever its texts are."""
    return _digest(_settings(run))


def _settings(run: RunConfig) -> dict[str, Any]:
    """The settings of the run file that shape the store."""
    not_in_store: dict[str, Any] = dict.fromkeys(("block", "packing", "document_mask", "store", "max_bad"), True)
    data = run.data.model_dump(mode="json", exclude=not_in_store | {"sources": {"__all__": {"license"}}})
    modules = [FORMATS.module_of(source.format) for source in run.data.sources]
    plugins = {module for module in (*modules, OBJECTIVES.module_of(run.objective)) if module is not None}
    return {
        "format": FORMAT,
        "text": TEXT_VERSION,
        **({"plugins": [[module, code_digest(module)] for module in sorted(plugins)]} if plugins else {}),
        **({"grams": SHINGLE_VERSION} if run.data.dedup.near is not None else {}),
        "data": data,
        "tokenizer": run.tokenizer.model_dump(mode="json", exclude={"replace"}),
        "objective": [run.objective, objective_type(run).store_settings(run)],
        "seed": run.seed if depends_on_seed(run) else None,
    }


def _digest(inputs: dict[str, Any]) -> str:
    """A digest without secrets: another token in an address is not another text, whose digest is among the inputs."""
    return xxhash.xxh3_128_hexdigest(orjson.dumps(hide_secrets(inputs), option=orjson.OPT_SORT_KEYS))
