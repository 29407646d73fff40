"""Evaluations of axolotl's in a run file: the tasks of lm-evaluation-harness, and metrics of validation."""

from __future__ import annotations

from artel.config.converters.keys import YamlKeys, names

_PLUGIN = "axolotl.integrations.lm_eval.LMEvalPlugin"
_OWN = ("sacrebleu", "comet", "ter", "chrf")
"""What `do_causal_lm_eval` computes where no metrics are named."""


def carry_tasks(old: YamlKeys) -> None:
    """`lm_eval_tasks` are asked after training, so `validate.tasks` are asked at the end alone."""
    _carry_harness(old)
    _leave_metrics(old)
    asks = "write validate.tasks: [mmlu], tasks of lm-evaluation-harness"
    old.leave_if_on("do_bench_eval", asks)
    old.leave("bench_dataset", asks)


def _carry_harness(old: YamlKeys) -> None:
    tasks = old.read("lm_eval_tasks", names)
    if old.raw("lm_eval_post_train") is False:
        old.agree("lm_eval_post_train", "is off")
        old.leave("lm_eval_tasks", "are not asked after training: artel evaluate RUN --tasks NAME asks them")
    elif tasks:
        plain = list(dict.fromkeys(task.partition(":")[0] for task in tasks))
        old.put("validate.tasks", plain, "lm_eval_tasks")
        old.put("validate.tasks_every", "never", "lm_eval_tasks")
        if any(":" in task for task in tasks):
            what = "a task is asked with as many examples as the harness has for it"
            old.leave("lm_eval_tasks", f"{what}; for others write a YAML file of your own, with num_fewshot")
    old.agree("lm_eval_post_train", "validate.tasks are asked at the end")
    if old.raw("lm_eval_batch_size") == 8:
        old.agree("lm_eval_batch_size", "8 questions are asked at a time")
    old.leave("lm_eval_batch_size", "8 questions are asked at a time")
    old.leave("lm_eval_model", "artel evaluate FOLDER --tasks NAME asks a model that is trained already")
    if old.has("plugins") and old.peek("plugins") == [_PLUGIN]:
        old.agree("plugins", "validate.tasks has lm-evaluation-harness ask the model")


def _leave_metrics(old: YamlKeys) -> None:
    """`do_causal_lm_eval` has the model write the answers of the validation texts, and compares them."""
    written = [name for name in old.read("eval_causal_lm_metrics", names) or _OWN if name != "perplexity"]
    what = f"validation gives loss, perplexity and accuracy, and no {', '.join(written)} of what the model writes"
    for key in ("do_causal_lm_eval", "eval_causal_lm_metrics"):
        if not old.raw("do_causal_lm_eval"):
            old.agree(key, "is off")
        elif not written:
            old.agree(key, "each validation gives the perplexity")
        else:
            old.leave(key, f"{what}; write validate.tasks: [FILE.yaml], a task of your own with these metrics")
