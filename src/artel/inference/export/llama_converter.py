"""Runs llama.cpp's convert_hf_to_gguf.py in a process of its own, telling it which pre-tokenizer a model has.

    python llama_converter.py CONVERT_HF_TO_GGUF.py gpt-2 ARGUMENTS OF THE CONVERTER…

The converter knows pre-tokenizers by a hash of what some text becomes, so that it knows only vocabularies that were
published: one trained yesterday is refused, though it cuts text just as GPT-2's does. This file imports nothing of
artel: beside the converter stand modules (`gguf`, `conversion`) that must not be taken for ours.
"""

import importlib.util
import sys
from pathlib import Path


def main() -> None:
    script, pre_tokenizer, *arguments = sys.argv[1:]
    sys.path[0] = str(Path(script).parent)  # as if Python had been started with the script itself
    sys.argv = [script, *arguments]
    found = importlib.util.spec_from_file_location("convert_hf_to_gguf", script)
    if found is None or found.loader is None:
        sys.exit(f"{script} is not a Python file")
    converter = importlib.util.module_from_spec(found)
    sys.modules[found.name] = converter
    found.loader.exec_module(converter)
    # Up to 2025 the class stood in the script itself, since then in a package beside it.
    for module in [converter, *(part for name, part in sys.modules.items() if name.startswith("conversion"))]:
        for kind in vars(module).values():
            if isinstance(kind, type) and "get_vocab_base_pre" in vars(kind):
                kind.get_vocab_base_pre = lambda self, tokenizer: pre_tokenizer  # type: ignore[attr-defined]
    converter.main()


if __name__ == "__main__":
    main()
