"""`quire download`: downloads a model into the local cache, so that a later start needs no network."""

import argparse
import os

from quire.checkpoint.hub import locate
from quire.config.cli import FlagParser
from quire.config.env import Env


def add_flags(parser: FlagParser) -> None:
    parser.add_argument("model", help="Hub id or URL (s3://..., gs://...) of the model, or `default`.")
    parser.add_argument("--revision", help="Of a hub model: branch, tag or commit.")
    parser.add_argument("--gguf-file", metavar="FILE", help="The .gguf file, if the model has several.")
    parser.add_argument("--hf-token", metavar="TOKEN", help="Token for private or gated models on the hub.")
    parser.add_argument("--download-dir", metavar="DIR", help="Directory of downloads. Default: the cache.")
    parser.add_argument("--trust-remote-code", action="store_true", help="Download Python files, too.")


def run(args: argparse.Namespace) -> int:
    path = locate(
        args.model,
        revision=args.revision,
        download_dir=args.download_dir,
        token=args.hf_token,
        cache_root=Env.read(os.environ).cache_root,
        gguf_file=args.gguf_file,
        with_code=args.trust_remote_code,
    )
    print(path)
    return 0
