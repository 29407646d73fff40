"""A trained model to use: write, chat, answer, mark names, fill masks, evaluate."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, overload

from artel.api.process import Tell, leaves_process_unchanged, tell
from artel.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from artel.inference import EvaluationResult, OpenedModel
    from artel.objectives import Reply


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer that a question answering model found in a text."""

    text: str
    """The answer as written in the text; empty if the model found none."""
    start: int
    """Start offset, from 0; -1 if there is no answer."""
    end: int
    """End offset, exclusive."""
    score: float
    """Logits of start and end less those of no answer: above 0 the model is for the answer."""
    answer_class: str
    """Of models with five heads (yes, no, short, long, unknown), else empty or as the model has it."""
    classes: dict[str, float] | None
    """The probability of each class, of models with five heads."""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Entity:
    """A name in a text, or a word with its tag."""

    start: int
    """Start offset, from 0."""
    end: int
    """End offset, exclusive."""
    label: str
    text: str
    score: float
    """The mean probability of its words' tags, 0 to 1."""

    def __str__(self) -> str:
        return f"{self.text} ({self.label})"


@dataclass(frozen=True, slots=True)
class Filled:
    """A text with what was missing put in."""

    text: str
    masks: list[list[tuple[str, float]]]
    """For each mask the likeliest tokens with their probabilities (0 to 1), best first; empty of a model that is given
    no masks, and finds itself what is missing."""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Ranked:
    """A document that a model ranked."""

    index: int
    """Its place among the documents as they were given, counted from 0."""
    document: str
    score: float
    """The probability that it matches the query, 0 to 1."""


@leaves_process_unchanged(with_torch=True)
def open(name: str | os.PathLike[str], *, device: str | None = None) -> Model:
    """Open a model: the final one of a run, its newest checkpoint while it trains, or any Hugging Face model.

    Args:
        name: the folder of a run, a model folder (an adapter is opened with its base), or a hub id.
        device: where it computes, as PyTorch names it: cpu, cuda, cuda:1; by default the GPU, where there is one.

    Raises InputError where there is no such model, it is damaged, or has no room there.
    """
    from artel.launching.quiet_libraries import quiet_libraries

    quiet_libraries()
    from artel.inference import open_model
    from artel.models.device import device_named

    return Model(open_model(os.fspath(name), None if device is None else device_named(device)))


