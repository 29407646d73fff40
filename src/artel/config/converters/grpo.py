"""Convert the keys of TRL's GRPOConfig, which TRL's script and axolotl share.

The batch of TRL counts answers, artel's counts prompts. `prefix`: section of the keys, e.g. `trl.` in axolotl.
"""

from __future__ import annotations

from typing import Any

from artel.config.converters import readers as read
from artel.config.converters.conversion import Conversion, KeyTable
from artel.config.converters.hub_data import path_exists
from artel.integers import ceil_div

_ENGINE = "artel writes answers with its own engine"
_NO_REFERENCE = "not supported: the reference is the model before training"
_NO_ENTROPY = "not supported: the loss has no entropy term, and no tokens are selected by entropy"
_PROMPT_TOKENS = 1024
"""Tokens of data.block for prompts, if no limit is given. TRL has none."""

# Defaults of GRPOConfig (TRL 1.16) on which the loss and the answers depend.
_DEFAULTS = {
    "num_generations": 8, "max_completion_length": 512, "temperature": 1.0, "beta": 0.0, "epsilon": 0.2,
    "loss_type": "dapo", "scale_rewards": "group", "importance_sampling_level": "token",
}  # fmt: skip
# Keys that change nothing at these values, and reasons for other values.
_NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "num_iterations": ((1,), "artel learns from an answer once; policy.steps sets the optimizer steps per round"),
    "min_p": ((0, 0.0), "not supported: policy.top_p and policy.top_k restrict the sampling"),
    "repetition_penalty": ((1, 1.0), "not supported: answers are sampled from the model's own probabilities"),
    "top_entropy_quantile": ((1, 1.0), _NO_ENTROPY),
    "entropy_coef": ((0, 0.0), _NO_ENTROPY),
    "shuffle_dataset": (
        (True,),
        "the order of prompts is shuffled, depends on the seed only, and cannot be the file's",
    ),
    "router_aux_loss_coef": ((0, 0.0), "not supported: the loss has no term for the balance of experts"),
    "num_generations_eval": ((1,), "validation writes one answer to each prompt"),
    "remove_unused_columns": ((False,), "rewards get every column"),
    "use_vllm": ((False,), _ENGINE),
}
_DIVISORS = {"grpo": "answers", "dapo": "tokens", "bnpo": "tokens", "dr_grpo": "longest", "cispo": "tokens"}
_SCALES = {True: "deviation", "group": "deviation", False: "mean", "none": "mean"}


def build_table(prefix: str = "") -> KeyTable:
    """Return the table of GRPOConfig's keys."""

    def names(text: str) -> str:
        return " ".join(f"{prefix}{name}" for name in text.split())

    return KeyTable(
        defaults={f"{prefix}{name}": value for name, value in _DEFAULTS.items()},
        converted={
            f"{prefix}num_generations": ("policy.answers", read.at_least_two),
            f"{prefix}max_completion_length": ("policy.new_tokens", read.positive_int),
            f"{prefix}temperature": ("policy.temperature", read.positive_number),
            f"{prefix}top_p": ("policy.top_p", read.positive_number),
        },
        implied={
            names("ds3_gather_for_generation cache_implementation pad_to_multiple_of use_liger_loss"):
                "affects only the speed",
            names("vllm_* use_transformers_*"): _ENGINE,
            names("transformers_continuous_batching_config*"): _ENGINE,
            names("log_completions log_unique_prompts log_multimodal num_completions_to_print"):
                "RUN/rollouts has every answer",
        },
        unsupported={
            names("delta"): "not supported: the ratio is clipped by policy.clip_low and policy.clip_high",
            names("generation_kwargs*"):
                "not supported: answers are sampled with policy.temperature, top_p and top_k",
            names("chat_template_kwargs*"): "not supported: write a template of your own: chat.template: FILE",
            names("sync_ref_model ref_model_*"): _NO_REFERENCE,
            names("use_adaptive_entropy entropy_*"): _NO_ENTROPY,
            names("off_policy_mask_threshold"): "not supported: every answer with a reward is learned",
            names("max_tool_calling_iterations"): "write policy.tools, and policy.turns: N + 1",
            names("rollout_func"):
                "not supported: artel writes answers itself; write policy.tools or policy.environment",
            names("log_completions_hub_repo"): "nothing is uploaded",
            names("disable_dropout"): "write the dropout rates in the model's config.json",
            names("sapo_* vespo_*"): "artel has no SAPO or VESPO loss",
            names("use_bias_correction_kl"): "no effect: without beta there is no divergence",
        },
    )  # fmt: skip


