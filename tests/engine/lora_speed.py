"""`python lora_speed.py CONFIG_DIR`: ms of a decode step and prompt tokens per second by number of adapters,
and ms until the first token of a request whose adapter was never used; random weights and adapters.

Not a test. `--adapters 0` is an engine without them.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from quire import LLM, LoRARequest
from quire.bench.gpu import DECODE_PROMPT, DECODE_STEPS, no_collections, prompts_of
from quire.bench.gpu import random as chance
from quire.data.params import SamplingParams

REPEATS = 3
PROJECTIONS = "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"


def write_adapter(path: Path, model: dict[str, Any], rank: int) -> None:
    """A random one on all seven projections of a Llama."""
    hidden, inner = model["hidden_size"], model["intermediate_size"]
    kv = hidden // model["num_attention_heads"] * model["num_key_value_heads"]
    sizes = {
        "self_attn": {"q_proj": (hidden, hidden), "k_proj": (hidden, kv), "v_proj": (hidden, kv)},
        "mlp": {"gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden)},
    }
    sizes["self_attn"]["o_proj"] = hidden, hidden
    tensors = {}
    for layer in range(model["num_hidden_layers"]):
        for half, names in sizes.items():
            for name, (size_in, size_out) in names.items():
                at = f"base_model.model.model.layers.{layer}.{half}.{name}"
                tensors[f"{at}.lora_A.weight"] = 0.02 * torch.randn(rank, size_in, dtype=torch.bfloat16)
                tensors[f"{at}.lora_B.weight"] = 0.02 * torch.randn(size_out, rank, dtype=torch.bfloat16)
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(PROJECTIONS)}
    (path / "adapter_config.json").write_text(json.dumps(config))


def write_adapters(folder: Path, model: dict[str, Any], rank: int, count: int) -> list[LoRARequest]:
    """All the same files."""
    write_adapter(folder / "1", model, rank)
    for number in range(2, count + 1):
        shutil.copytree(folder / "1", folder / str(number), copy_function=os.link)
    return [LoRARequest(f"a{number}", number, str(folder / str(number))) for number in range(1, count + 1)]


def seconds(llm: LLM, prompts: list[list[int]], length: int, adapters: list[LoRARequest]) -> float:
    """Until all outputs are there; the requests have these adapters in turns."""
    params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)
    own = [adapters[i % len(adapters)] if adapters else None for i in range(len(prompts))]
    with no_collections():
        began = time.perf_counter()
        outputs = llm.generate(prompts, params, lora_request=own, use_tqdm=False)
        took = time.perf_counter() - began
    assert [len(output.outputs[0].token_ids) for output in outputs] == [length] * len(prompts)
    return took


def decode_ms(llm: LLM, batch: int, adapters: list[LoRARequest]) -> float:
    rng, found = chance.Random(batch), []
    seconds(llm, prompts_of(rng, batch, DECODE_PROMPT), 4, adapters)
    for _ in range(REPEATS):
        prompts = prompts_of(rng, batch, DECODE_PROMPT)
        one = seconds(llm, prompts, 1, adapters)
        found.append((seconds(llm, prompts, DECODE_STEPS, adapters) - one) / (DECODE_STEPS - 1))
    return 1000 * statistics.median(found)


def prefill_rate(llm: LLM, adapters: list[LoRARequest]) -> float:
    rng, took = chance.Random(1), []
    for _ in range(REPEATS):
        took.append(seconds(llm, prompts_of(rng, 16, 2048), 1, adapters))
    return 16 * 2048 / statistics.median(took)


def first_use_ms(llm: LLM, adapters: list[LoRARequest]) -> tuple[float, float]:
    """Beyond what the same request takes without an adapter: read from disk, and from host memory."""
    prompt, rng, plain, new = [[1, 2, 3]], chance.Random(2), [], []
    for _ in range(5):
        plain.append(seconds(llm, prompts_of(rng, 1, 16), 1, []))
    for adapter in adapters:
        new.append(seconds(llm, prompt, 1, [adapter]))
    again = [seconds(llm, prompt, 1, [adapter]) for adapter in adapters]
    base = statistics.median(plain)
    return 1000 * (statistics.median(new) - base), 1000 * (statistics.median(again) - base)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("--adapters", type=int, default=8, help="Slots; 0: an engine without adapters.")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--used", type=int, nargs="+", default=[0, 1, 8], help="Adapters in a batch.")
    parser.add_argument("--prefill", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    model = json.loads((Path(args.config) / "config.json").read_text())
    folder = Path(tempfile.mkdtemp())
    adapters = write_adapters(folder, model, args.rank, args.adapters + 4)
    began = time.perf_counter()
    llm = LLM(
        args.config, load_format="dummy", skip_tokenizer_init=True, enable_prefix_caching=False,
        max_model_len=4096, gpu_memory_utilization=0.9, disable_log_stats=True,
        enable_lora=args.adapters > 0, max_loras=max(args.adapters, 1), max_cpu_loras=args.adapters + 4,
        max_lora_rank=args.rank,
    )  # fmt: skip
    seconds(llm, [[1, 2, 3]], 1, [])
    print(f"start {time.perf_counter() - began:.1f} s", flush=True)
    if args.adapters:
        seconds(llm, [[1, 2, 3]], 1, adapters[:1])
        new, again = first_use_ms(llm, adapters[-4:])
        print(f"first use {new:.1f} ms, the one after {again:.1f} ms", flush=True)
    for used in args.used if args.adapters else [0]:
        for batch in args.batch:
            if used <= batch:
                ms = decode_ms(llm, batch, adapters[:used])
                print(f"batch {batch}, {used} of {args.adapters} adapters: {ms:.3f} ms", flush=True)
        if args.prefill:
            print(f"prefill, {used} adapters: {prefill_rate(llm, adapters[:used]):.0f} tok/s", flush=True)
    llm.llm_engine.close()
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
