"""Time the reading of a rank-16 LoRA adapter on all seven projections of a Llama-3.1-8B.

    python benchmarks/lora_loading.py [FOLDER]

The files hold dummy values and are in the page cache. The best of several runs counts.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import test_helpers  # noqa: F401, I001
import torch
from random_adapters import write_adapter

from quire.attention.torch_sdpa import TorchSDPA
from quire.layers.linear import GateUpLinear, QKVLinear, RowLinear
from quire.layers.lora import AdapterSlots
from quire.layers.scope import Scope
from quire.loader.lora import LoRAReader
from quire.loader.lora_files import LoRAFiles

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS = 4096, 14336, 32, 32, 8
MODEL = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
}


def reader(rank: int) -> LoRAReader:
    """Return a reader for the model's layers, which have no weights."""
    slots = AdapterSlots(max_slots=1, max_rank=rank, dtype=torch.bfloat16, device=torch.device("cpu"))
    scope = Scope(torch.bfloat16, torch.device("meta"), TorchSDPA(), 8, adapters=slots) / "model" / "layers"
    for layer in range(LAYERS):
        attention, mlp = scope / layer / "self_attn", scope / layer / "mlp"
        QKVLinear(HIDDEN, HEADS, KV_HEADS, HIDDEN // HEADS, attention / "qkv_proj")
        RowLinear(HIDDEN, HIDDEN, attention / "o_proj")
        GateUpLinear(HIDDEN, INNER, mlp / "gate_up_proj")
        RowLinear(INNER, HIDDEN, mlp / "down_proj")
    return LoRAReader(slots)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, nargs="?", help="An adapter that is there; none: one is made.")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--alpha", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = args.folder or Path(made) / "adapter"
        if args.folder is None:
            write_adapter(folder, MODEL, args.rank)
            config = json.loads((folder / "adapter_config.json").read_text())
            (folder / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": args.alpha}))
        measure(reader(args.rank), folder, args.repeats)


def measure(reading: LoRAReader, folder: Path, repeats: int) -> None:
    def contents() -> None:
        with LoRAFiles(folder) as files:
            files.contents()

    phases = {"contents": contents, "all": lambda: reading.read("one", folder)}
    for name, phase in phases.items():
        found = []
        with torch.inference_mode():
            for _ in range(repeats):
                began, busy = time.perf_counter(), time.process_time()
                phase()
                found.append((time.perf_counter() - began, time.process_time() - busy))
        wall, worked = (1000 * min(each) for each in zip(*found, strict=True))
        print(f"{name:>10}: {wall:6.1f} ms, {worked:6.1f} ms of processors")


if __name__ == "__main__":
    main()
