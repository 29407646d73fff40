"""Configurations as users of axolotl, LLaMA-Factory and transformers' scripts write them."""

AXOLOTL_QLORA = """
base_model: OWNER/base-7b
model_type: LlamaForCausalLM
tokenizer_type: LlamaTokenizer

load_in_8bit: false
load_in_4bit: true
strict: false

datasets:
  - path: ./texts/support.jsonl
    type: chat_template
    field_messages: dialog
    message_property_mappings:
      role: speaker
      content: said
    roles_to_train: ["assistant"]
  - path: OWNER/questions
    name: ru
    split: train[:20%]
    type: alpaca
dataset_prepared_path: prepared
val_set_size: 0.1
output_dir: ./out/qlora
chat_template: chatml

sequence_len: 4096
sample_packing: true
pad_to_sequence_len: true

adapter: qlora
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_modules:
lora_target_linear: true

wandb_project: support
wandb_entity:

gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 3
optimizer: paged_adamw_8bit
lr_scheduler: cosine
learning_rate: 0.0002
train_on_inputs: false
bf16: auto
tf32: false
gradient_checkpointing: true
gradient_checkpointing_kwargs:
  use_reentrant: false
logging_steps: 1
flash_attention: true
warmup_ratio: 0.1
evals_per_epoch: 4
saves_per_epoch: 2
weight_decay: 0.01
loss_watchdog_threshold: 5.0
deepspeed: deepspeed_configs/zero2.json
special_tokens:
  pad_token: "<|end_of_text|>"
"""

AXOLOTL_DPO = """
base_model: OWNER/base-1b
rl: dpo
rl_beta: 0.2
datasets:
  - path: pairs.jsonl
    type: chat_template.default
    field_messages: talk
    field_chosen: better
    field_rejected: worse
output_dir: out
sequence_len: 1024
micro_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 5e-6
optimizer: adamw_torch
lr_scheduler: constant_with_warmup
warmup_steps: 20
max_steps: 500
fp16: true
bf16: false
fsdp: [full_shard, auto_wrap]
fsdp_config:
  fsdp_offload_params: true
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_sharding_strategy: FULL_SHARD
"""

AXOLOTL_PRETRAIN = """
base_model: OWNER/base-1b
pretraining_dataset:
  - path: OWNER/pages
    name: sample-10BT
    text_column: body
    type: pretrain
max_steps: 1000
sequence_len: 2048
sample_packing: true
micro_batch_size: 4
learning_rate: 3e-4
optimizer: muon
output_dir: out
"""

LLAMA_FACTORY_LORA = """
### model
model_name_or_path: OWNER/base-4b
trust_remote_code: true

### method
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
quantization_bit: 4

### dataset
dataset: support, questions
dataset_dir: data
template: qwen
cutoff_len: 2048
max_samples: 1000
preprocessing_num_workers: 16
dataloader_num_workers: 4

### output
output_dir: saves/support/lora
logging_steps: 10
save_steps: 500
plot_loss: true
overwrite_output_dir: true
report_to: none

### train
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
resume_from_checkpoint: null
deepspeed: examples/deepspeed/ds_z3_config.json

### eval
val_size: 0.1
eval_strategy: steps
eval_steps: 500
"""

LLAMA_FACTORY_DPO = """
model_name_or_path: OWNER/base-1b
stage: dpo
do_train: true
finetuning_type: full
pref_loss: simpo
pref_beta: 2.0
simpo_gamma: 1.4
dataset: pairs
template: llama3
output_dir: saves/pairs
learning_rate: 5e-6
use_galore: true
"""

LLAMA_FACTORY_DATA = {
    "support": {
        "file_name": "support.jsonl",
        "formatting": "sharegpt",
        "columns": {"messages": "dialog", "system": "rules"},
        "tags": {"role_tag": "speaker", "content_tag": "said", "user_tag": "user", "assistant_tag": "assistant"},
    },
    "questions": {
        "hf_hub_url": "OWNER/questions",
        "subset": "ru",
        "columns": {"prompt": "question", "query": "context", "response": "answer"},
    },
    "pairs": {"file_name": "pairs.json", "ranking": True,
              "columns": {"prompt": "question", "chosen": "better", "rejected": "worse"}},
}  # fmt: skip