def convert_grpo(conversion: Conversion, prefix: str = "") -> None:
    """Convert the loss, the rounds and the sampling. Add a problem for a loss that artel does not have."""
    conversion.put("objective", "policy")
    _convert_loss(conversion, prefix)
    _convert_divergence(conversion, prefix)
    top_k = conversion.get(f"{prefix}top_k", read.number)
    if top_k is not None:
        conversion.put("policy.top_k", max(0, int(top_k)), f"{prefix}top_k")  # -1 and 0 switch it off
    masks = conversion.get(f"{prefix}mask_truncated_completions", read.flag)
    if masks is not None:
        conversion.put("policy.overlong", "mask" if masks else "cut", f"{prefix}mask_truncated_completions")
    for name, (values, reason) in _NEUTRAL.items():
        key = f"{prefix}{name}"
        if conversion.has(key):
            conversion.report_unless(conversion.raw_value(key) in values, key, reason)


def _convert_loss(conversion: Conversion, prefix: str) -> None:
    names = ("loss_type", "scale_rewards", "importance_sampling_level", "epsilon", "epsilon_high")
    loss_key, scale_key, ratio_key, low_key, high_key = (f"{prefix}{name}" for name in names)
    loss = conversion.get(loss_key, read.one_of({name: name for name in _DIVISORS}))
    scale = conversion.raw_value(scale_key)
    ratio = conversion.get(ratio_key, read.one_of("token sequence"))
    low = conversion.get(low_key, read.positive_number)
    high = conversion.get(high_key, read.positive_number)
    if not isinstance(scale, bool | str) or scale not in _SCALES:
        fix = "write group or none"
        conversion.add_problem(scale_key, f"{scale!r}: artel scales by the answers to a prompt, or not at all", fix)
    aggregation_key = f"{prefix}multi_objective_aggregation"
    if conversion.get(aggregation_key, read.text) not in (None, "sum_then_normalize"):
        conversion.add_problem(aggregation_key, "artel adds rewards up first", "write sum_then_normalize")
    conversion.mark_implied(aggregation_key, "rewards are added up first")
    if conversion.problems or loss is None or low is None:
        return
    # Every part is written out: a preset of the same name has other bounds, and dapo resamples.
    conversion.put("policy.preset", "cispo" if loss == "cispo" else "grpo", loss_key)
    conversion.put("policy.advantage", _SCALES[scale], scale_key)
    conversion.put("policy.ratio", ratio, ratio_key)
    conversion.put("policy.divide_by", _DIVISORS[loss], loss_key)
    if loss == "bnpo":
        conversion.report(loss_key, "artel divides by the tokens of the global batch, bnpo by those of a micro-batch")
    if loss == "cispo":  # TRL's epsilon_high is the bound itself
        if high is None or high <= 1:
            what = "the bound of cispo's ratio must be above 1"
            conversion.add_problem(high_key if conversion.has(high_key) else loss_key, what, "write epsilon_high: 5.0")
            return
        conversion.put("policy.clip_low", 1.0)
        conversion.put("policy.clip_high", high - 1, high_key)
        conversion.mark_implied(low_key, "cispo has no lower bound")
        return
    conversion.put("policy.clip_low", min(low, 1.0), low_key)
    conversion.put("policy.clip_high", low if high is None else high, *([low_key] if high is None else [high_key]))


def _convert_divergence(conversion: Conversion, prefix: str) -> None:
    key, correction_key = f"{prefix}beta", f"{prefix}use_bias_correction_kl"
    beta = conversion.get(key, read.non_negative_number)
    if beta is not None and (beta or conversion.has(key)):
        conversion.put("policy.kl", beta, key)
    if beta and conversion.raw_value(correction_key) is not False:
        conversion.report(key, "TRL also multiplies the divergence by the ratio (use_bias_correction_kl)")
        conversion.report(correction_key, "not supported: policy.kl adds the divergence itself")
    elif beta:
        conversion.mark_implied(correction_key, "policy.kl adds the divergence itself")


