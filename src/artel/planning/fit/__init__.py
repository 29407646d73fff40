"""What to change so that a run fits, or runs faster, before it runs: `artel plan --fit`."""

from artel.planning.fit.advice import Advice, Advised, advise
from artel.planning.fit.show import CommandLine, advice_json, describe_advice

__all__ = ["Advice", "Advised", "CommandLine", "advice_json", "advise", "describe_advice"]
