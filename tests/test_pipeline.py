"""Layers shared out over processes: the same loss, gradients, norm and judgement as one process, in every order."""

import copy

import numpy as np
import pytest
import torch
from transformers import (
    AlbertConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    BartConfig,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MPNetConfig,
    OPTConfig,
    Qwen3MoeConfig,
    RobertaConfig,
    XLNetConfig,
)

from artel.config import RunConfig, TokenizerTraining
from artel.models.activation_checkpointing import recompute
from artel.models.attention_switch import use_artel_attention
from artel.models.loading.heads import model_class
from artel.objectives import Chat, Masked, PreferenceOptimization, SpanQA
from artel.parallel import DataParallel, World
from artel.parallel.fsdp import FsdpConfig, batch_mesh, shard
from artel.parallel.mesh import ParallelDims
from artel.parallel.pipeline_parallel import PipelineParallel
from artel.parallel.pipeline_stages import pipeline_problems, split_into_stages, stage_count
from artel.tokens import Rows, train_tokenizer
from artel.tokens.tokenizer.chat_template import CHATML_TOKENS
from artel.training.optim.parameter_groups import lr_fractions
from support.ranks import run_ranks

SIZES = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64,
         "vocab_size": 310, "max_position_embeddings": 80, "pad_token_id": 1}  # fmt: skip
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2 = GPT2Config(n_layer=4, n_embd=32, n_head=4, n_positions=80, vocab_size=310,
                  attn_pdrop=0, resid_pdrop=0, embd_pdrop=0)  # fmt: skip
LLAMA = LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=False)
ROBERTA = RobertaConfig(**SIZES, **QUIET)
MOE = Qwen3MoeConfig(**SIZES, num_key_value_heads=2, head_dim=8, moe_intermediate_size=16, num_experts=4,
                     num_experts_per_tok=2, router_aux_loss_coef=0.1)  # fmt: skip


def as_it_is(model):
    return model


