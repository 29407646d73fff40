"""`artel generate --prompts`: answer the prompts of a file."""

from artel.inference.batch.answers import answers, best_answers, check_reward
from artel.inference.batch.files import Prompt, Results, read_prompts, weights_checksum

__all__ = ["Prompt", "Results", "answers", "best_answers", "check_reward", "read_prompts", "weights_checksum"]
