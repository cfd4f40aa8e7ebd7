"""`quire bench serve`: benchmarks any OpenAI-compatible server with many clients."""

import argparse
import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tqdm import tqdm

from quire.bench.agent import AgentSession, longest, sessions_of
from quire.bench.agent_run import AgentClient, TurnRecord, agent_lines, agent_summary
from quire.bench.counters import counter_summary
from quire.bench.cpu import CpuWatch, check_pid, listening_pids, report
from quire.bench.datasets import (
    Query,
    custom_queries,
    prefix_samples,
    random_queries,
    random_samples,
    sharegpt_queries,
)
from quire.bench.media import random_media
from quire.bench.report import GOODPUT_METRICS, TITLES, detailed, lines, summarise
from quire.bench.serve_flags import add_flags
from quire.bench.traffic import ENDPOINTS, Record, drive, request_body, send, send_times
from quire.checkpoint.hub import locate
from quire.config.env import Env
from quire.errors import ConfigError
from quire.remote.http import HttpClient, ServerGone
from quire.remote.openai import BadAnswer, bearer, models
from quire.system.process import raise_file_limit
from quire.text.tokenizer import Tokenizer, load_tokenizer

__all__ = ["add_flags", "run"]

SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty"),
    *("repetition_penalty", "logprobs"),
)
TIMEOUT_S = 6 * 3600.0


def run(args: argparse.Namespace) -> int:
    _check(args)
    raise_file_limit()
    result, records = asyncio.run(_measure(args))
    metrics, percentiles = args.percentile_metrics, args.metric_percentiles
    shown = lines(result, metrics=metrics, percentiles=percentiles)
    print("\n".join([*shown[:-1], *agent_lines(result), shown[-1]]))
    for error, count in Counter(record.error for record in records if record.error).most_common(5):
        print(f"{count} failed: {error}")
    if args.save_result or args.append_result:
        _save(args, result | (detailed(records) if args.save_detailed else {}))
    return 0 if result["completed"] else 1


async def _measure(args: argparse.Namespace) -> tuple[dict[str, Any], list[Record]]:
    key = args.api_key or os.environ.get("OPENAI_API_KEY")
    client = HttpClient(base_url(args), headers=bearer(key) | dict(args.header), timeout_s=TIMEOUT_S)
    path = args.endpoint or ENDPOINTS[args.backend]
    try:
        await _wait_until_listening(client, args.ready_check_timeout_sec)
        model, root, max_len = await _model(client, args.model)
        tokenizer = _tokenizer(args, root)
        options = request_options(args)
        agent = None
        if args.dataset_name == "agent":
            agent = _agent_client(args, client, path, model, tokenizer)
            sessions = _agent_sessions(args, max_len)
            requests = [(agent.body("warm-up", [0] * 8, 1), 8)]
        else:
            requests = [
                (request_body(query, backend=args.backend, model=model, options=options), query.prompt_len)
                for query in queries(args, tokenizer)
            ]
        await _wait_until_ready(client, path, requests[0], args.ready_check_timeout_sec)
        await _warm_up(client, path, requests[0], args.num_warmups, args.max_concurrency)
        before = await _metrics_page(client)
        watch = CpuWatch(_server_pids(args)) if args.cpu_report else None
        turns: list[TurnRecord] = []
        if agent is not None:
            turns, duration = await _run_agent(agent, sessions, args)
            records = [turn.record for turn in turns]
        else:
            records, duration = await _run(client, path, requests, args)
        # Read at once, so that later activity is not counted.
        spent = watch.spent() if watch is not None else []
        after = await _metrics_page(client)
    finally:
        client.close()
    numbers = summarise(
        records,
        duration,
        metrics=args.percentile_metrics,
        percentiles=args.metric_percentiles,
        goodput=args.goodput,
    )
    if watch is not None:
        print("\n".join(report(spent, seconds=duration, num_tokens=numbers["total_output_tokens"])))
        numbers["cpu"] = [asdict(usage) for usage in spent]
    counters = counter_summary(before, after)
    numbers |= agent_summary(turns, counters.get("prefix_cache_hit_tokens"))
    return _heading(args, model) | numbers | counters, records


def _agent_client(
    args: argparse.Namespace, client: HttpClient, path: str, model: str, tokenizer: Tokenizer | None
) -> AgentClient:
    return AgentClient(
        client=client,
        path=path,
        model=model,
        options=request_options(args),
        hint=args.agent_hint,
        vocab=args.random_vocab or (tokenizer.vocab_size if tokenizer is not None else 256),
        seed=args.seed,
        shared_len=round(args.agent_shared_len * args.agent_scale),
        max_concurrency=args.max_concurrency,
    )


