"""Score completions in child processes with time and memory limits.

artel never executes completions: its built-in rewards treat them as text. A user's function may execute them.
"""

from artel.rewards.completion import Completion, Reward
from artel.rewards.pool import Failure, Job, RewardPool, Scores

__all__ = ["Completion", "Failure", "Job", "Reward", "RewardPool", "Scores"]
