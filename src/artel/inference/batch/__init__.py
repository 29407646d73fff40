"""A file of prompts: read, answered many at once, and written as JSON lines that a second start goes on with."""

from artel.inference.batch.answers import answers
from artel.inference.batch.best_of import best_answers, check_reward
from artel.inference.batch.prompts import Prompt, read_prompts
from artel.inference.batch.results import Results, weights_of

__all__ = ["Prompt", "Results", "answers", "best_answers", "check_reward", "read_prompts", "weights_of"]
