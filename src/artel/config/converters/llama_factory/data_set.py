"""The data sets that LLaMA-Factory's dataset_info.json names, as sources of a run file."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from artel.config.converters.hub_data import is_here, local_or_hub
from artel.config.converters.keys import YamlKeys, a_text

_INFO = "dataset_info.json"
# Columns of a row, by artel's names for them and LLaMA-Factory's.
_ALPACA = {"instruction": "prompt", "input": "query", "output": "response", "system": "system", "history": "history"}
_USUAL = {"prompt": "instruction", "query": "input", "response": "output", "messages": "conversations"}
_NOT_READ = ("images", "videos", "audios")
_ROLES = {
    "user_tag": {"human", "user"},
    "assistant_tag": {"gpt", "assistant"},
    "system_tag": {"system"},
    "observation_tag": {"observation", "tool", "function", "function_response", "tool_response"},
    "function_tag": {"function_call", "tool_call"},
}


@dataclass(frozen=True, slots=True)
class Source:
    """A source of a run file, and what the user is told of it."""

    keys: dict[str, Any]
    doubt: str = ""
    differences: list[str] = field(default_factory=list)


class DataSets:
    """The data sets of a folder: `dataset_dir`, from here or from a folder above the configuration."""

    def __init__(self, folder: Path, entries: dict[str, Any] | None, is_online: bool) -> None:
        self._folder = folder
        self._entries = entries
        self._is_online = is_online

    @classmethod
    def of(cls, old: YamlKeys) -> DataSets:
        name = old.read("dataset_dir", a_text) or "data"
        if name == "ONLINE":
            return cls(Path(), None, True)
        if name.startswith("REMOTE:"):
            old.leave("dataset_dir", f"fetch it, and name its folder: hf download --repo-type dataset {name[7:]}")
            return cls(Path("data"), None, False)
        above = [] if old.place == "-" else Path(old.place).absolute().parents
        folders = [Path(name), *(parent / name for parent in above)]
        folder = next((folder for folder in folders if is_here(str(folder / _INFO))), None)
        if folder is None:
            return cls(Path(name), None, False)
        try:
            entries = json.loads((folder / _INFO).read_text(encoding="utf-8-sig"))
        except (OSError, ValueError) as error:
            old.refuse("dataset_dir", f"{folder / _INFO} cannot be read: {error}; mend it")
            entries = {}
        return cls(folder, entries if isinstance(entries, dict) else {}, False)

    def source(self, name: str, objective: str) -> Source:
        """The source of a data set by its name."""
        if self._is_online:
            return self._of_entry(name, {"hf_hub_url": name}, objective)
        entry = self._entries.get(name) if self._entries is not None else None
        if isinstance(entry, dict):
            return self._of_entry(name, entry, objective)
        why = f"{_INFO} has no {name}" if self._entries is not None else f"there is no {self._folder / _INFO} here"
        keys = {"path": str(self._folder / f"{name}.json"), "format": _FORMATS[objective]}
        return Source(keys, f"your file of the data set {name}: {why}")

    def _of_entry(self, name: str, entry: dict[str, Any], objective: str) -> Source:
        path, doubt = self._path(name, entry)
        source = Source({"path": path, "format": _FORMATS[objective]}, doubt)
        columns = entry.get("columns") if isinstance(entry.get("columns"), dict) else None
        if objective == "causal":
            text = (columns or {}).get("prompt", "instruction")
            source.keys["format"] = "parquet" if path.endswith(".parquet") else "auto"
            if not path.endswith(".txt"):
                source.keys["field"] = text
        else:
            self._add_form(source, name, entry, columns, objective)
        samples = entry.get("num_samples")
        if isinstance(samples, int):
            source.keys["rows"] = f"[:{samples}]"
        unread = [column for column in _NOT_READ if (columns or {}).get(column)]
        if unread:
            source.differences.append(
                f"{_INFO}: {name}: {', '.join(unread)} of its rows are not read: artel learns text"
            )
        return source

    def _path(self, name: str, entry: dict[str, Any]) -> tuple[str, str]:
        for key in ("hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name", "file_name"):
            value = entry.get(key)
            if not isinstance(value, str):
                continue
            if key == "hf_hub_url":
                data_set = local_or_hub(value, str(entry.get("subset") or ""), str(entry.get("split") or "train"))
                return data_set.path, data_set.doubt
            if key == "cloud_file_name":
                return value, ""
            if key == "file_name":
                return str(self._folder / value), ""
            return value, f"your files of the data set {name}, which is not on the Hugging Face hub: {value}"
        return str(self._folder / f"{name}.json"), f"your file of the data set {name}: {_INFO} names none"

    def _add_form(
        self, source: Source, name: str, entry: dict[str, Any], columns: dict[str, Any] | None, objective: str
    ) -> None:
        """`converter` and `mapping` of the rows."""
        tags = entry["tags"] if isinstance(entry.get("tags"), dict) else {}
        mapping: dict[str, Any] = {}
        if entry.get("formatting", "alpaca") == "alpaca":
            mapping = {mine: (columns or _USUAL).get(theirs) for mine, theirs in _ALPACA.items()}
            if objective == "chat":
                source.keys["converter"] = "alpaca"
            elif (columns or {}).get("kto_tag"):
                mapping["completion"] = mapping.pop("output")
        else:
            messages = (columns or _USUAL).get("messages")
            if objective == "chat":
                source.keys["converter"] = "sharegpt" if messages == "conversations" else "messages"
            if messages != "conversations":
                mapping["messages"] = messages
            mapping |= {"role": tags.get("role_tag"), "content": tags.get("content_tag")}
            mapping["system"] = (columns or {}).get("system")
            for tag, known in _ROLES.items():
                if tags.get(tag) and tags[tag] not in known:
                    source.differences.append(
                        f"{_INFO}: {name}: the role {tags[tag]} ({tag}) is rejected where artel does not know it; "
                        "rename it, or write converter: module:function"
                    )
        mapping |= {mine: (columns or {}).get(mine) for mine in ("chosen", "rejected", "tools")}
        mapping["label"] = (columns or {}).get("kto_tag")
        known_names = {"from", "value"} if mapping.get("role") == "from" else set()
        mapping = {mine: theirs for mine, theirs in mapping.items() if theirs and theirs not in {mine, *known_names}}
        if mapping:
            source.keys["mapping"] = mapping


_FORMATS = {"causal": "auto", "chat": "chat", "preference": "preference"}
