"""`quire save-sharded-state`: a model as the engine keeps it, for `--load-format sharded_state`."""

import argparse
import time
from pathlib import Path

from quire.checkpoint.transformers_backend import BORROWED
from quire.config.cli import FlagParser, add_engine_flags, given_from
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
    parser.add_argument("model_tag", metavar="MODEL", help="Directory or hub id of the model.")
    add_engine_flags(parser)
    parser.add_argument(
        "-o", "--output", required=True, metavar="DIR", help="A directory that is new or empty."
    )


def run(args: argparse.Namespace) -> int:
    to = Path(args.output).expanduser()
    config = configure(given_from(args) | {"model": args.model_tag})
    refuse(config, to)
    checkpoint, started = config.checkpoint, time.monotonic()
    source = FORMATS[detect(checkpoint, config.load.load_format)](checkpoint, config.model.seed)
    to.mkdir(parents=True, exist_ok=True)
    num_bytes, size = 0, config.parallel.tensor_parallel_size
    for rank in range(size):  # one after the other: to load a share, nobody else is needed
        worker = Worker(config, World(Rank(tp=rank), tp=Group(rank, size)))
        worker.load()
        kept = ShardedStateKey.of(
            checkpoint.facts.architecture, worker.dtype, worker.device, config.model.quantization, size
        )
        num_bytes += save_state(worker.model, kept, source.shapes({}), to, rank)
    copy_around(checkpoint.path, to)
    print(f"Wrote {human(num_bytes)} to {to} in {time.monotonic() - started:.1f} s")
    return 0


def refuse(config: EngineConfig, to: Path) -> None:
    """Before anything is loaded."""
    if config.checkpoint.format == "gguf":
        raise ConfigError(
            f"{config.checkpoint.path} is a GGUF file, which is mapped as it is: no state of it loads faster"
        )
    if config.checkpoint.facts.architecture == BORROWED:
        raise ConfigError(f"{config.checkpoint.path} runs in transformers, which keeps its weights by itself")
    parallel = config.parallel
    if parallel.pipeline_parallel_size > 1 or parallel.enable_expert_parallel:
        raise ConfigError(
            "a state is saved of layers that are divided by tensor_parallel_size alone; leave "
            "pipeline_parallel_size and enable_expert_parallel out"
        )
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ConfigError(f"{to} is there already and not an empty directory; give another --output")
