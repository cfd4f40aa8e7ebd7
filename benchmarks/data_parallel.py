"""Measure data parallelism on a CPU: prefix hit rate by routing, then tokens per second of one and two cores.

    python benchmarks/data_parallel.py

Prompts share their beginnings in groups; the cache of one core holds two fifths of the beginnings. The
model is so small that everything is overhead.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import test_helpers  # noqa: F401, I001
from serve_process import ServeProcess

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "torch_dtype": "float32",
}
FLAGS = ("--load-format", "dummy", "--skip-tokenizer-init", "--disable-uvicorn-access-log")
PREFIXES, PREFIX_LEN = 40, 512
SHARED = {
    "--dataset-name": "prefix_repetition",
    "--num-prompts": "400",
    "--prefix-repetition-num-prefixes": str(PREFIXES),
    "--prefix-repetition-prefix-len": str(PREFIX_LEN),
    "--prefix-repetition-suffix-len": "32",
    "--prefix-repetition-output-len": "8",
    "--max-concurrency": "8",
}
RANDOM = {
    "--num-prompts": "400",
    "--random-input-len": "32",
    "--random-output-len": "64",
    "--max-concurrency": "64",
}
FEW = PREFIXES * PREFIX_LEN // 16 * 2 // 5 + 8 * 3


def measure(model: Path, folder: Path, traffic: dict[str, str], *flags: str) -> dict[str, Any]:
    with ServeProcess(str(model), *FLAGS, *flags, log=folder / "log") as server:
        num_api = (
            2 if "--api-server-count" not in flags else int(flags[flags.index("--api-server-count") + 1])
        )
        server.until_healthy(num_api=num_api)
        words = [word for pair in traffic.items() for word in pair]
        saved = ("--save-result", "--result-dir", str(folder), "--result-filename", "run.json")
        command = [sys.executable, "-m", "quire", "bench", "serve", "--base-url", server.url, *words, *saved]
        subprocess.run([*command, "--ignore-eos", "--disable-tqdm"], check=True, capture_output=True)
        found: dict[str, Any] = json.loads((folder / "run.json").read_text())
        assert not found["failed"], found
        return found


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(CONFIG))
        print("two cores, prefix hit rate by routing")
        for routing in ("round_robin", "load", "affinity"):
            flags = ("-dp", "2", "--data-parallel-routing", routing, "--num-gpu-blocks-override", str(FEW))
            found = measure(folder, folder, SHARED, *flags)
            ttft = found["mean_ttft_ms"]
            print(f"  {routing:<12} {found['prefix_cache_hit_rate']:5.1f} %   first token {ttft:6.1f} ms")
        print("tokens a second, all overhead")
        for cores in ("1", "2"):
            found = measure(folder, folder, RANDOM, "-dp", cores, "--api-server-count", "1")
            print(f"  {cores} core(s) {found['output_throughput']:8.0f}")


if __name__ == "__main__":
    main()
