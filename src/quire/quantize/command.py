"""`quire quantize`: the command line, and the output directory."""

import argparse
import os
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from quire.checkpoint.hub import DEFAULT_MODEL, is_default_model, locate
from quire.config.cli import FlagParser
from quire.config.env import Env
from quire.config.plugins import load_plugins
from quire.errors import ConfigError
from quire.memory import human
from quire.quantize.compressed import RoundingPlan, write_compressed
from quire.quantize.gguf import GGUF_KINDS, write_gguf
from quire.quantize.schemes import SCHEMES
from quire.quantize.stored import SourceModel


def add_flags(parser: FlagParser) -> None:
    parser.add_argument("model", help="Directory, .gguf file, hub id or URL of the model, or `default`.")
    parser.add_argument(
        "--to",
        required=True,
        choices=[*SCHEMES, *GGUF_KINDS],
        help="fp8, int8, int4: a directory in compressed-tensors' layout; gguf-*: one .gguf file.",
    )
    parser.add_argument(
        "-o", "--output", required=True, metavar="DIR", help="A directory that is new or empty."
    )
    parser.add_argument(
        "--group-size",
        type=int,
        metavar="N",
        help="int4: inputs that share a scale. Default: 128, or 64 or 32 if 128 does not divide a layer.",
    )
    parser.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="PATTERN",
        help="Regex of layer names to leave unquantized, beside embeddings, heads, norms and routers; "
        "may be repeated.",
    )
    parser.add_argument("--revision", help="Of a hub model: branch, tag or commit.")
    parser.add_argument("--hf-token", metavar="TOKEN", help="Token for private or gated models on the hub.")


def run(args: argparse.Namespace) -> int:
    if args.group_size is not None and args.to != "int4":
        raise ConfigError(f"--group-size is for --to int4, not for {args.to}, which has fixed groups")
    if args.ignore and args.to in GGUF_KINDS:
        raise ConfigError("--ignore is for fp8, int8 and int4; a .gguf file keeps embeddings and head wider")
    if args.group_size is not None and (args.group_size < 8 or args.group_size % 8):
        raise ConfigError(f"--group-size {args.group_size} must be a multiple of 8, such as 32, 64 or 128")
    path = locate(
        args.model, revision=args.revision, token=args.hf_token, cache_root=Env.read(os.environ).cache_root
    )
    load_plugins()
    stored = SourceModel(path)
    if is_default_model(args.model):
        stored.checkpoint = replace(stored.checkpoint, generation=dict(DEFAULT_MODEL.generation))
    started, to = time.monotonic(), Path(args.output).expanduser()
    num_bytes = convert(stored, args.to, to, group=args.group_size, ignore=args.ignore)
    print(f"Wrote {human(num_bytes)} of weights to {to} in {time.monotonic() - started:.1f} s")
    return 0


def convert(stored: SourceModel, kind: str, to: Path, *, group: int | None = None, ignore: list[str]) -> int:
    """Write the model in the format `kind` into the directory `to`, which is removed on failure; return the
    number of bytes of its tensors."""
    plan = None if kind in GGUF_KINDS else RoundingPlan(stored, SCHEMES[kind], group, ignore)
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ConfigError(f"{to} exists and is not an empty directory; give another --output")
    to.mkdir(parents=True, exist_ok=True)
    bar = tqdm(total=len(stored.shapes), desc="Quantizing", disable=not sys.stderr.isatty())
    try:
        with bar:
            if plan is None:
                return write_gguf(stored, kind, to, bar.update)
            return write_compressed(plan, to, bar.update)
    except BaseException:
        shutil.rmtree(to)
        raise
