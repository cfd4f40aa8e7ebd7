"""`quire install-vllm-command`: writes a `vllm` script that runs Quire, so that `vllm serve` works."""

import os
import shutil
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from quire.cli import main as run_quire
from quire.errors import ConfigError
from quire.version import VLLM_VERSION, __version__

_MARK = "from quire.vllm_command import main"
_SCRIPT = f"""#!{{python}}
# Runs Quire under the name of vLLM. Written by `quire install-vllm-command`; delete this file to undo it.
import sys

{_MARK}

sys.exit(main(sys.argv[1:]))
"""


def add_flags(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--dir", default=os.path.dirname(sys.executable), help="folder of the script; default: that of python"
    )


def run(args: Namespace) -> int:
    """Write the script; refuse to replace a `vllm` command that is not Quire's."""
    path = Path(args.dir).expanduser() / "vllm"
    existing = Path(shutil.which("vllm") or path)
    for other in (path, existing):
        if other.exists() and _MARK not in other.read_text(errors="replace"):
            raise ConfigError(f"{other} is another vllm command; uninstall vLLM, or use `quire` itself")
    try:
        path.write_text(_SCRIPT.format(python=sys.executable))
        path.chmod(0o755)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; choose another --dir") from None
    print(f"{path} runs Quire {__version__} with the interface of vLLM {VLLM_VERSION}")
    if shutil.which("vllm") is None:
        print(f"{path.parent} is not on PATH: add it, or call the script by its path")
    return 0


def main(words: Sequence[str]) -> int:
    """Run the `quire` command under the name of vLLM, after a note on stderr."""
    if list(words) in (["--version"], ["-v"]):
        print(VLLM_VERSION)
        return 0
    note = f"vllm: this is Quire {__version__}, with the interface of vLLM {VLLM_VERSION}"
    print(note, file=sys.stderr, flush=True)
    return run_quire(words)
