"""Writing with a model: the tokens of transformers' generate, the window, where a text stops."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, MambaConfig, MambaForCausalLM, RwkvConfig, RwkvForCausalLM

from artel.generation.generate import Sampling, generate_from_ids, generate_text, generate_tokens
from artel.tokens import Tokenizer
from artel.tokens.tokenizer.chat_template import TurnEnd
from support.chat_models import MARKS, llama, said, trained_tokenizer


def random_gpt2(tokenizer: Tokenizer) -> GPT2LMHeadModel:
    torch.manual_seed(1)
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 128}
    ends = {"eos_token_id": tokenizer.end_id, "bos_token_id": tokenizer.end_id}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=tokenizer.vocabulary, **sizes, **ends)).eval()
    for parameter in model.parameters():
        parameter.data.mul_(6)  # logits far enough apart that what is sampled is no plain noise
    return model


def random_mamba(tokenizer: Tokenizer) -> MambaForCausalLM:
    """Its cache is of states and not of keys and values, and was called otherwise before transformers 5.24."""
    torch.manual_seed(1)
    return MambaForCausalLM(MambaConfig(vocab_size=tokenizer.vocabulary, hidden_size=32, num_hidden_layers=2)).eval()


def random_rwkv(tokenizer: Tokenizer) -> RwkvForCausalLM:
    """It takes no cache of transformers'."""
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2}
    return RwkvForCausalLM(RwkvConfig(vocab_size=tokenizer.vocabulary, **sizes)).eval()


SAMPLED = {"temperature": 0.7, "top_k": 20, "top_p": 0.8}


@pytest.mark.parametrize("kind", [random_gpt2, llama])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [({"temperature": 0.0}, {"do_sample": False}), ({**SAMPLED, "seed": 5}, {**SAMPLED, "do_sample": True})],
    ids=["likeliest", "sampled"],
)
def test_tokens_are_those_of_transformers_generate(kind, ours, theirs):
    tokenizer = trained_tokenizer(MARKS)
    model = kind(tokenizer)
    ids = next(tokenizer.encode(["the name of the model is"])).tolist()
    written = {}
    for penalty in (1.0, 1.2):
        sampling = Sampling(new_tokens=40, repetition_penalty=penalty, **ours)
        written[penalty] = list(generate_tokens(model, tokenizer, ids, sampling, 128, frozenset()))
        torch.manual_seed(sampling.seed)
        more = {"repetition_penalty": penalty, "eos_token_id": None, "pad_token_id": 0, **theirs}
        expected = model.generate(torch.tensor([ids]), max_new_tokens=40, **more)
        assert written[penalty] == expected[0, len(ids) :].tolist()
    assert written[1.0] != written[1.2]


@pytest.mark.parametrize("kind", [random_gpt2, random_mamba, random_rwkv])
def test_a_full_window_goes_on_with_its_newer_half(kind):
    tokenizer = trained_tokenizer(MARKS)
    model = kind(tokenizer)
    ids = next(tokenizer.encode(["the name of the model is that"])).tolist()
    sampling = Sampling(new_tokens=40, temperature=0, repetition_penalty=1.5)
    written = list(generate_tokens(model, tokenizer, ids, sampling, 16, frozenset()))
    start, everything = 0, list(ids)
    for token in written:  # as it is without a cache; the penalty goes by all tokens, also those that left
        if len(everything) - start > 16:
            start = len(everything) - 8
        with torch.no_grad():
            logits = model(torch.tensor([everything[start:]])).logits[0, -1]
        seen = torch.tensor(sorted(set(everything)))
        logits[seen] = torch.where(logits[seen] < 0, logits[seen] * 1.5, logits[seen] / 1.5)
        assert token == int(logits.argmax())
        everything.append(token)
    assert start > 16


def test_a_stop_ends_the_text_and_is_never_shown_in_part():
    tokenizer = trained_tokenizer(MARKS)
    model = random_gpt2(tokenizer)
    sampling = Sampling(new_tokens=60, temperature=0, repetition_penalty=1.3)
    ids = next(tokenizer.encode(["the model"])).tolist()
    tokens = list(generate_tokens(model, tokenizer, ids, sampling, 128, frozenset()))
    text = said(generate_from_ids(model, tokenizer, ids, sampling, 128, TurnEnd(frozenset())))
    assert text == tokenizer.hf.decode(tokens, skip_special_tokens=True)
    assert len(text) > 60
    token = tokens[20]
    ended = list(generate_tokens(model, tokenizer, ids, sampling, 128, frozenset({token})))
    assert ended == tokens[: tokens.index(token)]
    for start in range(5, 50, 3):  # a stop of seven characters lies across the borders of tokens
        stop = text[start : start + 7]
        end = TurnEnd(frozenset(), (stop, "never written"))
        assert said(generate_from_ids(model, tokenizer, ids, sampling, 128, end)) == text[: text.index(stop)]
    # What may become a stop and does not is shown late, not lost.
    nearly = text[5:11] + "\0"
    assert said(generate_from_ids(model, tokenizer, ids, sampling, 128, TurnEnd(frozenset(), (nearly,)))) == text


def test_special_tokens_are_written_out_by_generate_and_not_by_chat():
    tokenizer = trained_tokenizer(MARKS)
    model = llama(tokenizer)
    mark = tokenizer.hf.convert_tokens_to_ids("<|im_start|>")
    ids = next(tokenizer.encode(["the"])).tolist()
    with torch.no_grad():
        model.model.embed_tokens.weight.fill_(1)  # all tokens are read alike, and answered by one
        model.lm_head.weight.zero_()
        model.lm_head.weight[mark] = model.model(torch.tensor([ids])).last_hidden_state[0, -1]
    sampling = Sampling(new_tokens=3, temperature=0)
    assert said(generate_text(model, tokenizer, "the", sampling, None)) == "<|im_start|>" * 3
    assert said(generate_from_ids(model, tokenizer, ids, sampling, None, TurnEnd(frozenset()))) == ""
