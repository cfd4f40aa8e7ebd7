"""The flags of `quire bench serve`."""

import argparse
import ast
from typing import Annotated, Literal

import msgspec

from quire.bench.media import BUCKETS, LIMITS, Bucket
from quire.bench.traffic import ENDPOINTS
from quire.config.cli import FlagParser, JsonFlag

Count = Annotated[int, msgspec.Meta(ge=0)]
Size = Annotated[int, msgspec.Meta(ge=1)]
Weight = Annotated[float, msgspec.Meta(ge=0)]


def add_flags(parser: FlagParser) -> None:
    _server_flags(parser)
    _traffic_flags(parser)
    _dataset_flags(parser)
    _sampling_flags(parser)
    _result_flags(parser)


def _server_flags(parser: FlagParser) -> None:
    group = parser.add_argument_group("Server", "The server to benchmark.")
    group.add_argument(
        "--backend", choices=tuple(ENDPOINTS), default="openai", help="Kind of API: completions, or chat."
    )
    group.add_argument("--base-url", metavar="URL", help="Address of the server. Replaces host and port.")
    group.add_argument("--host", default="127.0.0.1", help="Host of the server. Default: 127.0.0.1.")
    group.add_argument(
        "--port", type=int, default=8000, metavar="N", help="Port of the server. Default: 8000."
    )
    group.add_argument("--endpoint", metavar="PATH", help="Path of the API. Default: the backend's.")
    group.add_argument("--model", metavar="NAME", help="Model to request. Default: the first one served.")
    group.add_argument("--api-key", metavar="KEY", help="Default: the variable OPENAI_API_KEY.")
    group.add_argument(
        "--header",
        nargs="+",
        type=_pair,
        default=[],
        metavar="NAME=VALUE",
        help="Headers to send with each request.",
    )
    group.add_argument(
        "--ready-check-timeout-sec",
        type=float,
        default=0.0,
        metavar="S",
        help="Wait this long for a first answer. Default: 0, no check.",
    )


def _traffic_flags(parser: FlagParser) -> None:
    group = parser.add_argument_group("Traffic", "Number and timing of requests.")
    group.add_argument("--num-prompts", type=int, default=1000, metavar="N", help="Requests. Default: 1000.")
    group.add_argument(
        "--request-rate",
        type=float,
        default=float("inf"),
        metavar="R",
        help="Requests per second. Default: inf.",
    )
    group.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="B",
        help="Evenness of arrivals: 1 is a Poisson process, less is burstier. Default: 1.",
    )
    group.add_argument("--max-concurrency", type=int, metavar="N", help="Most concurrent requests.")
    group.add_argument(
        "--num-warmups", type=int, default=0, metavar="N", help="Warm-up requests. Default: 0."
    )
    group.add_argument(
        "--seed", type=int, default=0, metavar="N", help="Seed of prompts and arrivals. Default: 0."
    )


def _dataset_flags(parser: FlagParser) -> None:
    group = parser.add_argument_group("Prompts", "The prompts to send.")
    group.add_argument(
        "--dataset-name",
        choices=("random", "random-mm", "prefix_repetition", "sharegpt", "custom"),
        default="random",
        help="Kind of prompts; prefix_repetition has groups with a common prefix, random-mm has media.",
    )
    group.add_argument("--dataset-path", metavar="FILE", help="JSON of sharegpt, JSON lines of custom.")
    group.add_argument(
        "--tokenizer",
        metavar="MODEL",
        help="Makes random prompts texts of the requested length. Without it they are sent as token ids.",
    )
    for name, default, text in (
        ("input", 1024, "Prompt tokens of a random request, prefix not counted."),
        ("output", 128, "Tokens generated for a random request."),
    ):
        group.add_argument(
            f"--random-{name}-len",
            f"--{name}-len",
            type=int,
            default=default,
            metavar="N",
            help=f"{text} Default: {default}.",
        )
    group.add_argument(
        "--random-range-ratio", type=float, default=0.0, metavar="X", help="Spread of the lengths, 0 to 1."
    )
    group.add_argument(
        "--random-prefix-len", type=int, default=0, metavar="N", help="Prompt tokens common to all requests."
    )
    group.add_argument(
        "--random-vocab",
        type=int,
        metavar="N",
        help="Upper bound of random ids. Default: the tokenizer's size, or 256 without one.",
    )
    _media_flags(group)
    _prefix_flags(group)
    group.add_argument(
        "--sharegpt-output-len", type=int, metavar="N", help="Default: the length of the dataset's answers."
    )
    group.add_argument(
        "--custom-output-len",
        type=int,
        default=256,
        metavar="N",
        help="For lines without output_tokens. Default: 256.",
    )


