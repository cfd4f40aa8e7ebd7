"""Time the transfer of prefixes between two engines on one GPU, by CUDA IPC and through host memory.

    python benchmarks/kv_transfer.py CONFIG_DIR [--tokens 32768] [--rounds 3]

Both engines have the same random weights. One computes prompts, in another process, and one loads them.
Prints the seconds and the rate of the copy by each transport, and the seconds to the first token, also of a
prompt that is computed: medians of the rounds, after a round that is not counted.
"""

import argparse
import os
import statistics
import time
from concurrent.futures import Future
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from quire import LLM, SamplingParams
from quire.data.kv_tiers import BlockLoad, LoadDone

BLOCK_SIZE = 16


def open_engine(config_dir: str, num_tokens: int, role: str) -> LLM:
    settings: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "enforce_eager": True}
    settings |= {"max_num_seqs": 4, "max_model_len": num_tokens + 64, "disable_log_stats": True}
    settings |= {"num_gpu_blocks_override": 2 * num_tokens // BLOCK_SIZE + 64, "block_size": BLOCK_SIZE}
    settings["enable_prefix_caching"] = True
    settings["kv_transfer_config"] = {"kv_connector": "NixlConnector", "kv_role": role}
    return LLM(config_dir, **settings)


def first_token(llm: LLM, prompt: list[int], transfer: dict[str, Any] | None) -> Any:
    extra_args = None if transfer is None else {"kv_transfer_params": transfer}
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, extra_args=extra_args)
    (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    return output


def compute_prompts(config_dir: str, num_tokens: int, pipe: Connection) -> None:
    llm = open_engine(config_dir, num_tokens, "kv_producer")
    pipe.send(None)
    while (prompt := pipe.recv()) is not None:
        pipe.send(first_token(llm, prompt, {"do_remote_decode": True}).kv_transfer_params)


def watch_loads(llm: Any) -> list[Future[LoadDone]]:
    """Return the list to which the result of each copy to the engine will be added."""
    executor, results = llm.llm_engine.core.executor, list[Future[LoadDone]]()
    load = executor.load

    def watched(blocks: BlockLoad) -> Future[LoadDone]:
        future: Future[LoadDone] = load(blocks)
        if blocks.keys:
            results.append(future)
        return future

    executor.load = watched
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config_dir")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    os.environ |= {"VLLM_NIXL_SIDE_CHANNEL_PORT": "0", "QUIRE_CLUSTER_TOKEN": "secret"}
    here, there = get_context("spawn").Pipe()
    producer_args = args.config_dir, args.tokens, there
    producer = get_context("spawn").Process(target=compute_prompts, args=producer_args, daemon=True)
    producer.start()
    llm: Any = open_engine(args.config_dir, args.tokens, "kv_consumer")
    loads, tiers = watch_loads(llm), llm.llm_engine.core.executor._worker._tiers
    assert tiers.ipc is not None, "this needs a GPU"
    entry_bytes = tiers.kinds[0].copies.entries.entry_bytes
    here.recv()
    draw = np.random.default_rng(5)
    times: dict[str, list[tuple[float, float]]] = {"CUDA IPC": [], "host memory": [], "computed": []}
    for _ in range(args.rounds + 1):
        for transport, seconds in times.items():
            prompt = draw.integers(10, 90, args.tokens + 1).tolist()
            transfer = None
            if transport != "computed":
                here.send(prompt)
                transfer = here.recv()
                address = transfer["remote_host"], transfer["remote_port"]
                tiers.remote.device_reach[address] = transport == "CUDA IPC"
            began = time.perf_counter()
            num_cached = first_token(llm, prompt, transfer).num_cached_tokens or 0
            ended = time.perf_counter()
            assert num_cached == (0 if transfer is None else args.tokens), "the prefix was not loaded"
            if transfer is not None:
                reaches_device = tiers.remote.device_reach[address]
                assert reaches_device == (transport == "CUDA IPC"), "CUDA IPC is not possible"
            seconds.append((loads.pop().result().seconds if loads else 0.0, ended - began))
    num_bytes = args.tokens // BLOCK_SIZE * entry_bytes
    print(f"{args.tokens} tokens, {num_bytes / 1e9:.2f} GB of KV blocks")
    for transport, rounds in times.items():
        copy_s, first_s = (statistics.median(values) for values in zip(*rounds[1:], strict=True))
        rate = f"copy {copy_s:.4f} s, {num_bytes / copy_s / 1e9:.1f} GB/s; " if copy_s else ""
        print(f"{transport}: {rate}first token {first_s:.4f} s", flush=True)
    here.send(None)
    producer.join(60)
    llm.llm_engine.close()


if __name__ == "__main__":
    main()
