"""Answers in JSON: at each token, llguidance masks what a schema does not allow."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from artel.inference.serve.errors import ApiError
from artel.tokens import Tokenizer

ANY_OBJECT = {"type": "object"}


class Grammars:
    """Makes matchers for a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, ends: frozenset[int]) -> None:
        """`ends`: the ids that end an answer; they are allowed where the JSON is whole."""
        self._make = lambda: _guidance_tokenizer(tokenizer, ends)
        self._made: Any = None

    def matcher(self, schema: dict[str, Any]) -> Callable[[], Any]:
        """A maker of matchers, one for each answer. Raises ApiError for a wrong schema."""
        from llguidance import LLMatcher

        return self._maker(lambda: LLMatcher.grammar_from_json_schema(json.dumps(schema)), "response_format")

    def lark_matcher(self, grammar: str, param: str) -> Callable[[], Any]:
        """The same for a grammar of Lark's with schemas within. Raises ApiError, of the key `param`."""
        from llguidance import LLMatcher

        return self._maker(lambda: LLMatcher.grammar_from_lark(grammar), param)

    def _maker(self, make_grammar: Callable[[], str], param: str) -> Callable[[], Any]:
        from llguidance import LLMatcher

        if self._made is None:
            self._made = self._make()
        try:
            grammar = make_grammar()
            wrong = LLMatcher.validate_grammar(grammar, self._made)
        except ValueError as error:
            wrong = str(error)
        if wrong:
            raise ApiError(400, f"the schema cannot be used: {wrong.splitlines()[0][:300]}", param)
        return lambda: LLMatcher(self._made, grammar)


def _guidance_tokenizer(tokenizer: Tokenizer, ends: frozenset[int]) -> Any:
    from llguidance.hf import from_tokenizer

    return from_tokenizer(tokenizer.hf, n_vocab=tokenizer.vocabulary, eos_token=sorted(ends))
