"""Lines of Python for the card of an embedding model."""

from __future__ import annotations

from collections.abc import Sequence

from artel.config import EmbeddingConfig
from artel.objectives.usage import in_python

_POOLED = {
    "mean": "vectors = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)",
    "cls": "vectors = states[:, 0]",
    "last": "vectors = states[torch.arange(len(states)), mask.sum(1) - 1]",
}


def usage(config: EmbeddingConfig, texts: Sequence[str]) -> str:
    """The vectors of a query and a document by transformers alone, and how near they are."""
    query, document = texts
    framed = [config.prompts.query + query, config.prompts.document + document]
    nearness = "(vectors[0] @ vectors[1]).item())  # the cosine"
    if not config.normalize:
        nearness = "torch.cosine_similarity(vectors[0], vectors[1], dim=0).item())"
    return "\n".join(
        [
            f"texts = [{', '.join(map(in_python, framed))}]",
            'inputs = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")',
            "with torch.no_grad():",
            "    states = model(**inputs).last_hidden_state",
            'mask = inputs["attention_mask"]',
            _POOLED[config.pooling],
            *(["vectors = torch.nn.functional.normalize(vectors, dim=1)"] if config.normalize else []),
            f"print({nearness}",
        ]
    )
