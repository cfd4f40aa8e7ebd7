"""The flags of `quire bench serve`."""

import argparse
import ast
import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from quire.bench.agent import range_of
from quire.bench.media import BUCKETS, LIMITS, Bucket
from quire.bench.traffic import ENDPOINTS
from quire.config.cli import FlagParser, JsonFlag

Count = Annotated[int, msgspec.Meta(ge=0)]
Size = Annotated[int, msgspec.Meta(ge=1)]
Weight = Annotated[float, msgspec.Meta(ge=0)]


class _Flag(NamedTuple):
    """A flag of the command."""

    names: str
    """Names of the flag, then the placeholder of its value, if it has one."""
    kind: Callable[..., Any]
    """Function that converts the value, unless an action does; `bool` is a switch."""
    default: object
    help: str
    options: Mapping[str, Any] = {}
    """Further arguments of `add_argument`."""

    def add(self, group: argparse._ArgumentGroup) -> None:
        words = self.names.split()
        names = [word for word in words if word.startswith("--")]
        options: dict[str, Any] = {"action": "store_true"}
        if self.kind is not bool:
            options = {"default": self.default, "metavar": " ".join(words[len(names) :]) or None}
            options |= {} if "action" in self.options else {"type": self.kind}
        group.add_argument(*names, help=self.help, **options, **self.options)


def add_flags(parser: FlagParser) -> None:
    for (title, description), flags in FLAGS.items():
        group = parser.add_argument_group(title, description)
        for flag in flags:
            flag.add(group)


