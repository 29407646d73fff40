"""Tokenizers of different kinds and texts: what a teacher and its student may have."""

import json

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from artel.config import TokenizerTraining
from artel.tokens import Tokenizer, train_tokenizer

ENGLISH = "The frost and the sun, a wonderful day! You are still asleep, my lovely friend, it is time to wake up. " * 5
OTHER = (
    "The rain and the wind, an awful night. We are awake, my old friend, and the frost is here to stay, they say. " * 5
)
RUSSIAN = "Мороз и солнце; день чудесный! Ещё ты дремлешь, друг прелестный, пора, красавица, проснись. " * 5


def byte_level(text, vocab=310):
    return train_tokenizer(iter([text]), TokenizerTraining(vocab=vocab), encoder=False)


def sentencepiece(text, vocab=120):
    """A Unigram model as SentencePiece writes it: ▁ for spaces, one before each text, and tokens of single bytes."""
    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<unk>", "</s>"]
    trainer = trainers.UnigramTrainer(vocab_size=vocab, special_tokens=special, unk_token="<unk>", show_progress=False)
    backend.train_from_iterator([text], trainer)
    state = json.loads(backend.to_str())
    pieces = state["model"]["vocab"]
    state["model"]["vocab"] = [*pieces[:2], *([f"<0x{byte:02X}>", -20.0] for byte in range(256)), *pieces[2:]]
    state["model"]["byte_fallback"] = True
    return fast(Backend.from_str(json.dumps(state)), decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]))


def fast(backend, decoder):
    backend.decoder = decoder
    roles = {"eos_token": "</s>", "unk_token": "<unk>"}
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, **roles), "tokenizer")