def first_layers_frozen(model):
    """Up to the middle, the embeddings too: nothing is learned on the first of two stages."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "layers.3" in name or "lm_head" in name
    return model


def recomputed(model):
    assert recompute(model, "full").startswith("full")
    return model


MPNET = MPNetConfig(**SIZES, **QUIET)
KINDS = {
    "a bound on logits, windows": (
        Gemma2Config(**SIZES, num_key_value_heads=2, head_dim=8, sliding_window=5), "chat", "1f1b", as_it_is),
    "projections around the layers": (
        OPTConfig(**SIZES, ffn_dim=64, word_embed_proj_dim=16, do_layer_norm_before=False, dropout=0.0),
        "chat", "zero_bubble", as_it_is),
    "a bias that all layers share": (MPNET, "masked", "zero_bubble", as_it_is),
    "frozen": (LLAMA, "chat", "1f1b", first_layers_frozen),
    "frozen, zero bubble": (LLAMA, "chat", "zero_bubble", first_layers_frozen),
    "recomputed": (LLAMA, "chat", "zero_bubble", recomputed),
    "pairs": (LLAMA, "dpo", "interleaved", as_it_is),
    "a survey first": (GPT2, "kto", "1f1b", as_it_is),
    "five heads": (ROBERTA, "five", "zero_bubble", as_it_is),
}  # fmt: skip
DEEP = GPT2Config(**(GPT2.to_diff_dict() | {"n_layer": 8}))
CPU = torch.device("cpu")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble", "sequential")
TEXT = ["Все счастливые семьи похожи друг на друга. All happy families resemble one another."] * 20


def model_of(config, objective):
    """A model whose layers are all seen in its loss: weights ten times as large as usual."""
    torch.manual_seed(0)
    model = model_class(config, objective.auto_class, objective.heads)._from_config(copy.deepcopy(config)).train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.1)
    use_artel_attention(model)
    return model


def objectives():
    tokens = train_tokenizer(iter(TEXT), TokenizerTraining(vocab=280, special=list(CHATML_TOKENS)))
    framed = train_tokenizer(iter(TEXT), TokenizerTraining(vocab=280), encoder=True)

    def run(objective, **more):
        return RunConfig.model_validate({"objective": objective, "data": {"block": 80}, **more})

    by_name = {
        "chat": Chat(run("chat"), tokens),
        "masked": Masked(run("masked"), framed),
        "dpo": PreferenceOptimization(run("preference"), tokens),
        "kto": PreferenceOptimization(run("preference", preference={"loss": "kto"}), tokens),
        "five": SpanQA(run("span_qa", span_qa={"heads": "five", "question": 4}), framed),
    }
    for name in ("dpo", "kto"):
        by_name[name].set_reference(np.linspace(-30, -20, 300).reshape(100, 3), validation=False)
    return by_name


def batches_of(objective, count):
    """Micro-batches of unequal numbers of targets and, where samples stand alone, of unequal shapes."""
    results = []
    for seed in range(count):
        rng = np.random.default_rng(seed)
        lengths = np.array([9 + 7 * seed, 20 + 3 * seed, 15][: 2 + seed % 2])
        numbers, flagged = np.zeros((len(lengths), 0), np.int64), True
        if isinstance(objective, Masked):
            lengths, flagged = np.array([32, 32]), False
        elif isinstance(objective, PreferenceOptimization):  # two or three answers, one after another
            parts = np.linspace(0, lengths, 3 + objective.needs_global_statistics).astype(np.int64)
            numbers = np.diff(parts, axis=0).T
        elif isinstance(objective, SpanQA):
            zero = np.zeros_like(lengths)
            numbers = np.stack([zero, zero, zero + 4, zero + 5, zero + 6 + seed % 2, zero + 1], axis=1)
        there = np.arange(lengths.max()) < lengths[:, None]
        ids = np.where(there, rng.integers(5, 250, there.shape), 0)
        flags = ((rng.random(there.shape) < 0.6) & there).astype(np.uint8) if flagged else None
        rows = len(lengths)
        epochs = np.zeros(rows, np.int64)
        results.append(objective.batch(Rows(
            ids, lengths, np.ones(rows, bool), np.arange(rows) + 10 * seed, epochs, flags, numbers)))  # fmt: skip
    return results


def pipelined(model, objective, rank, world, schedule, prepare=lambda stage, mesh, grid: None, **grid):
    """This process's layout of a pipeline over `world` processes, or as `grid` says."""
    grid = ParallelDims(**({"mode": "ddp", "pipeline": world} | grid))
    mesh = grid.mesh("cpu")
    place, count = mesh.get_local_rank("pipeline"), stage_count(grid.pipeline, schedule)
    stages = split_into_stages(model, range(place, count, grid.pipeline), count)
    for stage in stages:
        prepare(stage, mesh, grid)
    processes = World(rank, world, rank, CPU)
    return PipelineParallel(model, stages, objective, processes, "fp32", grid, mesh["pipeline"], schedule)


def one_process(model, objective):
    return DataParallel(model, objective, World(0, 1, 0, CPU), "fp32")


def full(gradient):
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def difference(layout, reference, batches, judged, whole=None):
    """Largest relative differences to `reference`, one process, after the same step; names that were seen."""
    whole = whole or batches
    targets = float(sum(batch.targets for batch in whole))
    reference.model.zero_grad()
    sums = reference.run(whole, targets)
    mine = torch.tensor(layout.all_reduce_sum(layout.run(batches, targets).double().tolist()))
    gradients = {name: each.grad for name, each in reference.model.named_parameters() if each.grad is not None}
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    differences = {"sums": float(((mine - sums).abs() / sums.abs().clamp(min=1)).max()), "gradient": 0.0}
    seen = []
    for name, parameter in layout.model.named_parameters():
        if parameter.grad is not None:
            seen.append(name)
            one = gradients[name]
            off = (full(parameter.grad) - one).abs().max() / one.abs().max().clamp(min=1e-3 * largest)
            differences["gradient"] = max(differences["gradient"], float(off))
    differences["norm"] = float((layout.gradient_norm() - reference.gradient_norm()).abs() / reference.gradient_norm())
    if judged:
        rows = [np.arange(len(batch.tensors.get("present", batch.tensors["input_ids"]))) for batch in batches]
        indexed = [(batch, 3 * number + rows[number]) for number, batch in enumerate(batches)]
        (here, outputs), (there, wanted_outputs) = layout.evaluate(indexed, 99), reference.evaluate(indexed, 99)
        differences["judged"] = max(abs(here[name] - there[name]) / max(1.0, abs(there[name])) for name in there)
        largest = np.abs(wanted_outputs).max(initial=1)
        differences["outputs"] = float(np.abs(outputs - wanted_outputs).max(initial=0) / largest)
    return {"differences": differences, "seen": seen, "all": sorted(gradients)}