RUN_CLM = r"""#!/bin/bash
#SBATCH --gres=gpu:8
export MODEL=openai-community/gpt2
TEXTS="data/train.txt"

# python run_clm.py --model_name_or_path old
CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node=4 --nnodes 2 examples/run_clm.py \
    --model_name_or_path $MODEL \
    --train_file "$TEXTS" --validation_file ${HELD_OUT} \
    --do_train --do_eval \
    --per_device_train_batch_size 2 \
    --gradient_accumulation_steps=8 \
    --learning_rate 5e-6 \
    --num_train_epochs ${EPOCHS:-2} \
    --max_steps -1 \
    --block_size 512 \
    --lr_scheduler_type cosine --warmup_steps $WARMUP \
    --eval_strategy steps --eval_steps 200 \
    --save_steps 100 --save_total_limit 2 \
    --logging_steps 10 \
    --optim adafactor \
    --fsdp "full_shard auto_wrap" \
    --bf16 True --gradient_checkpointing \
    --report_to tensorboard wandb \
    --hub_token hf_abcdefghij \
    --output_dir out/gpt2 2>&1 | tee log.txt
"""

RUN_MLM = (
    "accelerate launch --num_processes 2 run_mlm_no_trainer.py --model_type roberta --tokenizer_name ./tokenizer "
    "--dataset_name wikitext --dataset_config_name wikitext-103-raw-v1 --line_by_line --mlm_probability 0.3 "
    "--max_train_steps 5000 --num_warmup_steps 100 --checkpointing_steps epoch --max_seq_length 128 "
    '--config_overrides="num_hidden_layers=4,hidden_dropout_prob=0.2,tie_word_embeddings=false"'
)

AXOLOTL_MORE = """
base_model: OWNER/base-1b
tokenizer_config: OWNER/tokenizer
datasets:
  - path: pages.jsonl
    type: completion
    field: body
test_datasets:
  - path: held-out.jsonl
    type: completion
output_dir: out
sequence_len: 2048
adapter: lora
lora_r: 16
lora_alpha: 32
lora_target_modules: [q_proj, v_proj]
lora_modules_to_save: [embed_tokens]
peft_use_dora: true
peft_use_rslora: true
load_in_8bit: true
dataset_num_proc: 4
dataset_exact_deduplication: true
batch_size: 8
micro_batch_size: 2
num_epochs: 2
learning_rate: 1e-4
optimizer: adafactor
lr_scheduler: cosine
cosine_min_lr_ratio: 0.1
adam_beta1: 0.9
adam_beta2: 0.95
adam_epsilon: 1e-7
max_grad_norm: 0.5
eval_steps: 100
save_steps: 200
save_total_limit: 2
early_stopping_patience: 3
torch_compile: true
tensor_parallel_size: 2
context_parallel_size: 2
dp_shard_size: 4
dp_replicate_size: 2
expert_parallel_size: 2
use_tensorboard: true
plugins: [axolotl.integrations.lm_eval.LMEvalPlugin]
lm_eval_tasks: [arc_easy, "piqa:5"]
lm_eval_batch_size: 16
do_causal_lm_eval: true
eval_causal_lm_metrics: [chrf, perplexity]
seed: 7
"""

LLAMA_FACTORY_MORE = """
model_name_or_path: OWNER/base-1b
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 16
lora_alpha: 8
lora_dropout: 0.1
lora_target: q_proj,v_proj
additional_target: embed_tokens
use_rslora: true
use_dora: true
dataset: support
eval_dataset: questions
mask_history: true
template: chatml
tokenized_path: prepared
output_dir: out
use_muon: true
pure_bf16: true
disable_gradient_checkpointing: true
early_stopping_steps: 2
tensor_model_parallel_size: 2
pipeline_model_parallel_size: 2
sequence_parallel: true
learning_rate: 1e-4
"""

