"""Model folders that no run of artel trained: whether they give one score, and of what."""

from __future__ import annotations


def gives_a_score(architecture: str, folder: str) -> bool:
    """Whether a model has one output for a text: a reward model, a reranker, a regression."""
    from artel.models.loading.model_folder import read_config

    return architecture.endswith("ForSequenceClassification") and read_config(folder)[0].num_labels == 1


def reads_conversations(folder: str) -> bool:
    """Whether its tokenizer has a chat template, as those of reward models do."""
    from artel.tokens import load_tokenizer

    return bool(load_tokenizer(folder).hf.chat_template)


def names_its_problem(folder: str) -> bool:
    """Whether its configuration says what the output is (`problem_type`): those of rerankers do not."""
    from artel.models.loading.model_folder import read_config

    return getattr(read_config(folder)[0], "problem_type", None) is not None
