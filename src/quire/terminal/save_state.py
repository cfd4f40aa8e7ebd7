"""`quire save-sharded-state`: saves a model as the engine stores it, for `--load-format sharded_state`."""

import argparse
import time
from pathlib import Path

from quire.config.cli import FlagParser, add_engine_flags, engine_args_from
from quire.config.engine import EngineConfig
from quire.config.parallel import Rank
from quire.configure import configure
from quire.errors import ConfigError
from quire.loader.sharded import ShardedStateKey, save_state
from quire.loader.shards import copy_around
from quire.loader.source import FORMATS, detect
from quire.memory import human
from quire.parallel.group import Group
from quire.parallel.world import World
from quire.worker.worker import Worker


def add_flags(parser: FlagParser) -> None:
    parser.add_argument("model_tag", metavar="MODEL", help="Directory, hub id or URL of the model.")
    add_engine_flags(parser)
    parser.add_argument(
        "-o", "--output", required=True, metavar="DIR", help="A directory that is new or empty."
    )


def run(args: argparse.Namespace) -> int:
    output = Path(args.output).expanduser()
    config = configure(engine_args_from(args) | {"model": args.model_tag})
    check_state(config, output)
    checkpoint, started = config.checkpoint, time.monotonic()
    source = FORMATS[detect(checkpoint, config.load.load_format)](checkpoint, config.model.seed)
    output.mkdir(parents=True, exist_ok=True)
    num_bytes, size = 0, config.parallel.tensor_parallel_size
    for rank in range(size):  # one after the other: loading a shard needs no other rank
        worker = Worker(config, World(Rank(tp=rank), tp=Group(rank, size)))
        worker.load()
        key = ShardedStateKey.of(
            checkpoint.facts.architecture, worker.dtype, worker.device, config.model.quantization, size
        )
        num_bytes += save_state(worker.model, key, source.shapes({}), output, rank)
    copy_around(checkpoint.path, output)
    print(f"Wrote {human(num_bytes)} to {output} in {time.monotonic() - started:.1f} s")
    return 0


def check_state(config: EngineConfig, output: Path) -> None:
    """Raise a ConfigError if the model cannot be saved with these settings, or not in the directory
    `output`."""
    if config.checkpoint.format == "gguf":
        raise ConfigError(
            f"{config.checkpoint.path} is a GGUF file, which is memory-mapped: a saved state is not faster"
        )
    if config.checkpoint.facts.borrowed is not None:
        raise ConfigError(
            f"{config.checkpoint.path} runs with the transformers backend, which loads its own weights"
        )
    if config.load.cpu_offload_gb:
        raise ConfigError("a state is saved from weights on the device: leave cpu_offload_gb out")
    parallel = config.parallel
    if parallel.pipeline_parallel_size > 1 or parallel.enable_expert_parallel:
        raise ConfigError(
            "sharded states support only tensor_parallel_size; leave "
            "pipeline_parallel_size and enable_expert_parallel out"
        )
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"{output} exists and is not an empty directory; choose another --output")