def convert_rounds(conversion: Conversion, prefix: str = "", processes: int | None = None) -> None:
    """Convert the batch, which counts answers, to prompts, and the steps of a round. Call it after `trainer`."""
    answers = conversion.output_value("policy.answers") or 1
    micro_key, accumulation_key = "per_device_train_batch_size", "gradient_accumulation_steps"
    micro_batch, accumulation = (conversion.get(key, read.positive_int) or 1 for key in (micro_key, accumulation_key))
    total = micro_batch * accumulation * (processes or 1)
    conversion.put("train.batch", ceil_div(total, answers), micro_key, accumulation_key, f"{prefix}num_generations")
    unit = f"{total} answers of {'all processes' if processes else 'one process'}"
    if processes is None:
        fix = f"with N processes write N * {total} / {answers}"
        what = f"train.batch counts prompts: {unit} / {answers} answers per prompt; {fix}"
        if conversion.has(micro_key):
            conversion.report(micro_key, what)
        else:
            conversion.note(f"{conversion.tool_name(micro_key)} is not set: {what}")
    elif total % answers:
        conversion.report(micro_key, f"{unit} are not a whole number of prompts with {answers} answers; rounded up")
    steps_key, batch_key = f"{prefix}steps_per_generation", f"{prefix}generation_batch_size"
    steps = conversion.get(steps_key, read.positive_int)
    generation_batch = conversion.get(batch_key, read.positive_int)
    if generation_batch:
        steps = ceil_div(generation_batch, micro_batch * (processes or 1))
        if processes is None:
            conversion.report(batch_key, "counts all processes; divide policy.steps by their number")
    if steps:
        key = batch_key if generation_batch else steps_key
        conversion.put("policy.steps", ceil_div(steps, accumulation), key)
        if steps > accumulation and steps % accumulation:
            conversion.report(
                key, f"{steps} micro-batches are not a whole number of steps of {accumulation}; rounded up"
            )


def convert_block(conversion: Conversion, prompt_key: str) -> None:
    """Write data.block. `prompt_key`: the key with the limit of a prompt, which TRL no longer has."""
    limit = conversion.get(prompt_key, read.positive_int)
    new_tokens = conversion.output_value("policy.new_tokens") or 0
    conversion.put("data.block", (limit or _PROMPT_TOKENS) + new_tokens, prompt_key)
    if limit is None:
        what = f"data.block leaves {_PROMPT_TOKENS:,} tokens for a prompt; longer ones are skipped and counted"
        conversion.note(f"{what}; TRL has no limit")
    else:
        conversion.report(prompt_key, "longer prompts are skipped and counted, TRL cuts them")


def convert_rewards(
    conversion: Conversion, key: str, weights_key: str, known: dict[str, Any], models: list[tuple[str, str]]
) -> None:
    """Write policy.rewards.

    `known`: reward functions of the tool and artel's rewards. `models`: (key, folder) of reward models, which come
    first; a name with a slash is one too.
    """
    rewards: list[tuple[str, Any]] = [(model_key, {"model": folder}) for model_key, folder in models]
    models = [*models]
    for name in conversion.get(key, read.names) or []:
        module, _, function = name.rpartition(".")
        if name in known:
            rewards.append((key, known[name]))
        elif "/" in name:
            models.append((key, name))
            rewards.append((key, {"model": name}))
        elif module and function.isidentifier():
            rewards.append((key, {"function": f"{module}:{function}"}))
        else:
            conversion.add_problem(key, f"{name!r} is not a reward function", "write module.function")
    weights = conversion.raw_value(weights_key)
    if weights is not None and not isinstance(weights, list):
        weights = [weights]
    if weights is not None and len(weights) != len(rewards):
        what = f"has {_count(weights, 'weight')} for {_count(rewards, 'reward')}"
        conversion.add_problem(weights_key, what, "write one for each")
        return
    terms: list[Any] = []
    for index, (source_key, term) in enumerate(rewards):
        if weights is not None:
            try:
                term = {**(term if isinstance(term, dict) else {term: {}}), "weight": read.number(weights[index])}
            except ValueError as error:
                conversion.add_problem(weights_key, *str(error).partition("; ")[::2])
        terms.append(term)
        conversion.mark_converted("policy.rewards", source_key, weights_key)
    conversion.put("policy.rewards", terms)
    for model_key, folder in models:
        if not folder.startswith((".", "/", "~")) and not path_exists(folder):
            fix = f"write the folder of the model: hf download {folder} --local-dir FOLDER"
            conversion.report(model_key, f"a reward model is read from a folder; {fix}")
    if not rewards:
        conversion.note("no reward is configured; write policy.rewards")


def _count(items: list[Any], noun: str) -> str:
    return f"{len(items)} {noun}{'' if len(items) == 1 else 's'}"
