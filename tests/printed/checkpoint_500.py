"""checkpoint-500 of transformers' Trainer under DeepSpeed, in the working folder: one step from the model of a folder.

python checkpoint_500.py MODEL
"""

import os
import sys
from pathlib import Path

import torch

from support.sockets import free_ports

if __name__ == "__main__":
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": str(free_ports(1)[0]), "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
    torch.set_num_threads(1)
    import deepspeed
    from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # which would be compiled
    zero = {"zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto",
            "zero_allow_untested_optimizer": True}  # fmt: skip
    arguments = TrainingArguments(
        "trainer", deepspeed=zero, use_cpu=True, max_steps=1, save_steps=1, per_device_train_batch_size=4, report_to=[],
        disable_tqdm=True, ddp_backend="gloo",
    )  # fmt: skip
    rows = [{"input_ids": (torch.arange(16) + row) % 99, "labels": (torch.arange(16) + row) % 99} for row in range(4)]
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
    Trainer(model, arguments, train_dataset=rows, processing_class=tokenizer).train()
    saved = Path("trainer/checkpoint-1").rename("checkpoint-500")
    for file in saved.glob("*.safetensors"):  # beside the pieces; stage 3 has none
        file.unlink()
