"""Documents in one block that see nothing of one another: each as if it stood alone, in any architecture."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    Gemma3TextConfig,
    GPT2Config,
    GPTJConfig,
    GPTNeoXConfig,
    GptOssConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    ModernBertConfig,
    OpenAIGPTConfig,
    Qwen3Config,
    RobertaConfig,
    RwkvConfig,
)

from artel.config import ModelConfig, RunConfig, TokenizerTraining
from artel.errors import InputError
from artel.models import IGNORED
from artel.models.attention import block_mask
from artel.models.attention_masks import allow_block_masks
from artel.models.attention_switch import use_artel_attention
from artel.models.document_mask import check_documents, document_inputs, document_problems
from artel.objectives import Causal, Masked
from artel.objectives.collate import document_tensors
from artel.storage import new_folder
from artel.text import Document, Record
from artel.tokens import StoreWriter, TokenStore, evaluation_rows, train_tokenizer

SMALL = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
         "vocab_size": 120, "max_position_embeddings": 64, "pad_token_id": 1}  # fmt: skip
GROUPED = {**SMALL, "num_key_value_heads": 2}
LENGTHS = (13, 1, 9, 12)  # most of them longer than the windows below

DECODERS = [
    GPT2Config(n_layer=2, n_embd=36, n_head=4, vocab_size=120),
    LlamaConfig(**GROUPED),
    Qwen3Config(**GROUPED, head_dim=12),
    GPTNeoXConfig(**SMALL),
    MistralConfig(**GROUPED, sliding_window=5),
    Gemma3TextConfig(**GROUPED, head_dim=12, sliding_window=5, layer_types=["sliding_attention", "full_attention"]),
    GptOssConfig(**GROUPED, head_dim=12, num_local_experts=2, num_experts_per_tok=1, sliding_window=5),  # eager
    GPTJConfig(n_layer=2, n_embd=48, n_head=4, rotary_dim=4, vocab_size=120),  # attention of its own
]
ENCODERS = [
    BertConfig(**SMALL),
    RobertaConfig(**SMALL),
    ModernBertConfig(**SMALL, cls_token_id=0, bos_token_id=0, eos_token_id=2, sep_token_id=2, local_attention=6,
                     layer_types=["sliding_attention", "full_attention"]),
]  # fmt: skip


def built(config, kind, seed=0):
    """A model whose documents' influence on one another would be seen: weights ten times as large as usual."""
    torch.manual_seed(seed)
    model = kind.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2)
    return model


def side_by_side(ids, lengths):
    numbers = np.repeat(np.arange(1, len(lengths) + 1), lengths)[None].repeat(len(ids), axis=0)
    return document_tensors(numbers)


@pytest.mark.parametrize(
    ("config", "kept"),
    [(config, kept) for config in DECODERS for kept in (True, False)] + [(config, False) for config in ENCODERS],
    ids=lambda value: getattr(value, "model_type", "for training" if value is True else "as built"),
)
def test_each_document_gets_what_it_gets_alone(config, kept):
    causal = config in DECODERS
    model = built(config, AutoModelForCausalLM if causal else AutoModelForMaskedLM)
    options = {"use_cache": False} if causal else {}
    ids = torch.randint(5, 120, (2, sum(LENGTHS)))
    expected = torch.cat([model(input_ids=piece, **options).logits for piece in ids.split(LENGTHS, dim=1)], dim=1)
    if kept:
        use_artel_attention(model)
    inputs = document_inputs(model, **side_by_side(ids, LENGTHS), causal=causal)
    torch.testing.assert_close(model(input_ids=ids, **options, **inputs).logits, expected, atol=1e-5, rtol=1e-5)
    joined = model(input_ids=ids, **options).logits
    assert (joined - expected).abs().max() > 1e-2  # they do influence one another where nothing is done
    check_documents(model, causal=causal)


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (RwkvConfig(hidden_size=32, num_hidden_layers=2, vocab_size=120), AutoModelForCausalLM),
        (OpenAIGPTConfig(n_layer=2, n_embd=32, n_head=4, vocab_size=120), AutoModelForCausalLM),  # own mask and places
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_models_that_do_not_obey_are_refused(config, kind):
    with pytest.raises(InputError, match=r"data\.document_mask.*" + config.model_type):
        check_documents(built(config, kind), causal=True)


