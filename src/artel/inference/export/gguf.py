"""GGUF files for llama.cpp and Ollama, written by llama.cpp's tools, and Ollama's Modelfile."""

from __future__ import annotations

import difflib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from artel.config import Section
from artel.errors import InputError, WorkError
from artel.tokens import Tokenizer, load_tokenizer

_SCRIPT = "convert_hf_to_gguf.py"
_CONVERTER_TYPES = ("auto", "f32", "f16", "bf16", "q8_0")
# Types of llama-quantize that do not need calibration text.
_QUANTIZER_TYPES = tuple(
    "q2_k q3_k_s q3_k_m q3_k_l q4_0 q4_1 q4_k_s q4_k_m q5_0 q5_1 q5_k_s q5_k_m q6_k iq4_nl iq4_xs".split()
)
# Keys that the converter needs and transformers 5 no longer writes: {model type: {key: its new name}}.
_RENAMED_KEYS = {"gpt2": {"n_ctx": "n_positions"}}
_LAUNCHER = Path(__file__).with_name("llama_converter.py")


@dataclass(frozen=True, slots=True)
class GgufTools:
    """The requested type of weights, and the programs that write it."""

    type: str
    converter: Path
    quantizer: Path | None


def find_gguf_tools(type_: str) -> GgufTools:
    """Find llama.cpp's converter, and llama-quantize if the type needs it: in its folder, on PATH, or as a package.

    The folder is the environment variable LLAMA_CPP. Raise InputError with the fix.
    """
    weights_type = type_.lower()
    if weights_type not in _CONVERTER_TYPES + _QUANTIZER_TYPES:
        similar = difflib.get_close_matches(weights_type, _CONVERTER_TYPES + _QUANTIZER_TYPES, 1)
        types = ", ".join(_CONVERTER_TYPES + _QUANTIZER_TYPES)
        fix = f"did you mean {similar[0]}?" if similar else f"use one of: {types}"
        raise InputError.at("--gguf", f"unknown type {type_}", fix)
    folder = os.environ.get("LLAMA_CPP")
    converter = _find_converter(Path(folder) if folder else None)
    if converter is None and folder:
        raise InputError.at("LLAMA_CPP", f"{folder} has no {_SCRIPT}", "set it to a clone of llama.cpp")
    if converter is None:
        fix = (
            "git clone https://github.com/ggml-org/llama.cpp, pip install -r its requirements.txt, "
            "then set LLAMA_CPP=FOLDER"
        )
        raise InputError.at("--gguf", f"llama.cpp's {_SCRIPT} is not on PATH, and LLAMA_CPP is not set", fix)
    quantizer = None
    if weights_type in _QUANTIZER_TYPES:
        quantizer = _find_quantizer(Path(folder) if folder else None)
        if quantizer is None:
            message = f"{weights_type} needs llama.cpp's llama-quantize, which is neither on PATH nor in its folder"
            fix = "build it: cmake -B build && cmake --build build --target llama-quantize; or use --gguf q8_0"
            raise InputError.at("--gguf", message, fix)
    return GgufTools(weights_type, converter, quantizer)


def _find_converter(folder: Path | None) -> Path | None:
    if folder is not None:
        return folder / _SCRIPT if (folder / _SCRIPT).is_file() else None
    on_path = shutil.which(_SCRIPT)
    if on_path is not None:
        return Path(on_path).resolve()
    package = importlib.util.find_spec(Path(_SCRIPT).stem)
    return None if package is None or package.origin is None else Path(package.origin)


def _find_quantizer(folder: Path | None) -> Path | None:
    folders = [] if folder is None else [folder / "build" / "bin", folder / "bin", folder]
    built = next((file for parent in folders if (file := parent / "llama-quantize").is_file()), None)
    on_path = shutil.which("llama-quantize")
    return built or (None if on_path is None else Path(on_path))


class GgufConfig(Section):
    """Type of the weights."""

    type: str = Field(default="f16", description="Type of the weights: f16, bf16, q8_0, q4_k_m …")


class GgufExporter:
    """Writes model.gguf and a Modelfile for Ollama."""

    def __init__(self, settings: GgufConfig) -> None:
        self._tools = find_gguf_tools(settings.type)

    def write(self, model: Path, folder: Path) -> None:
        write_gguf(self._tools, model, folder)


