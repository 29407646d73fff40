"""Names of keys and objectives in transformers, trl, nanoGPT, axolotl, torchtitan and peft."""

from __future__ import annotations

_NAMES = {
    "run": "output_dir out_dir save_dir",
    "data.sources.0.path": "dataset datasets dataset_name dataset_path data_path train_file train_files train_path "
    "train_data texts",
    "data.sources.0.field": "text_field text_column text_column_name dataset_text_field column",
    "data.sources.0.label": "label_field label_column label_column_name",
    "data.validation": "validation_file val_file val_path eval_file eval_path test_size val_size val_split "
    "validation_split val_set_size",
    "data.block": "max_length max_seq_length max_seq_len max_len seq_len seq_length sequence_length sequence_len "
    "block_size context_length context_size model_max_length cutoff_len",
    "prepare.workers": "num_proc num_workers preprocessing_num_workers dataloader_num_workers",
    "tokenizer.from": "tokenizer_name tokenizer_path tokenizer_name_or_path",
    "tokenizer.train.vocab": "vocab_size vocabulary_size",
    "model.from": "model_name model_name_or_path pretrained_model_name_or_path model_path base_model",
    "model.quantize": "quantization load_in_4bit load_in_8bit",
    "model.lora.rank": "r lora_r lora_rank",
    "model.lora.alpha": "lora_alpha",
    "model.lora.dropout": "lora_dropout",
    "model.lora.target": "target_modules lora_target lora_target_modules",
    "model.lora.save": "modules_to_save lora_modules_to_save",
    "masked.rate": "mlm_probability",
    "span_qa.stride": "doc_stride",
    "train.epochs": "num_train_epochs num_epochs max_epochs n_epochs",
    "train.steps": "max_steps num_steps total_steps train_steps max_iters num_iterations train_iters",
    "train.tokens": "total_tokens max_train_tokens",
    "train.budget": "max_time max_train_time time_budget time_limit",
    "train.batch": "batch_size global_batch_size train_batch_size total_batch_size gradient_accumulation_steps "
    "grad_accum grad_accum_steps accumulate_grad_batches",
    "train.micro_batch": "per_device_train_batch_size per_device_batch_size micro_batch_size device_batch_size",
    "train.activation_checkpointing": "gradient_checkpointing",
    "train.optimizer": "optim optimizer_type",
    "train.learning_rate": "lr peak_lr max_lr base_lr",
    "train.minimum_learning_rate": "min_lr",
    "train.betas": "adam_beta1 adam_beta2 beta1 beta2",
    "train.epsilon": "adam_epsilon adam_eps eps",
    "train.schedule": "lr_scheduler lr_scheduler_type scheduler lr_schedule",
    "train.warmup": "warmup_steps warmup_ratio warmup_iters num_warmup_steps",
    "train.clip": "max_grad_norm grad_clip clip_grad gradient_clip_val gradient_clipping",
    "train.precision": "bf16 fp16 mixed_precision dtype torch_dtype",
    "train.compile": "torch_compile",
    "validate.every": "eval_steps eval_every eval_interval eval_strategy evaluation_strategy val_check_interval",
    "validate.patience": "early_stopping_patience",
    "checkpoint.every": "save_steps save_every save_interval save_strategy checkpoint_interval",
    "checkpoint.keep": "save_total_limit",
    "checkpoint.best": "metric_for_best_model",
    "log.every": "logging_steps log_every log_interval",
    "track": "report_to",
    "parallel.tensor": "tp tp_size tensor_parallel_size",
    "parallel.pipeline": "pp pp_size pipeline_parallel_size",
    "parallel.context": "cp cp_size context_parallel_size",
    "parallel.expert": "ep ep_size expert_parallel_size",
}

OTHER_NAMES = {name: key for key, names in _NAMES.items() for name in names.split()}
"""Another tool's name in lower case, with _ -> the dotted key."""

_OBJECTIVES = {
    "causal": "clm pretrain pretraining causal-lm language-modeling",
    "masked": "mlm masked-lm fill-mask",
    "chat": "sft instruct instruction",
    "preference": "rlhf",
    "policy": "rl rlvr",
    "classification": "text-classification sequence-classification",
    "tokens": "ner token-classification",
    "reward": "rm reward-model",
    "rerank": "cross-encoder reranker reranking",
    "embedding": "bi-encoder sentence-embedding sentence-similarity",
    "span_qa": "qa question-answering",
    "seq2seq": "translation summarization text2text-generation",
    "distill": "distillation",
}

OTHER_OBJECTIVES = (
    {name: objective for objective, names in _OBJECTIVES.items() for name in names.split()}
    | {loss: f"preference, and preference.loss: {loss}" for loss in ("dpo", "ipo", "kto", "orpo", "simpo")}
    | {
        preset.replace("_", "-"): f"policy, and policy.preset: {preset}"
        for preset in ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "raft", "online_dpo")
    }
)
"""Another tool's name of an objective in lower case, with - -> the value of `objective`."""
