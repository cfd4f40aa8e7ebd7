"""Time how long a request takes whose model must first take the place of another in a server of two models.

    python benchmarks/model_swap.py CONFIG_DIR [--rounds 5] [--serve "--max-model-len 4096"]

Both models have the same random weights, which are written to files first. Times are seconds from the request
to its first token: of a model that is not loaded, of one that sleeps in host memory (level 1), and of one
whose weights were discarded (level 2), with the files in the page cache and without.
"""

import argparse
import json
import os
import shlex
import statistics
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from server_process import Server
from weight_updates import fill, shapes_of

NAMES = "first", "second"
_SHARD_BYTES = 4 << 30


def write_checkpoint(config_dir: str, folder: Path) -> int:
    """Write a checkpoint with random bfloat16 weights, and return its bytes."""
    shapes = shapes_of(config_dir)
    shards: list[dict[str, torch.Size]] = [{}]
    size = 0
    for name, shape in shapes.items():
        if size > _SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = torch.Size(shape)
        size += 2 * torch.Size(shape).numel()
    weight_map = {}
    for number, shard in enumerate(shards):
        buffer = torch.empty(
            sum(shape.numel() for shape in shard.values()),
            dtype=torch.bfloat16,
            device="cuda" if torch.cuda.is_available() else "cpu",
        )
        file = f"model-{number:05}.safetensors"
        filled = fill(buffer, {name: list(shape) for name, shape in shard.items()}, number)
        save_file({name: x.cpu() for name, x in filled}, folder / file)
        weight_map |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_bytes((Path(config_dir) / "config.json").read_bytes())
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def forget_files(folder: Path) -> None:
    """Remove the files of a checkpoint from the page cache."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def first_token_s(server: Server, model: str) -> float:
    """Return the seconds that a request for one token takes."""
    params = {"temperature": 0, "max_tokens": 1, "ignore_eos": True}
    began = time.monotonic()
    server.call("/inference/v1/generate", {"model": model, "token_ids": [5, 6, 7], "sampling_params": params})
    return time.monotonic() - began


def wait_for(server: Server, model: str, level: int) -> None:
    """Wait until a model sleeps at this level."""
    for _ in range(600):
        status = next(each["status"] for each in server.call("/v1/models")["data"] if each["id"] == model)
        if status.get("sleep_level") == level:
            return
        time.sleep(0.1)
    raise SystemExit(f"{model} does not sleep at level {level}: {status}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config_dir")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", default="", help="further arguments of quire serve")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, log = Path(name), Path(name) / "log"
        weights = folder / NAMES[0]
        weights.mkdir()
        num_bytes = write_checkpoint(args.config_dir, weights)
        (folder / NAMES[1]).symlink_to(weights)
        models = folder / "models.yaml"
        models.write_text(
            "".join(f"- model: {folder / name}\n  served-model-name: {name}\n" for name in NAMES)
        )
        flags = ["--models-config", str(models), "--skip-tokenizer-init", *shlex.split(args.serve)]
        began = time.monotonic()
        server = Server(log, *flags)
        ready_s = time.monotonic() - began
        try:
            first_token_s(server, NAMES[0])
            rows = {"start of the server with the first model": [ready_s]}
            rows["not loaded, files in the page cache"] = [first_token_s(server, NAMES[1])]
            first_token_s(server, NAMES[0])
            rows["asleep in host memory (level 1)"] = [
                first_token_s(server, NAMES[1 - number % 2]) for number in range(2 * args.rounds)
            ]
            rows["awake"] = [first_token_s(server, NAMES[0]) for _ in range(5)]
        finally:
            server.stop()
        rows["weights discarded (level 2), files in the page cache"] = cached = []
        rows["weights discarded (level 2), files not in the page cache"] = uncached = []
        server = Server(log, *flags, "--models-sleep-after", "0.5", "--models-discard-after", "1")
        try:
            for times in (cached, uncached):
                for _ in range(2):
                    wait_for(server, NAMES[0], 2)
                    if times is uncached:
                        forget_files(weights)
                    times.append(first_token_s(server, NAMES[0]))
        finally:
            server.stop()
        print(f"{num_bytes / 1e9:.2f} GB of weights\n")
        print("| state of the model | s: median | largest |\n|---|--:|--:|")
        for label, times in rows.items():
            print(f"| {label} | {statistics.median(times):.2f} | {max(times):.2f} |")


if __name__ == "__main__":
    main()
