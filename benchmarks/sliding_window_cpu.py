"""Time decode steps at 32,000 tokens with and without sliding windows.

    python benchmarks/sliding_window_cpu.py

A Gemma-3-shaped model with random weights, once with windows of 1,024 in five of six layers, once without.
The figure is CPU time, so that a busy machine changes little.
"""

import json
import tempfile
import time
from pathlib import Path

import numpy as np
from measuring import generate_s

from quire import LLM

LONGEST, PROMPT, STEPS = 32_768, 32_000, 100
CONFIG = {
    "architectures": ["Gemma3ForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 12,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": LONGEST,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "query_pre_attn_scalar": 64,
    "torch_dtype": "float32",
}


def main() -> None:
    prompt = np.random.default_rng(0).integers(3, 1000, PROMPT).tolist()
    for name, window in (("full", LONGEST), ("windows", 1024)):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(CONFIG | {"sliding_window": window}))
            llm = LLM(
                folder,
                load_format="dummy",
                skip_tokenizer_init=True,
                max_model_len=LONGEST,
                kv_cache_memory_bytes=2 << 30,
                max_num_seqs=4,
                max_num_batched_tokens=2048,
            )
            reading, one, many = (
                generate_s(llm, [prompt], length, time.process_time) for length in (1, 1, STEPS + 1)
            )
            step = (many - one) / STEPS  # the prompt is in the prefix cache
        print(f"{name}: prompt {reading:.1f} s, decode {1000 * step:.2f} ms; the memory table says what fits")


if __name__ == "__main__":
    main()
