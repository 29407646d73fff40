"""Text + tokenizer + objective to a token store, once for the same inputs."""

from artel.preparing.prepare import Prepared, prepare

__all__ = ["Prepared", "prepare"]
