"""Runs llama.cpp's convert_hf_to_gguf.py in its own process with a given pre-tokenizer.

    python llama_converter.py CONVERT_HF_TO_GGUF.py gpt-2 ARGUMENTS OF THE CONVERTER…

The converter recognizes pre-tokenizers by a hash of some tokenized text, so it only knows published vocabularies. It
refuses a newly trained tokenizer, even if it splits text exactly as GPT-2's does. This file imports nothing from artel:
the converter's folder has modules (`gguf`, `conversion`) that must not be confused with artel's.
"""

import importlib.util
import sys
from pathlib import Path


def main() -> None:
    script, pre_tokenizer, *arguments = sys.argv[1:]
    sys.path[0] = str(Path(script).parent)  # as if Python ran the script itself
    sys.argv = [script, *arguments]
    spec = importlib.util.spec_from_file_location("convert_hf_to_gguf", script)
    if spec is None or spec.loader is None:
        sys.exit(f"{script} is not a Python file")
    converter = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = converter
    spec.loader.exec_module(converter)
    # Until 2025 the class was in the script itself, since then it is in a package next to it.
    for module in [converter, *(module for name, module in sys.modules.items() if name.startswith("conversion"))]:
        for value in vars(module).values():
            if isinstance(value, type) and "get_vocab_base_pre" in vars(value):
                value.get_vocab_base_pre = lambda self, tokenizer: pre_tokenizer  # type: ignore[attr-defined]
    converter.main()


if __name__ == "__main__":
    main()