def _agent_sessions(args: argparse.Namespace, max_len: int | None) -> list[AgentSession]:
    """Return the agent sessions that the flags describe; raise a ConfigError if a turn is longer than
    `max_len`, the context of the model."""
    sessions = sessions_of(args)
    most = longest(sessions)
    if max_len is not None and most > max_len:
        raise ConfigError(
            f"the longest turn has {most} tokens with its answer, and the max_model_len is {max_len}:"
            f" set --agent-scale {0.95 * args.agent_scale * max_len / most:.2g}, or lower --agent-last-len"
        )
    return sessions


async def _run_agent(
    agent: AgentClient, sessions: Sequence[AgentSession], args: argparse.Namespace
) -> tuple[list[TurnRecord], float]:
    starts = send_times(len(sessions), rate=args.request_rate, burstiness=args.burstiness, seed=args.seed)
    num_turns = sum(len(session.turns) for session in sessions)
    print(f"Running {len(sessions)} sessions of {num_turns} turns in total", flush=True)
    with tqdm(total=num_turns, disable=args.disable_tqdm) as bar:
        start = time.perf_counter()
        turns = await agent.run(sessions, starts, on_done=lambda: bar.update(1))
        return turns, time.perf_counter() - start


async def _run(
    client: HttpClient, path: str, requests: Sequence[tuple[bytes, int]], args: argparse.Namespace
) -> tuple[list[Record], float]:
    times = send_times(len(requests), rate=args.request_rate, burstiness=args.burstiness, seed=args.seed)
    pace = "as fast as possible" if args.request_rate == float("inf") else f"{args.request_rate:g} requests/s"
    limit = args.max_concurrency or "any number"
    print(
        f"Sending {len(requests)} requests to {client.base_url}{path}: {pace}, {limit} at a time", flush=True
    )
    with tqdm(total=len(requests), disable=args.disable_tqdm) as bar:
        start = time.perf_counter()
        records = await drive(
            client,
            path,
            requests,
            times=times,
            max_concurrency=args.max_concurrency,
            on_done=lambda _: bar.update(1),
        )
        return records, time.perf_counter() - start


# ---- before the run


def _check(args: argparse.Namespace) -> None:
    if args.num_prompts < 1:
        raise ConfigError(f"--num-prompts {args.num_prompts} must be at least 1")
    if args.max_concurrency is not None and args.max_concurrency < 1:
        raise ConfigError(
            f"--max-concurrency {args.max_concurrency} must be at least 1; leave it out for no limit"
        )
    if args.dataset_name == "random-mm" and args.backend != "openai-chat":
        raise ConfigError("--dataset-name random-mm needs --backend openai-chat: only chats take media")
    if args.dataset_name == "agent" and args.backend == "openai-chat":
        raise ConfigError("--dataset-name agent needs --backend openai: its prompts are token ids")
    if not args.request_rate > 0:
        raise ConfigError(f"--request-rate {args.request_rate} must be above 0; inf sends everything at once")
    if not args.burstiness > 0:
        raise ConfigError(f"--burstiness {args.burstiness} must be above 0; 1 is a Poisson process")
    for flag, names, known in (
        ("--percentile-metrics", args.percentile_metrics, tuple(TITLES)),
        ("--goodput", args.goodput, GOODPUT_METRICS),
    ):
        if wrong := [name for name in names if name not in known]:
            raise ConfigError(f"{flag}: unknown metric {wrong[0]!r}; known: {', '.join(known)}")


def base_url(args: argparse.Namespace) -> str:
    return str(args.base_url or f"http://{args.host}:{args.port}")


