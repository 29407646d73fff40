"""Answers in JSON: at each token, llguidance masks what a schema does not allow.

A schema can take any amount of work (`multipleOf: 999983` takes a minute, on the way to one state a remainder), and
some fail only when the first token is masked (`{"$ref": "#"}`). So each is first tried in a process that can be ended.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from artel.inference.serve.errors import ApiError
from artel.tokens import Tokenizer
from artel.tokens.tokenizer.template_limits import run_in_child

ANY_OBJECT = {"type": "object"}
WRITTEN: Any = {"whitespace_pattern": r"[ ]|\n[ ]{0,40}"}
"""White space allowed between the parts of JSON: without a limit weak models write nothing else up to `max_tokens`."""
_SECONDS = 3
"""CPU time allowed for a schema, up to the first token."""
_MOST_STATES = 20_000
"""Limit of llguidance's lexer. A state takes up to 2 kB; with the default of 250,000 a step took 7 s."""
_MOST_KEPT = 16
"""Matchers that are cached, one for each schema."""


class Grammars:
    """Makes matchers for a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, ends: frozenset[int]) -> None:
        """`ends`: the ids that end an answer; they are allowed where the JSON is whole."""
        self._make = lambda: _guidance_tokenizer(tokenizer, ends)
        self._made: Any = None
        self._matchers: dict[str, Any] = {}

    def matcher(self, schema: dict[str, Any]) -> Callable[[], Any]:
        """A maker of matchers, one for each answer. Raises ApiError for a wrong schema."""
        from llguidance import LLMatcher

        return self._maker(lambda: LLMatcher.grammar_from_json_schema(json.dumps(schema), WRITTEN), "response_format")

    def lark_matcher(self, grammar: str, param: str) -> Callable[[], Any]:
        """The same for a grammar of Lark's with schemas within. Raises ApiError, of the key `param`."""
        from llguidance import LLMatcher

        return self._maker(lambda: LLMatcher.grammar_from_lark(grammar), param)

    def _maker(self, make_grammar: Callable[[], str], param: str) -> Callable[[], Any]:
        if self._made is None:
            self._made = self._make()
        try:
            grammar = make_grammar()
        except ValueError as error:
            raise _refusal(str(error), param) from None
        if grammar not in self._matchers:
            said = run_in_child(lambda: self._tried(grammar), _SECONDS, otherwise="no grammar can be made of it")
            if said != "fine":
                limits = {"end": f"it takes more than {_SECONDS} s of work", "memory": "it takes too much memory"}
                raise _refusal(limits.get(said, said), param)
            while len(self._matchers) >= _MOST_KEPT:
                del self._matchers[next(iter(self._matchers))]
            self._matchers[grammar] = self._matcher(grammar)
        return self._matchers[grammar].deep_copy

    def _matcher(self, grammar: str) -> Any:
        from llguidance import LLMatcher, LLParserLimits

        return LLMatcher(self._made, grammar, limits=LLParserLimits(max_lexer_states=_MOST_STATES))

    def _tried(self, grammar: str) -> str:
        """Return "fine", or what is wrong with a grammar up to the first token of an answer."""
        from llguidance import LLMatcher, LLParserLimits
        from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

        wrong = LLMatcher.validate_grammar(grammar, self._made, limits=LLParserLimits(max_lexer_states=_MOST_STATES))
        if wrong:
            return str(wrong)
        matcher = self._matcher(grammar)
        if not matcher.is_error():
            fill_next_token_bitmask(matcher, allocate_token_bitmask(1, self._made.vocab_size), 0)
        return matcher.get_error() or "fine"


def _refusal(why: str, param: str) -> ApiError:
    reason = why.splitlines()[0][:300].replace("NoExtensionBias", "no answer can satisfy it")
    return ApiError(400, f"the schema cannot be used: {reason}", param)


def _guidance_tokenizer(tokenizer: Tokenizer, ends: frozenset[int]) -> Any:
    from llguidance.hf import from_tokenizer

    return from_tokenizer(tokenizer.hf, n_vocab=tokenizer.vocabulary, eos_token=sorted(ends))