def every_schedule(rank, world):
    """All models in all orders; with fewer micro-batches than stages, and with five, which fill no round."""
    made, cases = objectives(), {}
    models = {"gpt2": GPT2, "llama": LLAMA, "roberta": ROBERTA, "moe": MOE} if world == 2 else {"deep": DEEP}
    for name, config in models.items():
        objective = made["masked" if config is ROBERTA else "chat"]
        reference = one_process(model_of(config, objective), objective)
        for schedule in SCHEDULES:
            layout = pipelined(model_of(config, objective), objective, rank, world, schedule)
            for count in (2, 5) if name in ("llama", "deep") else (3,):
                batches = batches_of(objective, count)
                cases[f"{name} {schedule} {count}"] = difference(layout, reference, batches, judged=count != 2)
                layout.model.zero_grad()
    return cases


def many_kinds(rank, world):
    """What is special about some models and objectives; a rehearsal leaves nothing."""
    made, cases = objectives(), {}
    for name, (config, kind, schedule, prepare) in KINDS.items():
        objective = made[kind]
        reference = one_process(prepare(model_of(config, objective)), objective)
        layout = pipelined(prepare(model_of(config, objective)), objective, rank, world, schedule)
        batches = batches_of(objective, 3)
        layout.probe_memory(batches[0])
        assert all(parameter.grad is None for parameter in layout.model.parameters())
        cases[name] = difference(layout, reference, batches, judged=True)
    return cases


def steps(rank, world):
    """Three steps of SGD: (weights of GPT-2's tied embedding, largest difference of any weight to one process)."""
    objective = objectives()["chat"]
    reference = one_process(model_of(GPT2, objective), objective)
    layout = pipelined(model_of(GPT2, objective), objective, rank, world, "1f1b")
    for side in (reference, layout):
        optimizer = torch.optim.SGD(side.model.parameters(), lr=0.1, momentum=0.9)
        for count in (2, 3, 1):
            side.run(batches_of(objective, count), 50.0)
            optimizer.step()
            optimizer.zero_grad()
    one = dict(reference.model.named_parameters())
    off = max(float((each - one[name]).abs().max()) for name, each in layout.model.named_parameters())
    return [layout.model.transformer.wte.weight[:3].flatten().tolist(), off]


def with_shards(rank, world):
    """Pipeline x fsdp, a layer at a time, and pipeline x copies: two of each."""
    made, cases = objectives(), {}
    layouts = ((LLAMA, "fsdp", SCHEDULES), (GPT2, "fsdp", ["1f1b"]), (GPT2, "ddp", ["zero_bubble"]))
    for config, mode, schedules in layouts:
        reference = one_process(model_of(config, made["chat"]), made["chat"])
        sizes = {"pipeline": 2, "dp_shard" if mode == "fsdp" else "dp_replicate": 2}
        for schedule in schedules:
            model = model_of(config, made["chat"])
            layout = pipelined(model, made["chat"], rank, world, schedule, shard_out, mode=mode, **sizes)
            whole = batches_of(made["chat"], 6)
            mine = [whole[2 * number + layout.dp_rank] for number in range(3)]
            layout.probe_memory(mine[0])
            layout.forget_failed_pass()  # as after every trial of a micro-batch
            case = f"{config.model_type} {mode} {schedule}"
            cases[case] = difference(layout, reference, mine, False, whole)
    return cases


def shard_out(stage, mesh, grid):
    shard(stage, batch_mesh(mesh, grid), FsdpConfig.from_dims(grid, None, "none"))


def on_two(rank, world):
    return [every_schedule(rank, world) | many_kinds(rank, world), steps(rank, world)]


def on_four(rank, world):
    return every_schedule(rank, world) | with_shards(rank, world)


def check(result):
    for case in result[0]:
        for rank in result:
            assert max(rank[case]["differences"].values()) < 1e-5, (case, rank[case]["differences"])
        assert sorted({name for rank in result for name in rank[case]["seen"]}) == result[0][case]["all"], case


@pytest.mark.processes
def test_two_processes_find_what_one_finds():
    """In every order: loss, gradients by name, norm, judgement; with tied embeddings, which stay equal."""
    results = run_ranks(2, __file__, "on_two", 400)
    check([cases for cases, _ in results])
    first, last = (rank[1] for rank in results)
    assert first[0] == last[0]
    assert max(first[1], last[1]) < 1e-5


