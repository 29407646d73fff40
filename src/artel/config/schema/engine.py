"""The server that writes the answers of a round."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from artel.config.schema.base import ShortSection, runtime_only
from artel.config.schema.quantities import Number

Correction = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "none"]


class EngineConfig(ShortSection):
    """A server that writes the answers of a round in place of the training processes."""

    url: str = Field(
        description="Address of vLLM's server or of artel serve --reload-from, e.g. http://localhost:8000. It must see "
        "the run's folder under the same path.",
        json_schema_extra={"shapes_result": False},
    )
    key: str = runtime_only("", "Name of the environment variable with the server's API key.")
    correction: Correction = Field(
        default="sequence_mask",
        description="How the loss is corrected for the difference between the server's probabilities and those of the "
        "model in training: their ratio, of each token (token) or of an answer (sequence), is a factor of the loss. "
        "truncate: at most the limit; mask: 0 above the limit; none: no correction.",
    )
    limit: Number = Field(default=3.0, gt=1, description="Limit of that factor.")

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"{url!r} is not an address; write http://HOST:PORT")
        return url.rstrip("/").removesuffix("/v1")
