"""A script of TRL's GRPO trainer with vLLM in the same process, which `quire python` runs unchanged."""

import json
import sys

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

model, folder = sys.argv[1:]
completions_seen: list[list[str]] = []


def reward(completions: list[str], **_: object) -> list[float]:
    completions_seen.append(completions)
    return [float(text.count("e")) for text in completions]


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
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.05,
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