class Model:
    """A model with its tokenizer, as `artel.open` returns it. What it cannot do it says: InputError."""

    def __init__(self, opened: OpenedModel) -> None:
        self._opened = opened

    @property
    def model(self) -> PreTrainedModel:
        """The transformers model."""
        return self._opened.model

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The transformers tokenizer."""
        return self._opened.tokenizer.hf

    @property
    def objective(self) -> str:
        """What it learned, by the name in a run file; for a model that no run trained, what its head is for."""
        return self._opened.objective.config.objective

    def generate(
        self,
        prompt: str = "",
        *,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        top_k: int = 50,
        top_p: float = 1.0,
        seed: int = 0,
        repetition_penalty: float = 1.0,
        beams: int | None = None,
    ) -> str:
        """Continue a text; of a chat model, answer a message; of a seq2seq model, write the text for another.

        Returns what is written, without the prompt.

        Args:
            prompt: the text to continue, empty to begin a new document; of a seq2seq model its input.
            max_new_tokens: tokens to write at most; by default 100, of seq2seq as many as an output may have.
            temperature: 0 takes the likeliest token; by default 0.8, of seq2seq 0.
            top_k: choose among the k likeliest tokens; 0 for all.
            top_p: choose among the likeliest tokens that sum to p.
            seed: equal seeds write equal texts. The random state of PyTorch is not used, and does not change.
            repetition_penalty: above 1 avoids tokens already there.
            beams: of a seq2seq model at temperature 0: search for the likeliest text by so many beams.

        Raises InputError for a model that does not write token by token, and for settings out of range.
        """
        return "".join(
            self.stream(
                prompt,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                seed=seed,
                repetition_penalty=repetition_penalty,
                beams=beams,
            )
        )

    def stream(
        self,
        prompt: str = "",
        *,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        top_k: int = 50,
        top_p: float = 1.0,
        seed: int = 0,
        repetition_penalty: float = 1.0,
        beams: int | None = None,
    ) -> Iterator[str]:
        """The same as `generate`, in pieces of whole characters, as soon as they are written."""
        from artel.inference.chat import ChatSettings

        objective = self._opened.objective
        if not (objective.generates or "generate" in objective.tasks):
            raise self._cannot("writes no text of its own")
        if beams is not None and objective.generates:
            raise InputError.at("beams", f"{self._opened.name} does not search", "leave it out: seq2seq models do")
        if beams is not None and not 1 <= beams <= 100:
            raise InputError.at("beams", f"{beams} is out of range", "it goes from 1 to 100")
        if beams is not None and temperature:
            raise InputError.at("beams", "searches for the likeliest text, and a temperature samples", "leave one out")
        sampling = objective.sampling(
            new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            repetition_penalty=repetition_penalty,
            beams=beams,
        )
        ChatSettings(  # refuses what is out of range
            0, sampling.new_tokens, repetition_penalty, sampling.temperature, top_p, top_k, seed
        )
        return iter(self._reply(prompt, "", sampling).pieces)

    @leaves_process_unchanged()
    def chat(
        self,
        messages: str | Sequence[Mapping[str, str]],
        *,
        system: str = "",
        max_new_tokens: int = 200,
        temperature: float = 0.5,
        top_k: int = 40,
        top_p: float = 0.6,
        seed: int = 0,
        repetition_penalty: float = 1.2,
        tell: Tell = tell,
    ) -> str:
        """The answer to a message, or to the last of a conversation, written by the model's chat template.

        Args:
            messages: a message; or `{"role": "user", "content": "…"}` and so on, user and assistant by turns, a system
                message before them if you like, the user's message last.
            system: the system message: who the model is to be.
            max_new_tokens, temperature, top_k, top_p, seed, repetition_penalty: as in `generate`.
            tell: is called with notes: that the answer was cut off, that earlier messages did not fit.

        Raises InputError for a model that does not write, and for a conversation that its template refuses.
        """
        from artel.inference import ChatSession, ChatSettings
        from artel.inference.chat_exchanges import Exchange

        system_message, pairs, message = _conversation(messages)
        settings = ChatSettings(len(pairs), max_new_tokens, repetition_penalty, temperature, top_p, top_k, seed)
        with closing(ChatSession(self._opened, settings, system or system_message, tell)) as session:
            session.exchanges = [Exchange(question, answer, True) for question, answer in pairs]
            return "".join(session.answer(message))

    @leaves_process_unchanged()
    def answer(self, question: str, context: str) -> Answer:
        """Find the answer to a question in a text of any length, which is read in windows.

        Raises InputError for a model that did not learn to answer questions.
        """
        if "answer" not in self._opened.objective.tasks:
            raise self._cannot("finds no answers in texts")
        found = self._reply(question, context, None).to_json or {}
        return Answer(found["answer"], found["start"], found["end"], found["score"], found["class"], found["classes"])

    @overload
    def entities(self, text: str) -> list[Entity]: ...

    @overload
    def entities(self, text: list[str]) -> list[list[Entity]]: ...

    @leaves_process_unchanged()
    def entities(self, text: str | list[str]) -> list[Entity] | list[list[Entity]]:
        """The names in a text of any length, which is read in windows, in order; or of each of several texts.

        Of a model that gives each word a tag they are the words.

        Raises InputError for a model that did not learn to mark names or tag words.
        """
        answers = self._answers("entities", [text] if isinstance(text, str) else text, "marks nothing in texts")
        found = [[Entity(**entity) for entity in answer["entities"]] for answer in answers]
        return found[0] if isinstance(text, str) else found

    @leaves_process_unchanged()
    def fill(self, text: str) -> Filled:
        """Put in what is missing: a word for each mask, or the commas, by what the model learned.

        Raises InputError for a model that fills nothing in, and for a text without masks where it needs them.
        """
        objective = self._opened.objective
        if objective.generates or objective.tasks:
            raise self._cannot("fills nothing in")
        reply = self._reply(text, "", None)
        filled = "".join(reply.pieces)
        masks = (reply.to_json or {}).get("masks", [])
        return Filled(filled, [[(token["token"], token["probability"]) for token in mask] for mask in masks])

    @leaves_process_unchanged()
    def classify(self, texts: str | Sequence[str | Sequence[str]]) -> Any:
        """The label of a text, its labels, or its number, by what the model learned.

        Args:
            texts: a text; or several, each a text or a pair of texts.

        Returns:
            A dictionary for a text, a list of them for several: `label` and its `probability`, or the `labels` above
            their thresholds, and the `probabilities` of all; or `number`. `truncated` is there for a text that was cut.

        Raises InputError for a model that labels nothing.
        """
        inputs = [texts] if isinstance(texts, str) else list(texts)
        answers = self._answers("classify", inputs, "labels no texts")
        return answers[0] if isinstance(texts, str) else answers

    @leaves_process_unchanged()
    def score(self, prompt: str | Sequence[Mapping[str, str]], answers: str | Sequence[str]) -> list[float]:
        """The score of each answer to a prompt, higher for better ones.

        A reward model gives a number around 0, a reranker the probability that query and document match.

        Args:
            prompt: what the user asks; or the messages of a conversation up to the user's last.
            answers: one or several.

        Raises InputError for a model that gives no scores, and for what is too long for it.
        """
        listed = [answers] if isinstance(answers, str) else answers
        scored = self._answers("score", [(prompt, answer) for answer in listed], "gives no scores")
        return [float(answer["score"]) for answer in scored]

    @leaves_process_unchanged()
    def rerank(self, query: str, documents: Sequence[str], *, top_n: int | None = None) -> list[Ranked]:
        """Documents in the order of how well they answer a query, the best one first.

        Args:
            query: what is looked for.
            documents: what was found.
            top_n: how many of them to give back; all where it is None.

        Raises InputError for a model that does not rank, and for a query that is too long.
        """
        documents = [documents] if isinstance(documents, str) else documents
        scored = self._answers("rerank", [(query, document) for document in documents], "ranks no documents")
        ranked = [
            Ranked(index, document, float(answer["score"]))
            for index, (document, answer) in enumerate(zip(documents, scored, strict=True))
        ]
        return sorted(ranked, key=lambda one: -one.score)[:top_n]

    @leaves_process_unchanged()
    def embed(
        self, texts: str | Sequence[str], *, kind: Literal["", "query", "document"] = "", dimensions: int | None = None
    ) -> np.ndarray:
        """The vector of each text, float32 (texts, size), or (size,) of one text: near one another where texts match.

        Args:
            texts: what is read of each is as long as `data.block` of the run.
            kind: puts the run's prompt for queries or for documents before each text; without it none.
            dimensions: the first so many numbers of each vector, for models that learned it (`embedding.matryoshka`).

        Raises InputError for a model that learned something else, and for a text without a token.
        """
        import numpy as np

        listed = [texts] if isinstance(texts, str) else texts
        inputs = [{"text": text, "input_type": kind, "dimensions": dimensions} for text in listed]
        answers = self._answers("embed", inputs, "gives texts no vectors")
        vectors = np.array([answer["embedding"] for answer in answers], dtype=np.float32)
        return vectors[0] if isinstance(texts, str) else vectors

    @leaves_process_unchanged(with_torch=True)
    def evaluate(
        self,
        data: str | os.PathLike[str] | None = None,
        overrides: Mapping[str, Any] | None = None,
        *,
        corpus: str | os.PathLike[str] | None = None,
        tell: Tell = tell,
    ) -> EvaluationResult:
        """The objective's figures: on the validation part of the model's run, on `data`, or on a `corpus`.

        Args:
            data: a file, folder or glob, all of it; or a run file, whose validation part it is then.
            overrides: values for dotted keys of the run that is evaluated: `{"data.block": 256}`.
            corpus: of embeddings: a file or glob of texts, among which the queries of `data` are to find their
                documents; or a folder in BEIR's format, with its own queries.
            tell: is called with each message for people, a line of text.

        Returns:
            `figures` by name (`loss` in nats a target token, `bits_per_byte`, `accuracy` 0 to 1 …), `documents`,
            `samples` (on a corpus its queries), `tokens` (on a corpus None), `seconds`.

        Raises InputError where there is nothing to evaluate on, or the data is for another objective.
        """
        from artel.inference import evaluate, evaluate_on_corpus
        from artel.launching.interface import choose_interface_of_process
        from artel.launching.quiet_libraries import quiet_libraries
        from artel.launching.started import check_worker
        from artel.parallel import join_world

        quiet_libraries()
        path = None if data is None else os.fspath(data)
        if corpus is not None and overrides:
            raise InputError.at("overrides", "have no meaning on a corpus", "leave them out")
        if corpus is not None:
            return evaluate_on_corpus(self._opened, os.fspath(corpus), path, tell)
        check_worker()
        choose_interface_of_process()
        with join_world(None) as world:
            return evaluate(self._opened, path, overrides or {}, world, tell)

    def __repr__(self) -> str:
        count = sum(parameter.numel() for parameter in self.model.parameters())
        return f"artel.open({self._opened.name!r})  # {self.objective}, {count:,} parameters"

    def _reply(self, prompt: str, context: str, sampling: Any) -> Reply:
        """What the objective makes of a prompt, as `artel generate` asks for it."""
        return self._opened.objective.reply(self._opened.model, prompt, context, sampling)

    def _answers(self, task: str, inputs: list[Any], cannot: str) -> list[dict[str, Any]]:
        """What the objective answers to a task (`Objective.tasks`). Raises InputError for a model without it."""
        objective = self._opened.objective
        if task not in objective.tasks:
            raise self._cannot(cannot)
        return objective.answers(self._opened.model, task, inputs)

    def _cannot(self, what: str) -> InputError:
        """The error for what this model did not learn, which names what it can do."""
        objective = self._opened.objective
        able = "generate and chat" if objective.generates else " and ".join(objective.tasks) or "fill"
        return InputError.at(self._opened.name, f"is a model for {self.objective}, which {what}", f"use {able}")


def _conversation(messages: str | Sequence[Mapping[str, str]]) -> tuple[str, list[tuple[str, str]], str]:
    """(system message, earlier pairs of message and answer, the message to answer)."""
    if isinstance(messages, str):
        return "", [], messages
    turns = [(message.get("role"), message.get("content", "")) for message in messages]
    system = turns.pop(0)[1] if turns and turns[0][0] == "system" else ""
    roles = [role for role, _ in turns]
    if len(turns) % 2 == 0 or roles != ["user", "assistant"] * (len(turns) // 2) + ["user"]:
        what = f"has the roles {', '.join(map(str, roles)) or 'of nobody'}"
        raise InputError.at("messages", what, "write user and assistant by turns, and a message of the user last")
    texts = [text for _, text in turns]
    return system, list(zip(texts[:-1:2], texts[1::2], strict=True)), texts[-1]