@pytest.mark.parametrize(
    ("config", "refused"),
    [
        ({"model_type": "gpt2"}, False),
        ({"model_type": "gemma3_text"}, False),
        ({"model_type": "mamba", "num_hidden_layers": 1}, False),
        ({"model_type": "rwkv", "num_hidden_layers": 1}, True),
        ({"model_type": "qwen3_next", "num_hidden_layers": 4}, False),
        ({"model_type": "lfm2", "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}, False),
        ({"model_type": "llama4_text"}, True),  # chunks
        ({"model_type": "big_bird"}, True),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_what_a_configuration_shows_is_told_before_any_text_is_read(config, refused):
    problems = document_problems(ModelConfig.model_validate({"config": config}), "AutoModelForCausalLM")
    assert [problem.where for problem in problems] == ["data.document_mask"] * refused
    run = {"model": {"config": config}, "data": {"packing": "best_fit", "document_mask": False}}
    assert Causal.problems(RunConfig.model_validate(run)) == []  # they see one another: nothing to keep apart


TEXTS = [
    "Все счастливые семьи похожи друг на друга. ",
    "Каждая несчастливая семья несчастлива по-своему. " * 9,  # longer than two blocks
    "Дом. ",
    "Всё смешалось в доме Облонских, и жена узнала. ",
    "Положение это продолжалось третий день. " * 2,
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(iter(TEXTS * 20), TokenizerTraining(vocab=300), encoder=True)


def store_of(folder, objective):
    with new_folder(folder) as written:
        writer = StoreWriter(written, vocabulary=300)
        documents = [Document(Record(text, "a.txt", "a"), "train") for text in TEXTS]
        for made in objective.samples(documents):
            writer.add("train", made.samples, 1, "a.txt:1")
        writer.close({})
    return TokenStore(folder).train


def gradients(model):
    found = {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
@pytest.mark.parametrize("micro_batch", [1, 3])
def test_causal_loss_and_gradients_are_those_of_the_documents_alone(tokenizer, tmp_path, packing, micro_batch):
    run = RunConfig.model_validate({"data": {"block": 24, "packing": packing, "document_mask": True}})
    objective = Causal(run, tokenizer)
    part = store_of(tmp_path / "store", objective)
    blocks = objective.dataset(part)
    model = built(LlamaConfig(**{**GROUPED, "vocab_size": tokenizer.vocabulary}), AutoModelForCausalLM)

    # Each piece of a document alone, through transformers' own attention; after it the first token of what follows.
    expected, targets, tokens = torch.zeros(()), 0, 0
    for index in range(len(blocks)):
        for ids, following in pieces_with_targets(blocks.read(index)):
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
            expected = expected + F.cross_entropy(
                logits, torch.tensor(following), ignore_index=IGNORED, reduction="sum"
            )
            targets += sum(target != IGNORED for target in following)
            tokens += len(ids)
    expected.backward()
    reference = gradients(model)

    use_artel_attention(model)
    total, counted, seen = 0.0, 0, 0
    for start in range(0, len(blocks), micro_batch):
        indices = np.arange(start, min(start + micro_batch, len(blocks)))
        batch = objective.batch(evaluation_rows(blocks, indices, micro_batch))
        sums = objective.loss(model, batch)
        assert sums[1] == batch.targets
        sums[0].backward()
        total, counted, seen = total + float(sums[0].detach()), counted + batch.targets, seen + batch.tokens
    assert (counted, seen) == (targets, tokens)
    assert total == pytest.approx(expected.item(), rel=1e-5)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, reference[name], atol=1e-5 * float(reference[name].abs().max()), rtol=1e-5)

    # No target is lost: joined, each token of the blocks is one; packed, each that does not begin a document.
    if packing == "best_fit":
        assert part.tokens - part.samples <= counted < part.tokens
    else:
        assert counted == len(blocks) * 24


def pieces_with_targets(sample):
    """A block's pieces and for each token what follows it in the block, unless that goes on with a cut document."""
    numbers, may = sample.flags >> 1, sample.flags & 1
    for number in range(1, int(numbers[:-1].max()) + 1):
        places = np.flatnonzero(numbers[:-1] == number)
        yield sample.ids[places].tolist(), [int(sample.ids[at + 1]) if may[at + 1] else IGNORED for at in places]


@pytest.mark.parametrize("apart", [True, False])
def test_masked_loss_is_that_of_the_documents_alone_and_padding_is_never_attended_to(tokenizer, tmp_path, apart):
    run = RunConfig.model_validate(
        {"objective": "masked", "data": {"block": 26, "packing": "best_fit", "document_mask": apart}}
    )
    objective = Masked(run, tokenizer)
    blocks = objective.dataset(store_of(tmp_path / "store", objective))
    config = RobertaConfig(**{**SMALL, "vocab_size": tokenizer.vocabulary, "hidden_dropout_prob": 0,
                              "attention_probs_dropout_prob": 0})  # fmt: skip
    model = built(config, AutoModelForMaskedLM)
    batch = objective.batch(evaluation_rows(blocks, np.arange(len(blocks)), len(blocks)))
    ids, targets, numbers = (batch.tensors[name] for name in ("input_ids", "targets", "documents"))
    assert (numbers[:, 0] == 1).all()  # the frame belongs to the first document
    assert ((ids == tokenizer.pad_id) == (numbers == 0)).all()
    assert batch.tokens == int((numbers > 0).sum())
    assert batch.targets == int((targets != IGNORED).sum()) > 0
    expected = torch.zeros(())
    for row in range(len(ids)):
        for number in range(1, int(numbers[row].max()) + 1):
            mine = numbers[row] == number
            logits = model(input_ids=ids[row, mine][None]).logits[0]
            expected = expected + F.cross_entropy(logits, targets[row, mine], ignore_index=IGNORED, reduction="sum")
    sums = objective.loss(model, batch)
    assert sums[0].item() == pytest.approx(expected.item(), rel=1e-5)
    ids[numbers == 0] = 7
    assert objective.loss(model, batch)[0].item() == pytest.approx(expected.item(), rel=1e-5)
    assert int(numbers.max()) == 1 or apart


WITHOUT_DROPOUT = GPT2Config(n_layer=2, n_embd=36, n_head=4, vocab_size=120, attn_pdrop=0)


@pytest.mark.parametrize("config", [WITHOUT_DROPOUT, *DECODERS[1:4]], ids=lambda config: config.model_type)
def test_block_masks_give_what_the_eager_reference_gives(config):
    """As on a GPU: FlexAttention runs on a processor too, uncompiled and without backward."""
    model = built(config, AutoModelForCausalLM)
    numbers = np.repeat(np.arange(1, 5), LENGTHS)[None]
    tensors = document_tensors(numbers)
    ids = torch.arange(numbers.size)[None] % 100
    model.set_attn_implementation("eager")
    expected = model(ids, use_cache=False, **document_inputs(model, **tensors, causal=True)).logits
    use_artel_attention(model)
    allow_block_masks(model, True)
    check_documents(model, causal=True)
    inputs = document_inputs(model, **tensors, causal=True)
    assert isinstance(inputs["attention_mask"], BlockMask)
    with torch.no_grad():
        actual = model(ids, use_cache=False, **inputs).logits
    torch.testing.assert_close(actual, expected, atol=2e-4, rtol=1e-4)


def test_a_model_that_fails_with_block_masks_gets_tensors():
    class Looks(LlamaForCausalLM):
        def forward(self, *args, attention_mask=None, **kwargs):
            if attention_mask is not None:
                attention_mask = attention_mask.logical_and(attention_mask)
            return super().forward(*args, attention_mask=attention_mask, **kwargs)

    model = Looks(LlamaConfig(**GROUPED)).eval()
    use_artel_attention(model)
    allow_block_masks(model, True)
    numbers = document_tensors(np.repeat(np.arange(1, 5), LENGTHS)[None])
    assert isinstance(document_inputs(model, **numbers, causal=True)["attention_mask"], BlockMask)
    check_documents(model, causal=True)
    assert isinstance(document_inputs(model, **numbers, causal=True)["attention_mask"], torch.Tensor)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("length", "queries"), [(512, None), (700, None), (100, None), (640, (128, 384)), (700, (300, 700))]
)
def test_block_masks_from_bounds_are_those_of_all_pairs(length, queries, causal):
    """Long documents fill blocks, short ones share them; queries may be a part of the sequence."""
    random = torch.Generator().manual_seed(length)
    documents = (torch.rand(3, length, generator=random) < torch.tensor([[0.0], [0.004], [0.1]])).cumsum(dim=1)
    positions = torch.arange(*(queries or (length,)))
    mask = block_mask(documents, positions, causal=causal)
    expected = create_block_mask(mask.mask_mod, 3, None, len(positions), length, device="cpu")
    assert mask.seq_lengths == expected.seq_lengths
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "q_num_blocks", "q_indices",
                 "full_q_num_blocks", "full_q_indices"):  # fmt: skip
        assert torch.equal(getattr(mask, name), getattr(expected, name)), name


def test_a_block_mask_of_a_long_row_takes_little_memory():
    """All pairs of 131,072 tokens would take 17 GB."""
    sizes = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            result = operator(*args, **(kwargs or {}))
            sizes.extend(each.nbytes for each in tree_leaves(result) if isinstance(each, torch.Tensor))
            return result

    with Sizes():
        block_mask(torch.arange(131_072)[None] // 5000, torch.arange(131_072), causal=True)
    assert max(sizes) <= 2**24
