"""The reward of chaos_policy.yaml: slow enough to be killed while it scores, and seen on the disk."""

import time
from pathlib import Path


def vowels(completion: str, touched: str) -> float:
    Path(touched).touch()
    time.sleep(0.005)
    return sum(letter in "aeiou" for letter in completion) / 10