def _media_flags(group: argparse._ArgumentGroup) -> None:
    """Add flags for images and videos beside random texts."""
    group.add_argument(
        "--random-mm-base-items-per-request",
        type=int,
        default=1,
        metavar="N",
        help="Images and videos of a request. Default: 1.",
    )
    group.add_argument(
        "--random-mm-num-mm-items-range-ratio",
        type=float,
        default=0.0,
        metavar="X",
        help="Relative spread of that number, 0 to 1. Default: 0.",
    )
    group.add_argument(
        "--random-mm-limit-mm-per-prompt",
        type=_limits,
        default=LIMITS,
        metavar="JSON",
        help='Most items of each modality in a request. Default: {"image": 255, "video": 1}.',
    )
    group.add_argument(
        "--random-mm-bucket-config",
        type=_buckets,
        default=BUCKETS,
        metavar="DICT",
        help="Weights of sizes, as {(height, width, frames): weight}; one frame is an image. "
        "Default: {(256, 256, 1): 0.5, (720, 1280, 1): 0.5}.",
    )


def _prefix_flags(group: argparse._ArgumentGroup) -> None:
    """Add flags for prompts with common prefixes."""
    for name, default, text in (
        ("prefix", 256, "Tokens of a common prefix."),
        ("suffix", 256, "Tokens after it, different in each request."),
        ("output", 128, "Tokens generated for each request."),
    ):
        flag = f"--prefix-repetition-{name}-len"
        group.add_argument(flag, type=int, default=default, metavar="N", help=f"{text} Default: {default}.")
    group.add_argument(
        "--prefix-repetition-num-prefixes",
        type=int,
        default=10,
        metavar="N",
        help="Number of common prefixes. Default: 10.",
    )


def _sampling_flags(parser: FlagParser) -> None:
    group = parser.add_argument_group("Sampling", "Sampling parameters. Those not set are not sent.")
    for name in (
        "temperature",
        "top-p",
        "min-p",
        "frequency-penalty",
        "presence-penalty",
        "repetition-penalty",
    ):
        group.add_argument(f"--{name}", type=float, metavar="X", help=f"The field {name.replace('-', '_')}.")
    group.add_argument("--top-k", type=int, metavar="N", help="The field top_k.")
    group.add_argument("--logprobs", type=int, metavar="N", help="The field logprobs.")
    group.add_argument("--ignore-eos", action="store_true", help="Generate all requested tokens.")
    group.add_argument(
        "--extra-body", action=JsonFlag, metavar="JSON", help="Additional fields of each request."
    )


def _result_flags(parser: FlagParser) -> None:
    group = parser.add_argument_group("Result", "Results to compute, print and save.")
    group.add_argument(
        "--percentile-metrics",
        type=_names,
        default=["ttft", "tpot", "itl"],
        metavar="A,B",
        help="Among ttft, tpot, itl, e2el. Default: ttft,tpot,itl.",
    )
    group.add_argument(
        "--metric-percentiles", type=_percents, default=[99.0], metavar="P,Q", help="Default: 99."
    )
    group.add_argument(
        "--goodput",
        nargs="+",
        action=_Limits,
        default={},
        metavar="KEY:MS",
        help="Requests within these limits are good: ttft, tpot, e2el in milliseconds.",
    )
    group.add_argument("--save-result", action="store_true", help="Write the numbers to a JSON file.")
    group.add_argument("--append-result", action="store_true", help="Append the numbers as a line.")
    group.add_argument("--save-detailed", action="store_true", help="Save an entry for each request.")
    group.add_argument("--result-dir", metavar="DIR", help="Directory of the file. Default: the current one.")
    group.add_argument("--result-filename", metavar="NAME", help="Default: named by rate, model and time.")
    group.add_argument("--label", metavar="TEXT", help="Prefix of the file name, also saved in it.")
    group.add_argument(
        "--metadata",
        nargs="+",
        type=_pair,
        default=[],
        metavar="KEY=VALUE",
        help="Additional entries of the file.",
    )
    group.add_argument("--disable-tqdm", action="store_true", help="No progress bar.")
    group.add_argument(
        "--cpu-report",
        action="store_true",
        help="Print the CPU time of the server's processes and of this one.",
    )
    group.add_argument(
        "--server-pid",
        type=int,
        metavar="PID",
        help="The server's process; its children are included. Default: the local listener on the port.",
    )


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
    """Parse buckets; keys may be strings, as in JSON."""
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
