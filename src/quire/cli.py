"""The `quire` command. The module of a subcommand is imported only when the subcommand is called."""

import importlib
import os
import sys
from collections.abc import Sequence

from quire.errors import QuireError, nearest
from quire.version import __version__

COMMANDS = {
    "serve": ("serve the OpenAI API over HTTP", "quire.entrypoints.serve"),
    "chat": ("chat with a model in the terminal", "quire.terminal.chat"),
    "complete": ("complete texts in the terminal", "quire.terminal.complete"),
    "bench throughput": ("measure offline requests and tokens per second", "quire.bench.throughput"),
    "bench latency": ("measure the latency of one batch", "quire.bench.latency"),
    "bench serve": ("measure latency and throughput of a running server", "quire.bench.serve"),
    "bench startup": ("measure the time until a model is ready", "quire.bench.startup"),
    "bench on-off": ("measure the gain of each optimization on this machine", "quire.bench.on_off"),
    "plan": ("show which devices a model fits, and its expected speed", "quire.plan.command"),
    "tune": ("find settings that meet latency targets on this machine", "quire.bench.tune"),
    "doctor": ("check this machine for problems with a model", "quire.plan.doctor"),
    "python": ("run a script that was written for vLLM", "quire.entrypoints.vllm_shim"),
    "install-vllm-command": ("put a `vllm` script that runs Quire on the path", "quire.vllm_command"),
    "download": ("download a model into the local cache", "quire.terminal.download"),
    "run-batch": ("answer the requests of an OpenAI batch file", "quire.batch.run"),
    "quantize": ("quantize a model", "quire.quantize.command"),
    "save-sharded-state": ("save a model as the engine stores it", "quire.terminal.save_state"),
    "collect-env": ("describe this machine, for a bug report", "quire.terminal.collect_env"),
}

_HELP = ("-h", "--help", "help")


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, (text, _) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: quire COMMAND [flags]",
            "",
            "An LLM inference and serving engine.",
            "",
            *lines,
            "",
            "`quire COMMAND --help` lists a command's flags; `quire --version` prints the version.",
        ]
    )


def open_closed_streams() -> None:
    """Open the null device in place of standard streams that the caller has closed. Otherwise sockets and
    files would get their descriptors, to which libraries and child processes write."""
    for name, fd, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null == fd:
                os.set_inheritable(fd, True)
            setattr(sys, name, os.fdopen(null, mode))


def main(argv: Sequence[str] | None = None) -> int:
    open_closed_streams()
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in _HELP or words == ["bench"] or (words[0] == "bench" and words[1] in _HELP):
        print(usage())
        return 0
    if words[0] in ("-v", "--version", "version"):
        print(__version__)
        return 0
    name = " ".join(words[:2]) if words[0] == "bench" else words[0]
    if name not in COMMANDS:
        print(
            f"quire: error: unknown command {name!r}{nearest(name, list(COMMANDS))}\n\n{usage()}",
            file=sys.stderr,
        )
        return 2
    text, module = COMMANDS[name]
    try:
        from quire.config.cli import FlagParser  # here, so that Ctrl-C during it prints one line

        command = importlib.import_module(module)
        parser = FlagParser(prog=f"quire {name}", description=text[0].upper() + text[1:] + ".")
        command.add_flags(parser)
        return int(command.run(parser.parse_args(words[len(name.split()) :])))
    except QuireError as error:
        print(f"quire {name}: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"quire {name}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of the output has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