@pytest.mark.processes
def test_four_processes_find_what_one_finds():
    """Four stages, or eight of them interleaved; and two stages whose processes share weights or batches."""
    check(run_ranks(4, __file__, "on_four", 400))


@pytest.mark.parametrize(
    ("config", "processes", "schedule", "messages"),
    [
        (GPT2, 4, "1f1b", []),
        (GPT2, 5, "1f1b", ["gpt2 has 4 layers, fewer than the 5 stages of 5 processes", "use at most 4"]),
        (GPT2, 3, "interleaved", ["fewer than the 6 stages", "use at most 2; or parallel.schedule: 1f1b"]),
        (MPNET, 2, "interleaved", ["mpnet", "relative_attention_bias", "write 1f1b"]),
        (AlbertConfig(**SIZES), 2, "1f1b", ["albert cannot be cut into stages: its layers are not in one list"]),
        (
            BartConfig(d_model=32, encoder_layers=2, decoder_layers=2),
            2,
            "1f1b",
            ["an encoder and a decoder", "set 1"],
        ),
        (OPTConfig(**SIZES, layerdrop=0.1), 2, "1f1b", ["layerdrop"]),
        (
            XLNetConfig(d_model=32, n_layer=2, n_head=4, d_inner=64, vocab_size=99),
            2,
            "1f1b",
            ["xlnet", "hidden states"],
        ),
    ],
)
def test_what_cannot_be_cut_is_told_before_there_are_weights(config, processes, schedule, messages):
    kind = {"bart": AutoModelForSeq2SeqLM, "mpnet": AutoModelForMaskedLM, "albert": AutoModelForMaskedLM}
    with torch.device("meta"):
        model = kind.get(config.model_type, AutoModelForCausalLM).from_config(config)
    problems = "\n".join(map(str, pipeline_problems(model, processes, schedule)))
    assert bool(problems) == bool(messages)
    assert all(each in problems for each in messages), problems


@pytest.mark.parametrize("config", [GPT2, LLAMA, MOE, MPNET])
def test_stages_hold_their_own_parameters_under_the_names_of_the_whole_model(config):
    objective = objectives()["masked" if config is MPNET else "chat"]
    whole = {name: each.clone() for name, each in model_of(config, objective).named_parameters()}
    stages = [split_into_stages(model_of(config, objective), [index], 3)[0] for index in range(3)]
    held = [dict(stage.model.named_parameters()) for stage in stages]
    for index, stage in enumerate(stages):
        assert all(torch.equal(each, whole[name]) for name, each in held[index].items())
        assert stage.shared.keys() == {name for name in held[index] if sum(name in other for other in held) > 1}
        earlier = {name for other in held[:index] for name in other}
        assert stage.counted_elsewhere == earlier & held[index].keys()
        # Nothing else takes memory: what is absent is one number, however large it looks.
        there = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in held[index].values()}
        assert sum(there.values()) == sum(each.numel() * 4 for each in held[index].values())
    assert set().union(*held) == whole.keys()
    assert [len(stage.layers) for stage in stages] != [0, 0, 0]
    assert [place for stage in stages for place in stage.layer_range] == [0, 1, 2, 3]


def test_layers_are_balanced_by_what_else_a_stage_has():
    """A head as dear as four layers takes their place; without it, shares are equal."""
    for vocabulary, expected in ((16, [4, 4]), (1240, [5, 3])):
        sizes = SIZES | {"num_hidden_layers": 8, "vocab_size": vocabulary}
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, tie_word_embeddings=False))
        stages = [split_into_stages(copy.deepcopy(model), [index], 2)[0] for index in range(2)]
        assert [len(stage.layer_range) for stage in stages] == expected


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=lambda config: config.model_type)
def test_a_stage_learns_as_fast_as_in_the_whole_model(config):
    """By train.layer_decay: its layers are those of the middle or the end, and its embeddings below all of them."""
    model = model_of(config, objectives()["chat"])
    whole = lr_fractions(model, 0.5)
    expected = {name: whole[parameter] for name, parameter in model.named_parameters()}
    for index in range(2):
        (stage,) = split_into_stages(copy.deepcopy(model), [index], 2)
        shares = lr_fractions(stage.model, 0.5)
        for name, parameter in stage.model.named_parameters():
            assert shares[parameter] == expected[name], name
