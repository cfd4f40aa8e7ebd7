"""Time how long a request takes whose model must first take the place of another in a server of two models.

    python benchmarks/model_swap.py CONFIG_DIR [--rounds 5] [--serve "--max-model-len 4096"]

The weights of both models are zeros in sparse files, which are read as fast as files in the page cache. Times
are seconds from the request to its first token: of a model that is not loaded, of one that sleeps in host
memory (level 1), and of one whose weights were discarded (level 2).
"""

import argparse
import json
import math
import shlex
import statistics
import struct
import tempfile
import time
from pathlib import Path

from server_process import Server
from weight_updates import shapes_of

NAMES = "first", "second"


def write_checkpoint(config_dir: str, folder: Path) -> int:
    """Write a checkpoint whose bfloat16 weights are zeros, and return its bytes."""
    end, header = 0, {}
    for name, shape in shapes_of(config_dir).items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    (folder / "config.json").write_bytes((Path(config_dir) / "config.json").read_bytes())
    return end


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


def print_row(state: str, times: list[float]) -> None:
    print(f"| {state} | {statistics.median(times):.2f} | {max(times):.2f} |", flush=True)


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
        server = Server(log, *flags)
        print(f"{num_bytes / 1e9:.2f} GB of weights\n")
        print("| state of the model | s: median | largest |\n|---|--:|--:|", flush=True)
        try:
            first_token_s(server, NAMES[0])
            print_row("not loaded", [first_token_s(server, NAMES[1])])
            first_token_s(server, NAMES[0])
            turns = [NAMES[1 - number % 2] for number in range(2 * args.rounds)]
            print_row("asleep in host memory (level 1)", [first_token_s(server, name) for name in turns])
            print_row("awake", [first_token_s(server, NAMES[0]) for _ in range(5)])
        finally:
            server.stop()
        discarded = []
        server = Server(log, *flags, "--models-sleep-after", "0.5", "--models-discard-after", "1")
        try:
            for _ in range(3):
                wait_for(server, NAMES[0], 2)
                discarded.append(first_token_s(server, NAMES[0]))
        finally:
            server.stop()
        print_row("weights discarded (level 2)", discarded)


if __name__ == "__main__":
    main()