class _Limits(argparse.Action):
    """Parse `ttft:200 tpot:50` as {"ttft": 200.0, "tpot": 50.0}."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option: str | None = None,
    ) -> None:
        limits = {}
        for word in values if isinstance(values, list) else []:
            name, _, number = word.partition(":")
            try:
                limits[name] = float(number)
            except ValueError:
                raise argparse.ArgumentError(self, f"{word!r} is not KEY:MS such as ttft:200") from None
        setattr(namespace, self.dest, limits)


def _limits(text: str) -> dict[str, int]:
    try:
        limits: dict[str, int] = msgspec.convert(
            ast.literal_eval(text), dict[Literal["image", "video"], Count]
        )
        return limits
    except (ValueError, SyntaxError):
        form = '{"image": 3, "video": 1}'
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form {form}") from None


def _buckets(text: str) -> dict[Bucket, float]:
    """Parse the weight of each size of media; keys may be strings, as in JSON."""
    try:
        entries = ast.literal_eval(text)
        keys = [ast.literal_eval(key) if isinstance(key, str) else key for key in entries]
        buckets = msgspec.convert(
            dict(zip(keys, entries.values(), strict=True)), dict[tuple[Size, Size, Size], Weight]
        )
    except (ValueError, SyntaxError, TypeError, AttributeError):
        buckets = {}
    if not 0 < sum(buckets.values()) < float("inf"):
        form = "{(256, 256, 1): 0.5, (720, 1280, 16): 0.1}"
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form {form}")
    return buckets


def _pair(text: str) -> tuple[str, str]:
    name, mark, value = text.partition("=")
    if not mark or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=VALUE")
    return name, value


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _percents(text: str) -> list[float]:
    try:
        percents = [float(word) for word in text.split(",")]
    except ValueError:
        percents = [-1.0]
    if any(not 0 <= percent <= 100 for percent in percents):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of percentages such as 50,90,99")
    return percents


_SERVER = (
    _Flag("--backend", str, "openai", "Kind of API: completions, or chat.", {"choices": tuple(ENDPOINTS)}),
    _Flag("--base-url URL", str, None, "Address of the server. Replaces host and port."),
    _Flag("--host", str, "127.0.0.1", "Host of the server. Default: 127.0.0.1."),
    _Flag("--port N", int, 8000, "Port of the server. Default: 8000."),
    _Flag("--endpoint PATH", str, None, "Path of the API. Default: the backend's."),
    _Flag("--model NAME", str, None, "Model to request. Default: the first one served."),
    _Flag("--api-key KEY", str, None, "Default: the variable OPENAI_API_KEY."),
    _Flag("--header NAME=VALUE", _pair, [], "Headers to send with each request.", {"nargs": "+"}),
    _Flag(
        "--ready-check-timeout-sec S", float, 0.0, "Wait this long for a first answer. Default: 0, no check."
    ),
)
_TRAFFIC = (
    _Flag("--num-prompts N", int, 1000, "Requests. Default: 1000."),
    _Flag("--request-rate R", float, math.inf, "Requests per second. Default: inf."),
    _Flag(
        "--burstiness B",
        float,
        1.0,
        "Evenness of arrivals: 1 is a Poisson process, less is burstier. Default: 1.",
    ),
    _Flag("--max-concurrency N", int, None, "Most concurrent requests."),
    _Flag("--num-warmups N", int, 0, "Warm-up requests. Default: 0."),
    _Flag("--seed N", int, 0, "Seed of prompts and arrivals. Default: 0."),
)
_PROMPTS = (
    _Flag(
        "--dataset-name",
        str,
        "random",
        "Kind of prompts; prefix_repetition has groups with a common prefix, random-mm has media, agent has "
        "sessions of many turns.",
        {"choices": ("random", "random-mm", "prefix_repetition", "sharegpt", "custom", "agent")},
    ),
    _Flag("--dataset-path FILE", str, None, "JSON of sharegpt, JSON lines of custom, trace of agent."),
    _Flag(
        "--tokenizer MODEL",
        str,
        None,
        "Makes random prompts texts of the requested length. Without it they are sent as token ids.",
    ),
    _Flag(
        "--random-input-len --input-len N",
        int,
        1024,
        "Prompt tokens of a random request, prefix not counted. Default: 1024.",
    ),
    _Flag(
        "--random-output-len --output-len N", int, 128, "Tokens generated for a random request. Default: 128."
    ),
    _Flag("--random-range-ratio X", float, 0.0, "Spread of the lengths, 0 to 1."),
    _Flag("--random-prefix-len N", int, 0, "Prompt tokens common to all requests."),
    _Flag(
        "--random-vocab N",
        int,
        None,
        "Upper bound of random ids. Default: the tokenizer's size, or 256 without one.",
    ),
    _Flag("--random-mm-base-items-per-request N", int, 1, "Images and videos of a request. Default: 1."),
    _Flag(
        "--random-mm-num-mm-items-range-ratio X",
        float,
        0.0,
        "Relative spread of that number, 0 to 1. Default: 0.",
    ),
    _Flag(
        "--random-mm-limit-mm-per-prompt JSON",
        _limits,
        LIMITS,
        'Most items of each modality in a request. Default: {"image": 255, "video": 1}.',
    ),
    _Flag(
        "--random-mm-bucket-config DICT",
        _buckets,
        BUCKETS,
        "Weights of sizes, as {(height, width, frames): weight}; one frame is an image. "
        "Default: {(256, 256, 1): 0.5, (720, 1280, 1): 0.5}.",
    ),
    _Flag("--prefix-repetition-prefix-len N", int, 256, "Tokens of a common prefix. Default: 256."),
    _Flag(
        "--prefix-repetition-suffix-len N",
        int,
        256,
        "Tokens after it, different in each request. Default: 256.",
    ),
    _Flag("--prefix-repetition-output-len N", int, 128, "Tokens generated for each request. Default: 128."),
    _Flag("--prefix-repetition-num-prefixes N", int, 10, "Number of common prefixes. Default: 10."),
    _Flag("--sharegpt-output-len N", int, None, "Default: the length of the dataset's answers."),
    _Flag("--custom-output-len N", int, 256, "For lines without output_tokens. Default: 256."),
)
_AGENT = (
    _Flag("--agent-num-sessions N", int, 8, "Sessions, of a trace the first ones. Default: 8."),
    _Flag("--agent-turns LOW:HIGH", range_of, (33, 43), "Turns of a session. Default: 33:43."),
    _Flag("--agent-first-len N", int, 12_000, "Tokens of the first prompt of a session. Default: 12000."),
    _Flag(
        "--agent-last-len LOW:HIGH",
        range_of,
        (80_000, 140_000),
        "Tokens of the last prompt. Default: 80000:140000.",
    ),
    _Flag("--agent-shared-len N", int, 0, "First tokens that all sessions have in common. Default: 0."),
    _Flag("--agent-input-per-output X", float, 130.0, "Prompt tokens for a generated token. Default: 130."),
    _Flag(
        "--agent-tool-spread X",
        float,
        1.0,
        "Spread of the lengths of tool results (standard deviation of the logarithm). Default: 1.",
    ),
    _Flag("--agent-pause-median S", float, 5.0, "Median of the pause before a turn. Default: 5."),
    _Flag("--agent-pause-p99 S", float, 81.0, "99th percentile of that pause. Default: 81."),
    _Flag("--agent-think-time S", float, 0.0, "Mean time that a user thinks, in addition. Default: 0."),
    _Flag("--agent-think-every N", int, 10, "Turns between two messages of a user. Default: 10."),
    _Flag("--agent-scale X", float, 1.0, "Factor of all lengths, for small models. Default: 1."),
    _Flag("--agent-time-scale X", float, 1.0, "Factor of all times; 0: no pauses. Default: 1."),
    _Flag(
        "--agent-hint",
        str,
        "session",
        "Hint to send: the session as session_id, as prompt_cache_key, or none. Default: session.",
        {"choices": ("session", "key", "none")},
    ),
)
_SAMPLING = (
    *(
        _Flag(f"--{name.replace('_', '-')} X", float, None, f"The field {name}.")
        for name in ("temperature", "top_p", "min_p")
    ),
    *(
        _Flag(f"--{name}-penalty X", float, None, f"The field {name}_penalty.")
        for name in ("frequency", "presence", "repetition")
    ),
    _Flag("--top-k N", int, None, "The field top_k."),
    _Flag("--logprobs N", int, None, "The field logprobs."),
    _Flag("--ignore-eos", bool, False, "Generate all requested tokens."),
    _Flag("--extra-body JSON", dict, None, "Additional fields of each request.", {"action": JsonFlag}),
)
_RESULT = (
    _Flag(
        "--percentile-metrics A,B",
        _names,
        ["ttft", "tpot", "itl"],
        "Among ttft, tpot, itl, e2el. Default: ttft,tpot,itl.",
    ),
    _Flag("--metric-percentiles P,Q", _percents, [99.0], "Default: 99."),
    _Flag(
        "--goodput KEY:MS",
        dict,
        {},
        "Requests within these limits are good: ttft, tpot, e2el in milliseconds.",
        {"nargs": "+", "action": _Limits},
    ),
    _Flag("--save-result", bool, False, "Write the numbers to a JSON file."),
    _Flag("--append-result", bool, False, "Append the numbers as a line."),
    _Flag("--save-detailed", bool, False, "Save an entry for each request."),
    _Flag("--result-dir DIR", str, None, "Directory of the file. Default: the current one."),
    _Flag("--result-filename NAME", str, None, "Default: named by rate, model and time."),
    _Flag("--label TEXT", str, None, "Prefix of the file name, also saved in it."),
    _Flag("--metadata KEY=VALUE", _pair, [], "Additional entries of the file.", {"nargs": "+"}),
    _Flag("--disable-tqdm", bool, False, "No progress bar."),
    _Flag("--cpu-report", bool, False, "Print the CPU time of the server's processes and of this one."),
    _Flag(
        "--server-pid PID",
        int,
        None,
        "The server's process; its children are included. Default: the local listener on the port.",
    ),
)
FLAGS = {
    ("Server", "The server to benchmark."): _SERVER,
    ("Traffic", "Number and timing of requests."): _TRAFFIC,
    ("Prompts", "The prompts to send."): _PROMPTS,
    ("Agent sessions", "Sessions of --dataset-name agent; --request-rate counts sessions."): _AGENT,
    ("Sampling", "Sampling parameters. Those not set are not sent."): _SAMPLING,
    ("Result", "Results to compute, print and save."): _RESULT,
}
"""Flags by title and description of their group."""