def write_gguf(tools: GgufTools, model: Path, folder: Path) -> None:
    """Write `folder`/model.gguf and `folder`/Modelfile for the Hugging Face folder `model`, whose config may change.

    Raise WorkError if a tool fails.
    """
    tokenizer = load_tokenizer(str(model), where=str(model))
    _restore_keys(model / "config.json")
    file = folder / "model.gguf"
    arguments = ["--outfile", str(file), "--outtype", tools.type, str(model)]
    if tools.quantizer is not None:
        unquantized = folder / "unquantized.gguf"
        arguments = ["--outfile", str(unquantized), "--outtype", "auto", str(model)]
    pre_tokenizer = _find_pre_tokenizer(tokenizer)
    script = [str(tools.converter)]
    if pre_tokenizer is not None:
        script = [str(_LAUNCHER), *script, pre_tokenizer]
    _run_program(tools.converter, [sys.executable, *script, *arguments])
    if tools.quantizer is not None:
        _run_program(tools.quantizer, [str(tools.quantizer), str(unquantized), str(file), tools.type.upper()])
        unquantized.unlink()
    (folder / "Modelfile").write_text(modelfile(tokenizer, model), encoding="utf-8")


def _restore_keys(file: Path) -> None:
    config = json.loads(file.read_text(encoding="utf-8"))
    old_keys = _RENAMED_KEYS.get(config.get("model_type"), {})
    restored = {key: config.get(new_key) for key, new_key in old_keys.items()}
    file.write_text(json.dumps(restored | config), encoding="utf-8")


def _run_program(program: Path, command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    if result.returncode != 0:
        lines = [line.strip() for line in (result.stderr + result.stdout).splitlines() if line.strip()]
        reason = lines[-1][:300] if lines else f"exit status {result.returncode}"
        fix = "it must support the model's architecture and tokenizer; a newer llama.cpp may"
        raise WorkError.at(program.name, f"failed: {reason}", fix)


def _find_pre_tokenizer(tokenizer: Tokenizer) -> str | None:
    """Return llama.cpp's name of the pre-tokenizer if it is GPT-2's, as in tokenizers that artel trains, or None."""
    state = json.loads(tokenizer.hf.backend_tokenizer.to_str())
    splitter = state["pre_tokenizer"] or {}
    is_gpt2 = state["model"]["type"] == "BPE" and not state["normalizer"] and splitter.get("type") == "ByteLevel"
    return "gpt-2" if is_gpt2 and splitter.get("use_regex") and not splitter.get("add_prefix_space") else None


def modelfile(tokenizer: Tokenizer, model: Path) -> str:
    """Return Ollama's Modelfile: weights, stop texts, sampling parameters and chat template.

    Sampling parameters come from generation_config.json, or are the defaults of `artel generate`.
    """
    file = model / "generation_config.json"
    generation_config = _read_object(file) if file.is_file() else {}
    chatml = _uses_chatml(tokenizer)
    ends = generation_config.get("eos_token_id") or []
    ids = [tokenizer.end_id, *(ends if isinstance(ends, list) else [ends])]
    stops = dict.fromkeys([tokenizer.decode([token_id]) for token_id in ids] + ["<|im_end|>"] * chatml)
    lines = ["FROM ./model.gguf", *(f"PARAMETER stop {json.dumps(stop, ensure_ascii=False)}" for stop in stops)]
    # Ollama's own defaults penalize repetition, with top_k 40 and top_p 0.9.
    for name, default in {"temperature": 0.8, "top_k": 50, "top_p": 1.0}.items():
        lines.append(f"PARAMETER {name} {generation_config.get(name, default)}")
    lines.append(f"PARAMETER repeat_penalty {generation_config.get('repetition_penalty', 1.0)}")
    if chatml:
        lines.append(f'TEMPLATE """{_CHATML}"""')
    return "\n".join(lines) + "\n"


def _read_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raise InputError if it has none."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError.at(str(file), f"is not JSON: {error}", "fix it, or remove it") from None
    if not isinstance(values, dict):
        raise InputError.at(str(file), "is not a JSON object", "fix it, or remove it")
    return values


_CHATML = """{{- range .Messages }}<|im_start|>{{ .Role }}
{{ .Content }}<|im_end|>
{{ end }}<|im_start|>assistant
"""


def _uses_chatml(tokenizer: Tokenizer) -> bool:
    """True if the tokenizer's template writes ChatML. Ollama takes any other template from the GGUF file."""
    if not tokenizer.hf.chat_template:
        return False
    turns = [{"role": role, "content": role.upper()} for role in ("system", "user", "assistant", "user")]
    for messages in (turns, turns[1:]):
        expected = "".join(f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in messages)
        try:
            rendered = tokenizer.hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception:  # a template may refuse a role
            return False
        if rendered != f"{expected}<|im_start|>assistant\n":
            return False
    return True
