"""Time weight updates of a server, alone and under streaming traffic, and check all answers.

    python benchmarks/weight_updates.py CONFIG_DIR [--seconds 120] [--serve "--batch-invariant"]

A trainer process has two sets of random weights for the model of CONFIG_DIR, on the same GPU (CUDA IPC) or on
a CPU in shared memory. The server gets them in turns. Streams that no update interrupted must have the tokens
of the version that they name. With `--compare`, a new engine then loads the last weights from files.
"""

import argparse
import base64
import itertools
import json
import os
import pickle
import random
import shlex
import statistics
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context, shared_memory
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from server_process import CALL_S, Server
from torch import Tensor

SETS = 2
PROMPTS = [[(7919 * number + 31 * at) % 900 + 3 for at in range(8 + 12 * number)] for number in range(8)]
LENGTHS = (8, 64, 256)


def shapes_of(config_dir: str) -> dict[str, list[int]]:
    """Return the shape of each tensor of a checkpoint for this configuration."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(config_dir)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    names = {name: list(x.shape) for name, x in model.state_dict().items()}
    if config.tie_word_embeddings:
        names.pop("lm_head.weight", None)
    return names


def fill(buffer: Tensor, shapes: dict[str, list[int]], seed: int) -> Iterator[tuple[str, Tensor]]:
    """Fill a bfloat16 buffer with random weights, and yield each tensor."""
    torch.manual_seed(seed)
    first = 0
    for name, shape in shapes.items():
        end = first + torch.Size(shape).numel()
        part = buffer[first:end].view(shape)
        part.fill_(1.0) if "norm" in name else part.normal_(0.0, 0.05)
        first = end
        yield name, part


def train(config_dir: str, folder: str, pipe: Connection) -> None:
    """Hold the sets of weights. For each number that is received, send the transfer backend's description of
    that set. The last set is also written to `folder` if asked for by its negative number."""
    from safetensors.torch import save_file

    shapes = shapes_of(config_dir)
    size = sum(torch.Size(shape).numel() for shape in shapes.values())
    description: dict[str, Any] = {
        "names": list(shapes), "dtype_names": ["bfloat16"] * len(shapes), "shapes": list(shapes.values())
    }  # fmt: skip
    segments, buffers = [], []
    for number in range(SETS):
        if torch.cuda.is_available():
            buffers.append(torch.empty(size, dtype=torch.bfloat16, device="cuda"))
        else:
            segments.append(shared_memory.SharedMemory(create=True, size=2 * size))
            buffers.append(torch.frombuffer(segments[-1].buf, dtype=torch.bfloat16)[:size])
        list(fill(buffers[-1], shapes, number))
    pipe.send(sum(buffer.nbytes for buffer in buffers) // SETS)
    while (wanted := pipe.recv()) is not None:
        if wanted < 0:
            weights = {name: x.cpu() for name, x in fill(buffers[-wanted - 1], shapes, -wanted - 1)}
            save_file(weights, f"{folder}/model.safetensors")
            pipe.send(None)
        elif segments:
            pipe.send(description | {"shm_name": segments[wanted].name})
        else:
            pipe.send(description | {"ipc_handles_pickled": handle_of(buffers[wanted])})
    buffers.clear()
    for segment in segments:
        segment.unlink()


def handle_of(buffer: Tensor) -> str:
    from torch.multiprocessing.reductions import reduce_tensor

    uuid = str(torch.cuda.get_device_properties(0).uuid)
    handles = {uuid: reduce_tensor(buffer.view(torch.uint8))[1]}
    return base64.b64encode(pickle.dumps(handles)).decode()


class Stream(NamedTuple):
    """A finished streamed response: its times in seconds, weight version, number of its prompt, and
    tokens."""

    began: float
    ended: float
    version: str
    prompt: int
    num_asked: int
    tokens: list[int]
    pauses: list[float]


class Run:
    """The streaming traffic on one server, and its weight updates."""

    def __init__(self, server: Server, pipe: Connection) -> None:
        self.server, self.pipe = server, pipe
        self.updates: list[tuple[float, float, float]] = []
        """Times at which each update began, was applied at the earliest, and had ended."""
        self.streams: list[Stream] = []
        self.errors: Counter[str] = Counter()
        self.is_over = False

    def update(self, number: int, version: str) -> float:
        """Give the server a set of weights, and return the seconds that this took."""
        self.pipe.send(number)
        info = self.pipe.recv()
        began = time.monotonic()
        self.server.call("/start_weight_update", {})
        self.server.call("/update_weights", {"update_info": info})
        applied = time.monotonic()
        self.server.call("/finish_weight_update", {"weight_version": version})
        ended = time.monotonic()
        self.updates.append((began, applied, ended))
        return ended - began

    def stream(self, prompt: int, num_asked: int) -> Stream:
        params = {"temperature": 0, "max_tokens": num_asked, "ignore_eos": True}
        body = {"token_ids": PROMPTS[prompt], "sampling_params": params, "stream": True}
        began = last = time.monotonic()
        tokens: list[int] = []
        pauses = []
        request = self.server.request("/inference/v1/generate", body)
        with urllib.request.urlopen(request, timeout=CALL_S) as answer:
            version = answer.headers["x-weight-version"]
            for line in answer:
                if line.startswith(b"data: {"):
                    now = time.monotonic()
                    pauses.append(now - last)
                    last = now
                    for choice in json.loads(line[6:]).get("choices", ()):
                        tokens += choice["token_ids"]
        return Stream(began, time.monotonic(), version, prompt, num_asked, tokens, pauses)

    def send_streams(self, seed: int) -> None:
        draw = random.Random(seed)
        while not self.is_over:
            try:
                self.streams.append(self.stream(draw.randrange(len(PROMPTS)), draw.choice(LENGTHS)))
            except Exception as error:
                self.errors[f"{type(error).__name__}: {error}"] += 1
                time.sleep(0.5)

    def send_updates(self, every_s: float) -> None:
        for number in itertools.count():
            if self.is_over:
                return
            self.update(number % SETS, f"{number % SETS}-{number}")
            time.sleep(every_s)

    def verdict(self, stream: Stream, references: dict[tuple[int, int], list[int]]) -> str:
        """Return the kind of a stream: cut off, interrupted by an update, or equal to its version's answer or
        not."""
        if len(stream.tokens) != stream.num_asked:
            return "ended early"
        if any(applied < stream.ended and ended > stream.began for _, applied, ended in self.updates):
            return "continued over an update"
        expected = references[int(stream.version.split("-")[0]), stream.prompt][: stream.num_asked]
        return "equal to its version" if stream.tokens == expected else "wrong"


@contextmanager
def training(config_dir: str, folder: str) -> Iterator[tuple[Connection, int]]:
    """Run the trainer, and yield its pipe and the bytes of a set of weights."""
    here, there = get_context("spawn").Pipe()
    trainer = get_context("spawn").Process(target=train, args=(config_dir, folder, there), daemon=True)
    trainer.start()
    try:
        yield here, here.recv()
    finally:
        here.send(None)
        trainer.join(60)


def resident_mib(server: Server) -> int:
    processes = [psutil.Process(server.process.pid)]
    processes += processes[0].children(recursive=True)
    return sum(process.memory_info().rss for process in processes) >> 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config_dir")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--every", type=float, default=2.0, help="seconds between updates")
    parser.add_argument("--compare", action="store_true", help="load the last weights into a new engine")
    parser.add_argument("--serve", default="", help="further arguments of quire serve")
    args = parser.parse_args()
    backend = "ipc" if torch.cuda.is_available() else "shared_memory"
    flags = [args.config_dir, "--load-format", "dummy", "--skip-tokenizer-init", *shlex.split(args.serve)]
    flags += ["--weight-transfer-config", json.dumps({"backend": backend}), "--dtype", "bfloat16"]
    env = os.environ | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    with tempfile.TemporaryDirectory() as folder, training(args.config_dir, folder) as (pipe, num_bytes):
        log = Path(folder) / "log"
        server = Server(log, *flags, env=env)
        run = Run(server, pipe)
        try:
            server.call(
                "/init_weight_transfer_engine", {"init_info": {"packed": True} if backend == "ipc" else {}}
            )
            references, alone_s = {}, []
            for number in (*range(SETS), *range(SETS), *range(SETS)):
                alone_s.append(run.update(number, f"{number}-first"))
                for prompt in range(len(PROMPTS)):
                    references[number, prompt] = run.stream(prompt, max(LENGTHS)).tokens
            first_mib = resident_mib(server)
            run.updates.clear()
            threads = [
                threading.Thread(target=run.send_streams, args=(seed,)) for seed in range(args.streams)
            ]
            threads.append(threading.Thread(target=run.send_updates, args=(args.every,)))
            for thread in threads:
                thread.start()
            time.sleep(args.seconds)
            run.is_over = True
            for thread in threads:
                thread.join()
            last_mib = resident_mib(server)
            last = (len(run.updates) - 1) % SETS
            answers = [references[last, prompt] for prompt in range(len(PROMPTS))]
        finally:
            server.stop()
        kinds = Counter(run.verdict(stream, references) for stream in run.streams)
        table(run, kinds, alone_s, num_bytes)
        print(f"| resident MiB before and after | {first_mib:,}, {last_mib:,} |")
        print(f"| tracebacks in the log | {log.read_text(errors='replace').count('Traceback')} |", flush=True)
        if args.compare:
            pipe.send(-last - 1)
            pipe.recv()
            (Path(folder) / "config.json").write_text((Path(args.config_dir) / "config.json").read_text())
            others = answers_of_new_engine(folder, shlex.split(args.serve))
            num_wrong = sum(answer != other for answer, other in zip(answers, others, strict=True))
            print(f"| answers of a new engine that differ | {num_wrong} of {len(answers)} |")


def answers_of_new_engine(folder: str, flags: list[str]) -> list[list[int]]:
    """Return the answers of an engine that was started with the weights in `folder`."""
    from quire import LLM, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=max(LENGTHS), ignore_eos=True)
    llm = LLM(
        folder,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=2048,
        gpu_memory_utilization=0.5,  # the trainer still has its weights
        batch_invariant="--batch-invariant" in flags,
    )
    prompts: list[Any] = [{"prompt_token_ids": ids} for ids in PROMPTS]
    outputs = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in prompts]
    llm.llm_engine.close()
    return [list(output.outputs[0].token_ids) for output in outputs]


def table(run: Run, kinds: Counter[str], alone_s: list[float], num_bytes: int) -> None:
    busy_s = sorted(ended - began for began, _, ended in run.updates)
    pauses = sorted(max(stream.pauses[1:]) for stream in run.streams if len(stream.pauses) > 1)
    updates = f"{len(busy_s)}; {statistics.median(busy_s):.3f}, {busy_s[-1]:.3f}"
    alone = f"{statistics.median(alone_s[2:]):.3f}, {max(alone_s[2:]):.3f}, {alone_s[0]:.3f}"
    rows = {
        "weights, GB": f"{num_bytes / 1e9:.2f}",
        "update without traffic, s: median, largest, first": alone,
        "updates under traffic: number; median and largest, s": updates,
        **{f"streams: {kind}": f"{number:,}" for kind, number in kinds.most_common()},
        **{error: str(number) for error, number in run.errors.items()},
        "tokens": f"{sum(len(stream.tokens) for stream in run.streams):,}",
        "longest pause of a stream, s: median, largest": f"{statistics.median(pauses):.3f}, {pauses[-1]:.3f}",
    }
    print("| | |\n|---|--:|")
    for name, value in rows.items():
        print(f"| {name} | {value} |")


if __name__ == "__main__":
    main()