RUN_CLM_MORE = (
    "deepspeed --num_gpus 2 run_clm.py --model_name_or_path m --train_file a.txt --validation_split_percentage 10 "
    "--max_eval_samples 50 --preprocessing_num_workers 4 --torch_dtype bfloat16 --deepspeed ds.json --seed 1 "
    "--weight_decay 0.1 --adam_beta1 0.9 --adam_beta2 0.95 --adam_epsilon 1e-7 --max_grad_norm 0 --warmup_ratio 0.1 "
    "--torch_compile --save_strategy epoch --metric_for_best_model loss --max_steps 100 --fp16 "
    "--lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs '{\"min_lr_rate\": 0.1}'"
)

# The keys of public configurations of `trl grpo` (open-r1's, TRL's own), and more of each kind.
TRL_GRPO = """
model_name_or_path: OWNER/base-1.5b-instruct
model_revision: main
dtype: bfloat16
attn_implementation: flash_attention_2

dataset_name: OWNER/math-prompts
dataset_config: default
dataset_train_split: train[:80%]

bf16: true
use_vllm: true
vllm_gpu_memory_utilization: 0.5
do_eval: false
gradient_accumulation_steps: 4
gradient_checkpointing: true
gradient_checkpointing_kwargs:
  use_reentrant: false
learning_rate: 2.0e-05
log_completions: true
logging_steps: 1
lr_scheduler_type: cosine
max_completion_length: 2048
max_prompt_length: 512
max_steps: -1
num_generations: 16
num_train_epochs: 1
output_dir: data/grpo
per_device_train_batch_size: 16
report_to: [wandb]
reward_funcs:
- accuracy_reward
- think_format_reward
- my_lib.rewards.tidy
reward_weights: [1.0, 0.5, 0.2]
save_strategy: epoch
save_total_limit: 1
seed: 42
temperature: 0.7
warmup_ratio: 0.1
"""
TRL_GRPO_LORA = """
model_name_or_path: ./base
datasets:
  - path: prompts/a.jsonl
  - path: OWNER/b
    name: main
    split: train
reward_model_name_or_path: ./reward
reward_funcs: get_soft_overlong_punishment
use_peft: true
lora_r: 8
lora_alpha: 16
lora_target_modules: [q_proj, v_proj]
load_in_4bit: true
fp16: false
loss_type: cispo
epsilon_high: 5.0
scale_rewards: none
importance_sampling_level: token
beta: 0.04
use_bias_correction_kl: false
num_iterations: 1
steps_per_generation: 8
gradient_accumulation_steps: 2
per_device_train_batch_size: 8
top_p: 0.95
top_k: 50
min_p: 0.1
mask_truncated_completions: true
eval_strategy: steps
eval_steps: 50
delta: 2.0
sync_ref_model: true
"""
AXOLOTL_GRPO = """
base_model: OWNER/base-1.5b
rl: grpo
trl:
  beta: 0.001
  use_vllm: true
  vllm_gpu_memory_utilization: 0.5
  max_completion_length: 256
  num_generations: 4
  reward_funcs: ["rewards.rand_reward_func", "OWNER/reward"]
  reward_weights: [1.0, 0.5]
  epsilon: 0.1
  epsilon_high: 0.28
  loss_type: dr_grpo
  scale_rewards: false
  log_completions: true
  temperature: 0.9
vllm:
  tensor_parallel_size: 2
datasets:
  - path: OWNER/math
    name: main
    type: rewards.transform
chat_template: tokenizer_default
sequence_len: 512
adapter: lora
lora_r: 32
lora_alpha: 64
lora_target_linear: true
micro_batch_size: 4
gradient_accumulation_steps: 2
num_epochs: 1
max_steps: 100
learning_rate: 1e-5
output_dir: ./out/grpo
"""
