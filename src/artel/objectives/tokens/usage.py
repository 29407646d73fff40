"""Lines of Python for model cards: how names and tags are asked for by transformers alone."""

from __future__ import annotations

from artel.objectives.usage import in_python


def pipeline_usage(text: str) -> str:
    """For tags in BIO, which transformers' pipeline puts together: a word is what its first token is."""
    return "\n".join(
        [
            "from transformers import pipeline",
            "",
            'tagger = pipeline("token-classification", model, tokenizer=tokenizer, aggregation_strategy="first")',
            f"for name in tagger({in_python(text)}):",
            '    print(name["start"], name["end"], name["entity_group"], name["word"], name["score"])',
        ]
    )


def bio_usage(text: str) -> str:
    """For tags in BIO, where the pipeline does not find the words: the tag of each token."""
    return _by_tokens(text, "    # B- begins a name, and I- continues it. A word has the tag of its first token.")


def bilou_usage(text: str) -> str:
    """For tags that the pipeline does not put together: the tag of each token."""
    return _by_tokens(text, "    # B- begins a name, I- and L- continue and end it, U- is a name of one word.")


def word_usage(text: str) -> str:
    """For a tag of each word: that of its first token."""
    return _by_tokens(text, "    # A word has the tag of its first token.")


def _by_tokens(text: str, comment: str) -> str:
    return "\n".join(
        [
            f'inputs = tokenizer({in_python(text)}, return_tensors="pt")',
            "with torch.no_grad():",
            "    tags = model(**inputs).logits[0].argmax(dim=-1)",
            'for token, tag in zip(inputs["input_ids"][0].tolist(), tags.tolist()):',
            comment,
            "    print(tokenizer.decode([token]), model.config.id2label[tag])",
        ]
    )