async def _wait_until_listening(client: HttpClient, seconds: float) -> None:
    """Wait until the server's port is open, at most `seconds`; 0 does not wait."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            await client.request("GET", "/health")
            return
        except ServerGone:
            if time.monotonic() >= deadline:
                raise
        await asyncio.sleep(0.2)


async def _wait_until_ready(
    client: HttpClient, path: str, request: tuple[bytes, int], seconds: float
) -> None:
    """Repeat one request until it succeeds, at most `seconds`; 0 skips the check."""
    deadline = time.monotonic() + seconds
    while seconds > 0:
        record = await send(client, path, *request)
        if not record.error:
            return
        if time.monotonic() >= deadline:
            raise BadAnswer(f"the server is not ready after {seconds:g} s: {record.error}")
        await asyncio.sleep(0.5)


async def _warm_up(
    client: HttpClient, path: str, request: tuple[bytes, int], count: int, max_concurrency: int | None
) -> None:
    if count:
        await drive(
            client,
            path,
            [request] * count,
            times=[0.0] * count,
            max_concurrency=max_concurrency,
            on_done=lambda _: None,
        )


async def _model(client: HttpClient, requested: str | None) -> tuple[str, str | None, int | None]:
    """Return the name of the model to request and, if the server reports them, the path of its files and
    its context length in tokens."""
    try:
        cards = await models(client)
    except BadAnswer:
        if requested is None:
            raise
        return requested, None, None
    card = next((entry for entry in cards if entry.id == requested), cards[0])
    return requested or card.id, card.root, card.max_model_len


def _tokenizer(args: argparse.Namespace, root: str | None) -> Tokenizer | None:
    """Load the requested tokenizer, or that of the served model if prompts must be text and its files are
    local."""
    source = args.tokenizer
    if source is None and (args.backend == "openai-chat" or args.dataset_name == "sharegpt"):
        source = root if root and Path(root).exists() else None
    if source is None:
        return None
    path = locate(source, cache_root=Env.read(os.environ).cache_root, load_format="dummy")
    return load_tokenizer(path, "gguf" if path.suffix == ".gguf" else "hf")


def queries(args: argparse.Namespace, tokenizer: Tokenizer | None) -> list[Query]:
    vocab = args.random_vocab or (tokenizer.vocab_size if tokenizer is not None else 256)
    if args.dataset_name == "prefix_repetition":
        samples = prefix_samples(
            args.num_prompts,
            vocab=vocab,
            num_prefixes=args.prefix_repetition_num_prefixes,
            prefix_len=args.prefix_repetition_prefix_len,
            suffix_len=args.prefix_repetition_suffix_len,
            output_len=args.prefix_repetition_output_len,
            seed=args.seed,
        )
        return random_queries(samples, tokenizer)
    if args.dataset_name in ("random", "random-mm"):
        samples = random_samples(
            args.num_prompts,
            vocab=vocab,
            input_len=args.random_input_len,
            output_len=args.random_output_len,
            range_ratio=args.random_range_ratio,
            prefix_len=args.random_prefix_len,
            seed=args.seed,
        )
        prompts = random_queries(samples, tokenizer)
        return prompts if args.dataset_name == "random" else _with_media(prompts, args)
    if not args.dataset_path:
        raise ConfigError(f"--dataset-name {args.dataset_name} needs --dataset-path FILE")
    count, path = args.num_prompts, Path(args.dataset_path)
    if args.dataset_name == "custom":
        return custom_queries(count, path, tokenizer, output_len=args.custom_output_len, seed=args.seed)
    return sharegpt_queries(count, path, tokenizer, output_len=args.sharegpt_output_len, seed=args.seed)


def _with_media(prompts: Sequence[Query], args: argparse.Namespace) -> list[Query]:
    items = random_media(
        len(prompts),
        num_items=args.random_mm_base_items_per_request,
        range_ratio=args.random_mm_num_mm_items_range_ratio,
        limits=args.random_mm_limit_mm_per_prompt,
        buckets=args.random_mm_bucket_config,
        seed=args.seed,
    )
    return [replace(query, media=media) for query, media in zip(prompts, items, strict=True)]


def request_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields added to the body of every request."""
    options = {name: getattr(args, name) for name in SAMPLING if getattr(args, name) is not None}
    return options | ({"ignore_eos": True} if args.ignore_eos else {}) | (args.extra_body or {})


def _server_pids(args: argparse.Namespace) -> list[int]:
    if args.server_pid is not None:
        return [check_pid(args.server_pid), os.getpid()]
    parts = urlsplit(base_url(args))
    return [*listening_pids(parts.port or 80), os.getpid()]


async def _metrics_page(client: HttpClient) -> str:
    """Return the text of the server's /metrics; empty if it has none."""
    try:
        response = await client.request("GET", "/metrics")
    except ServerGone:
        return ""
    return response.body.decode(errors="replace") if response.status == 200 else ""


# ---- after the run


def _heading(args: argparse.Namespace, model: str) -> dict[str, Any]:
    rate = args.request_rate
    return {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "backend": args.backend,
        "label": args.label,
        "model_id": model,
        "tokenizer_id": args.tokenizer or model,
        "num_prompts": args.num_prompts,
        "request_rate": rate if rate < float("inf") else "inf",
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        **dict(args.metadata),
    }


def _save(args: argparse.Namespace, result: dict[str, Any]) -> None:
    limit = f"-concurrency{args.max_concurrency}" if args.max_concurrency is not None else ""
    model = str(result["model_id"]).rstrip("/").rpartition("/")[2]
    rate = f"{args.request_rate:g}qps"
    name = args.result_filename or f"{args.label or args.backend}-{rate}{limit}-{model}-{result['date']}.json"
    path = Path(args.result_dir or ".") / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a" if args.append_result else "w", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
    except OSError as error:
        raise ConfigError(f"the result cannot be written to {path}: {error.strerror}") from None
    print(f"Result saved to {path}")
