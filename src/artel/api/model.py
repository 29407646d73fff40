"""A trained model: generate, chat, answer questions, find entities, fill masks, evaluate."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, overload

from artel.api.process import leaves_process_unchanged
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
    """The answer as written in the text. Empty if the model found none."""
    start: int
    """Start offset, from 0, or -1 if there is no answer."""
    end: int
    """End offset, exclusive."""
    score: float
    """Logits of start and end minus those of "no answer". Above 0, the model prefers the answer."""
    answer_class: str
    """Predicted class of a model with five classes (yes, no, short, long, unknown). Otherwise usually empty."""
    classes: dict[str, float] | None
    """Probability of each class, for models with five classes."""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Entity:
    """An entity in a text, or a word with its tag."""

    start: int
    """Start offset, from 0."""
    end: int
    """End offset, exclusive."""
    label: str
    text: str
    score: float
    """Mean probability of the tags of its words, 0 to 1."""

    def __str__(self) -> str:
        return f"{self.text} ({self.label})"


@dataclass(frozen=True, slots=True)
class Filled:
    """A text with its masks filled in."""

    text: str
    masks: list[list[tuple[str, float]]]
    """The most likely tokens for each mask with their probabilities (0 to 1), best first. Empty for models that insert
    words without masks."""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Ranked:
    """A document and its score for a query."""

    index: int
    """Index of the document in the input, from 0."""
    document: str
    score: float
    """Probability that the document matches the query, 0 to 1."""


@leaves_process_unchanged(with_torch=True)
def open(name: str | os.PathLike[str], *, device: str | None = None) -> Model:
    """Open a model: the final model of a run, its newest checkpoint while it trains, or any Hugging Face model.

    Args:
        name: the folder of a run, a model folder (an adapter is opened with its base), or a hub id.
        device: a PyTorch device: cpu, cuda, cuda:1. By default the GPU, if there is one.

    Raise InputError if the model does not exist, is damaged, or does not fit on the device.
    """
    from artel.launching.quiet_libraries import quiet_libraries

    quiet_libraries()
    from artel.inference import open_model
    from artel.models.device import parse_device

    return Model(open_model(os.fspath(name), None if device is None else parse_device(device)))


class Model:
    """A model with its tokenizer, as returned by `artel.open`. Methods that it does not support raise InputError."""

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
        """Name of the objective. For a model that artel did not train, the objective that fits its head."""
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
        """Continue a text. A chat model answers a message, a seq2seq model writes its output for an input.

        Return the generated text without the prompt.

        Args:
            prompt: the text to continue, empty to start a new document; for seq2seq the input.
            max_new_tokens: maximum number of new tokens. Default: 100; for seq2seq the longest output of the run.
            temperature: 0 always picks the most likely token. Default: 0.8; for seq2seq 0.
            top_k: sample from the k most likely tokens; 0 for all.
            top_p: sample from the most likely tokens whose probabilities add up to p.
            seed: the same seed gives the same text. PyTorch's random state is neither used nor changed.
            repetition_penalty: above 1 avoids tokens that occurred before.
            beams: number of beams of a beam search, for seq2seq models at temperature 0.

        Raise InputError for models that do not generate text, and for settings out of range.
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
        """Like `generate`, but yield chunks of text (complete characters) as soon as they are generated."""
        from artel.inference.chat import ChatSettings

        objective, decoding = self._opened.objective, self._opened.decoding
        if not (objective.generates or "generate" in decoding.tasks):
            raise self._unsupported_error("does not generate text")
        if beams is not None and objective.generates:
            raise InputError.at("beams", f"{self._opened.name} does not support beam search", "remove it")
        if beams is not None and not 1 <= beams <= 100:
            raise InputError.at("beams", f"{beams} is out of range", "use 1 to 100")
        if beams is not None and temperature:
            raise InputError.at("beams", "cannot be combined with a temperature, which samples", "remove one of them")
        sampling = decoding.sampling(
            new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            repetition_penalty=repetition_penalty,
            beams=beams,
        )
        ChatSettings(  # raises for values out of range
            0, sampling.new_tokens, repetition_penalty, sampling.temperature, top_p, top_k, seed
        )
        return iter(self._compute_reply(prompt, "", sampling).pieces)

    @leaves_process_unchanged(prints=True)
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
    ) -> str:
        """Answer a message, or the last message of a conversation, with the model's chat template.

        Args:
            messages: a message; or a list such as `[{"role": "user", "content": "…"}]`, in which user and assistant
                alternate, optionally after a system message, and the user's message comes last.
            system: the system message.
            max_new_tokens, temperature, top_k, top_p, seed, repetition_penalty: as in `generate`.

        Raise InputError for models that do not generate text, and for conversations that the template rejects.
        """
        from artel.inference import ChatSession, ChatSettings
        from artel.inference.chat import Exchange

        system_message, pairs, message = _split_conversation(messages)
        settings = ChatSettings(len(pairs), max_new_tokens, repetition_penalty, temperature, top_p, top_k, seed)
        with closing(ChatSession(self._opened, settings, system or system_message)) as session:
            session.exchanges = [Exchange(question, answer, True) for question, answer in pairs]
            return "".join(session.answer(message))

    @leaves_process_unchanged()
    def answer(self, question: str, context: str) -> Answer:
        """Find the answer to a question in a text of any length. Long texts are read in windows.

        Raise InputError for models that were not trained to answer questions.
        """
        if "answer" not in self._opened.decoding.tasks:
            raise self._unsupported_error("does not answer questions")
        fields = self._compute_reply(question, context, None).to_json or {}
        return Answer(
            fields["answer"], fields["start"], fields["end"], fields["score"], fields["class"], fields["classes"]
        )

    @overload
    def entities(self, text: str) -> list[Entity]: ...

    @overload
    def entities(self, text: list[str]) -> list[list[Entity]]: ...

    @leaves_process_unchanged()
    def entities(self, text: str | list[str]) -> list[Entity] | list[list[Entity]]:
        """Return the entities in a text, in order, or for several texts a list per text.

        Long texts are read in windows, so a text may have any length. A model that tags words returns every word.

        Raise InputError for models that were not trained to find entities or tag words.
        """
        answers = self._compute_answers("entities", [text] if isinstance(text, str) else text, "does not find entities")
        results = [[Entity(**entity) for entity in answer["entities"]] for answer in answers]
        return results[0] if isinstance(text, str) else results

    @leaves_process_unchanged()
    def fill(self, text: str) -> Filled:
        """Fill in a text: a word for each mask, or missing commas, depending on the model.

        Raise InputError for models that cannot fill in text, and if a masked model is given a text without masks.
        """
        if self._opened.objective.generates or self._opened.decoding.tasks:
            raise self._unsupported_error("does not fill in text")
        reply = self._compute_reply(text, "", None)
        filled = "".join(reply.pieces)
        masks = (reply.to_json or {}).get("masks", [])
        return Filled(filled, [[(token["token"], token["probability"]) for token in mask] for mask in masks])

    @leaves_process_unchanged()
    def classify(self, texts: str | Sequence[str | Sequence[str]]) -> Any:
        """Classify texts. Depending on the model, each gets one label, several labels, or a number.

        Args:
            texts: a text; or several, each a text or a pair of texts.

        Returns:
            A dictionary, or a list of them for several texts. It has `label` and its `probability`, or the `labels`
            above their thresholds, and the `probabilities` of all; or `number`. `truncated` is set if a text was cut.

        Raise InputError for models that are not classifiers.
        """
        inputs = [texts] if isinstance(texts, str) else list(texts)
        answers = self._compute_answers("classify", inputs, "does not classify texts")
        return answers[0] if isinstance(texts, str) else answers

    @leaves_process_unchanged()
    def score(self, prompt: str | Sequence[Mapping[str, str]], answers: str | Sequence[str]) -> list[float]:
        """Score answers to a prompt; a higher score is better.

        A reward model returns numbers around 0, a reranker the probability that query and document match.

        Args:
            prompt: the user's message; or the messages of a conversation, ending with the user's.
            answers: one answer or several.

        Raise InputError for models that do not score, and for inputs that are too long.
        """
        items = [answers] if isinstance(answers, str) else answers
        scores = self._compute_answers("score", [(prompt, answer) for answer in items], "does not score answers")
        return [float(score["score"]) for score in scores]

    @leaves_process_unchanged()
    def rerank(self, query: str, documents: Sequence[str], *, top_n: int | None = None) -> list[Ranked]:
        """Sort documents by how well they match a query, best first.

        Args:
            query: the search query.
            documents: the candidates.
            top_n: number of documents to return; None for all.

        Raise InputError for models that are not rerankers, and for a query that is too long.
        """
        documents = [documents] if isinstance(documents, str) else documents
        pairs = [(query, document) for document in documents]
        scores = self._compute_answers("rerank", pairs, "does not rank documents")
        ranked = [
            Ranked(index, document, float(score["score"]))
            for index, (document, score) in enumerate(zip(documents, scores, strict=True))
        ]
        return sorted(ranked, key=lambda ranking: -ranking.score)[:top_n]

    @leaves_process_unchanged()
    def embed(
        self, texts: str | Sequence[str], *, kind: Literal["", "query", "document"] = "", dimensions: int | None = None
    ) -> np.ndarray:
        """Return embeddings as float32, (texts, size), or (size,) for a single text. Similar texts have close vectors.

        Args:
            texts: one text or several. Each is cut to `data.block` tokens of the run.
            kind: prepends the run's prompt for queries or for documents. By default none is prepended.
            dimensions: keep only the first dimensions, for models trained for that (`embedding.matryoshka`).

        Raise InputError for models that are not embedding models, and for a text without a token.
        """
        import numpy as np

        items = [texts] if isinstance(texts, str) else texts
        inputs = [{"text": text, "input_type": kind, "dimensions": dimensions} for text in items]
        answers = self._compute_answers("embed", inputs, "does not embed texts")
        vectors = np.array([answer["embedding"] for answer in answers], dtype=np.float32)
        return vectors[0] if isinstance(texts, str) else vectors

    @leaves_process_unchanged(with_torch=True, prints=True)
    def evaluate(
        self,
        data: str | os.PathLike[str] | None = None,
        overrides: Mapping[str, Any] | None = None,
        *,
        corpus: str | os.PathLike[str] | None = None,
    ) -> EvaluationResult:
        """Compute the objective's metrics on the validation split of the model's run, on `data`, or on a `corpus`.

        Args:
            data: a file, folder or glob, used in full; or a run file, whose validation split is used.
            overrides: values for dotted keys of the evaluated run: `{"data.block": 256}`.
            corpus: for embeddings: a file or glob of texts to search with the queries of `data`; or a folder in BEIR's
                format, which has its own queries.

        Returns:
            `metrics` by name (`loss` in nats per target token, `bits_per_byte`, `accuracy` 0 to 1 …), `documents`,
            `samples` (for a corpus, its queries), `tokens` (for a corpus, None), `seconds`.

        Raise InputError if there is nothing to evaluate on, or if the data does not fit the objective.
        """
        from artel.inference import evaluate, evaluate_on_corpus
        from artel.launching.hosts import choose_process_interface
        from artel.launching.launcher_environment import check_worker
        from artel.launching.quiet_libraries import quiet_libraries
        from artel.parallel import join_world

        quiet_libraries()
        path = None if data is None else os.fspath(data)
        if corpus is not None and overrides:
            raise InputError.at("overrides", "cannot be combined with corpus", "remove them")
        if corpus is not None:
            return evaluate_on_corpus(self._opened, os.fspath(corpus), path)
        check_worker()
        choose_process_interface()
        with join_world(None) as world:
            return evaluate(self._opened, path, overrides or {}, world)

    def __repr__(self) -> str:
        parameter_count = sum(parameter.numel() for parameter in self.model.parameters())
        return f"artel.open({self._opened.name!r})  # {self.objective}, {parameter_count:,} parameters"

    def _compute_reply(self, prompt: str, context: str, sampling: Any) -> Reply:
        """Return the objective's reply to a prompt, as in `artel generate`."""
        return self._opened.decoding.reply(self._opened.model, prompt, context, sampling)

    def _compute_answers(self, task: str, inputs: list[Any], reason: str) -> list[dict[str, Any]]:
        """Return the answers to a task (`Decoding.tasks`). Raise InputError if the model does not support it."""
        if task not in self._opened.decoding.tasks:
            raise self._unsupported_error(reason)
        return self._opened.decoding.run_task(self._opened.model, task, inputs)

    def _unsupported_error(self, reason: str) -> InputError:
        """Return the error for an unsupported task, with the supported ones."""
        tasks = " and ".join(self._opened.decoding.tasks) or "fill"
        supported = "generate and chat" if self._opened.objective.generates else tasks
        return InputError.at(self._opened.name, f"is a model for {self.objective}, which {reason}", f"use {supported}")


def _split_conversation(messages: str | Sequence[Mapping[str, str]]) -> tuple[str, list[tuple[str, str]], str]:
    """Split into (system message, earlier pairs of message and answer, message to answer).

    Raise InputError if user and assistant do not alternate, or the last message is not the user's.
    """
    if isinstance(messages, str):
        return "", [], messages
    turns = [(message.get("role"), message.get("content", "")) for message in messages]
    system = turns.pop(0)[1] if turns and turns[0][0] == "system" else ""
    roles = [role for role, _ in turns]
    if len(turns) % 2 == 0 or roles != ["user", "assistant"] * (len(turns) // 2) + ["user"]:
        reason = f"has the roles {', '.join(map(str, roles)) or 'none'}"
        raise InputError.at("messages", reason, "alternate user and assistant, and end with a message of the user")
    texts = [text for _, text in turns]
    return system, list(zip(texts[:-1:2], texts[1::2], strict=True)), texts[-1]
