"""Constrained answers: llguidance masks the tokens that a JSON schema or a grammar does not allow.

Compiling a schema may take arbitrarily long (`multipleOf: 999983` takes a minute: one state per remainder), and some
schemas fail only at the first token (`{"$ref": "#"}`). So every grammar is first compiled in a child process, which can
be killed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cached_property
from typing import Any

from artel.inference.serve.api_errors import ApiError
from artel.tokens import Tokenizer
from artel.tokens.tokenizer.template_limits import run_in_child

ANY_OBJECT = {"type": "object"}
WHITESPACE: Any = {"whitespace_pattern": r"[ ]|\n[ ]{0,40}"}
"""Whitespace allowed in JSON. Without a limit, weak models write only whitespace up to `max_tokens`."""
_COMPILE_SECONDS = 3
"""Maximum CPU seconds to compile a schema and mask the first token."""
_MAX_STATES = 20_000
"""Limit of llguidance's lexer. A state takes up to 2 kB; with the default of 250,000 a step took 7 s."""
_CACHE_SIZE = 16
"""Cached matchers, one for each grammar."""


class Grammars:
    """Makes matchers for a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, ends: frozenset[int]) -> None:
        """`ends`: ids that end an answer; allowed once the JSON is complete."""
        self._hf, self._vocabulary, self._ends = tokenizer.hf, tokenizer.vocabulary, sorted(ends)
        self._matchers: dict[str, Any] = {}

    def json_matcher_factory(self, schema: dict[str, Any]) -> Callable[[], Any]:
        """Return a function that makes the matcher of one answer. Raise ApiError for an unusable schema."""
        from llguidance import LLMatcher

        return self._checked_factory(
            lambda: LLMatcher.grammar_from_json_schema(json.dumps(schema), WHITESPACE), "response_format"
        )

    def lark_matcher_factory(self, grammar: str, param: str) -> Callable[[], Any]:
        """Like `json_matcher_factory`, for a Lark grammar with JSON schemas inside. An ApiError is for `param`."""
        from llguidance import LLMatcher

        return self._checked_factory(lambda: LLMatcher.grammar_from_lark(grammar), param)

    def _checked_factory(self, make_grammar: Callable[[], str], param: str) -> Callable[[], Any]:
        try:
            grammar = make_grammar()
        except ValueError as error:
            raise _schema_error(str(error), param) from None
        if grammar not in self._matchers:
            _ = self._tokenizer  # create it in the parent, so that it stays cached
            result = run_in_child(
                lambda: self._compile_error(grammar), _COMPILE_SECONDS, otherwise="it cannot be compiled to a grammar"
            )
            if result != "fine":
                limits = {
                    "end": f"compiling it takes more than {_COMPILE_SECONDS} s",
                    "memory": "compiling it takes too much memory",
                }
                raise _schema_error(limits.get(result, result), param)
            while len(self._matchers) >= _CACHE_SIZE:
                del self._matchers[next(iter(self._matchers))]
            self._matchers[grammar] = self._make_matcher(grammar)
        return self._matchers[grammar].deep_copy

    @cached_property
    def _tokenizer(self) -> Any:
        from llguidance.hf import from_tokenizer

        return from_tokenizer(self._hf, n_vocab=self._vocabulary, eos_token=self._ends)

    def _make_matcher(self, grammar: str) -> Any:
        from llguidance import LLMatcher, LLParserLimits

        return LLMatcher(self._tokenizer, grammar, limits=LLParserLimits(max_lexer_states=_MAX_STATES))

    def _compile_error(self, grammar: str) -> str:
        """Return "fine", or the error that a grammar causes up to the first token of an answer."""
        from llguidance import LLMatcher, LLParserLimits
        from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

        error = LLMatcher.validate_grammar(
            grammar, self._tokenizer, limits=LLParserLimits(max_lexer_states=_MAX_STATES)
        )
        if error:
            return str(error)
        matcher = self._make_matcher(grammar)
        if not matcher.is_error():
            fill_next_token_bitmask(matcher, allocate_token_bitmask(1, self._tokenizer.vocab_size), 0)
        return matcher.get_error() or "fine"


def grammar_error(error: object) -> str:
    """Return the first line of an error of llguidance. Replaces its internal name for an unsatisfiable schema."""
    return str(error).partition("\n")[0][:300].replace("NoExtensionBias", "no answer can satisfy it")


def _schema_error(message: str, param: str) -> ApiError:
    return ApiError(400, f"the schema cannot be used: {grammar_error(message)}", param)
