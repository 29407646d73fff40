"""`artel generate --prompts`: answer the prompts of a file."""

from artel.inference.batch.answers import best_answers, check_reward, generate_answers
from artel.inference.batch.files import Prompt, Results, read_prompts, weights_checksum

__all__ = [
    "Prompt",
    "Results",
    "best_answers",
    "check_reward",
    "generate_answers",
    "read_prompts",
    "weights_checksum",
]
