"""A script of TRL's GRPO trainer with vLLM in the same process, or with a server on the port that is named,
which `quire python` runs unchanged."""

import json
import sys
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer
from trl.generation.vllm_client import VLLMClient

model, folder, *ports = sys.argv[1:]
completions_seen: list[list[str]] = []


def reward(completions: list[str], **_: object) -> list[float]:
    completions_seen.append(completions)
    return [float(text.count("e")) for text in completions]


mode: dict[str, Any] = {"vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.05}
if ports:
    port, group_port = map(int, ports)
    mode = {"vllm_mode": "server", "vllm_server_host": "127.0.0.1", "vllm_server_port": port}
    mode["vllm_group_port"] = group_port
    connect = VLLMClient.init_communicator
    # TRL refuses to send weights from a CPU.
    VLLMClient.init_communicator = lambda self, device: connect(self, "cuda")
trainer = GRPOTrainer(
    model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
    processing_class=PreTrainedTokenizerFast(
        tokenizer_file=f"{model}/tokenizer.json", bos_token="<s>", eos_token="</s>", pad_token="<unk>"
    ),
    reward_funcs=reward,
    train_dataset=Dataset.from_list([{"prompt": "The quick brown"}, {"prompt": "A page is a"}] * 10),
    args=GRPOConfig(
        output_dir=folder,
        use_vllm=True,
        **mode,
        max_steps=5,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=12,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        seed=7,
    ),
)
trainer.train()
with open(f"{folder}/run.json", "w") as file:
    json.dump({"completions": completions_seen, "steps": trainer.state.log_history}, file)
