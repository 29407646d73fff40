"""Configurations as users of impruver write them."""

# Every key that impruver reads, each with a value that is not the one it has of itself.
PRETRAINED = """
output_dir: ./models/all
train_path: ./train.jsonl
val_path: ./val.jsonl
datasets:
  - name: ./texts/questions.jsonl
    converter: impruver.instruction_to_messages
    mapping: {instruction: question, output: answer}
    split: train[:1000]
    only_target_loss: true
    add_global_bos: false
    add_global_eos: false
    max_tokens_count: 512
  - name: OWNER/dialogs
    subset: ru
    split: test[10%:-5%]
    converter: impruver.dialog_to_messages
    only_target_loss: false
  - name: OWNER/own
    converter: my.converters.rows_to_messages
model:
  class: custom.gigachat.DeepseekForCausalLM
  name: OWNER/model
  attn_implementation: flash_attention_2
  load_in_4bit: true
  load_in_8bit: true
  dtype: fp16
  config_class: transformers.GPT2Config
  config: {n_layer: 3}
lora:
  r: 4
  lora_alpha: 24
  lora_dropout: 0.1
  bias: all
  target_modules: [q_proj, v_proj]
  task_type: SEQ_CLS
  use_rslora: true
  use_dora: true
  modules_to_save: [embed_tokens]
  init_lora_weights: pissa
tokenizer:
  class: transformers.GPT2Tokenizer
  name: OWNER/tokenizer
  max_tokens_count: 1500
  special_tokens: {pad_token_id: 1, pad_token: <s>}
  chat_template: "{% for message in messages %}{{ message['content'] }}{% endfor %}"
trainer:
  eval_strategy: steps
  save_strategy: steps
  eval_steps: 70
  save_steps: 80
  per_device_train_batch_size: 2
  per_device_eval_batch_size: 4
  gradient_accumulation_steps: 8
  logging_steps: 5
  learning_rate: 4e-4
  num_train_epochs: 2
  max_steps: -1
  lr_scheduler_type: cosine_with_min_lr
  lr_scheduler_kwargs: {min_lr_rate: 0.2}
  warmup_steps: 16
  warmup_ratio: 0.03
  optim: paged_adamw_8bit
  adam_beta1: 0.8
  adam_beta2: 0.99
  adam_epsilon: 1e-6
  metric_for_best_model: eval_bleu
  greater_is_better: true
  load_best_model_at_end: true
  save_total_limit: 2
  seed: 7
  data_seed: 8
  remove_unused_columns: true
  max_grad_norm: 0.5
  weight_decay: 0.08
  torch_compile: true
  gradient_checkpointing: true
  bf16: true
  report_to: [wandb, tensorboard, comet_ml]
  dataloader_num_workers: 3
  ddp_timeout: 100
ddp:
  ddp_find_unused_parameters: false
"""
FROM_SCRATCH = """
output_dir: models/scratch
datasets:
  - name: train.json
    only_target_loss: false
model:
  class: transformers.GPT2LMHeadModel
  dtype: fp32
  config_class: transformers.GPT2Config
  config: {n_layer: 3, n_embd: 96, n_head: 3, n_inner: null, n_ctx: 128, max_position_embeddings: 128,
           vocab_size: 50304, torch_dtype: float16, _attn_implementation: eager, bos_token_id: 1, n_layr: 4}
  load_in_8bit: true
tokenizer: {name: ./tokenizer, chat_template: chatml}
lora: {r: 8}
trainer: {max_steps: 100, num_train_epochs: 3, fp16: true, eval_strategy: epoch, eval_steps: 5, save_strategy: best,
          lr_scheduler_type: constant, warmup_steps: 9, max_grad_norm: 0, optim: lion_32bit, logging_steps: 0.1}
"""
