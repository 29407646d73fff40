"""Advice on a run before it starts: how to make it fit, or run faster (`artel plan --fit`)."""

from artel.planning.fit.advice import Advice, CommandLine, Suggestion, advice_json, advise, describe_advice

__all__ = ["Advice", "CommandLine", "Suggestion", "advice_json", "advise", "describe_advice"]
