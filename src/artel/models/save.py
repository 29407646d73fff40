"""The final model as a folder in Hugging Face's own format: safetensors, configuration, tokenizer."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel

from artel.storage import new_folder
from artel.tokens import Tokenizer


def save_model(model: PreTrainedModel, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the folder whole or not at all; one of an earlier run is replaced."""
    with new_folder(folder, replace=True) as partial:
        model.save_pretrained(str(partial))
        tokenizer.save(partial)
