"""Generate the pictures of docs/ from code and from the tables of its pages: `python
tests/arch/pictures.py`."""

import contextlib
import io
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import numpy as np
import scenes
from canvas import COLOURS, INK, arrow, box, frame, words

from quire.bench.plot import BarGroup, bar_chart
from quire.bench.sched import add_requests
from quire.cli import main as quire
from quire.config.expert_placement import balance, initial_placement
from quire.data.params import SamplingParams
from quire.data.request import Request
from quire.data.step_plan import StepResult
from quire.sched.kv_manager import KVManager
from quire.sched.scheduler import Scheduler

DOCS = Path(__file__).parents[2] / "docs"


def _table(page: str, first_line: str) -> list[list[str]]:
    """Return the rows of the table in a page whose header begins with `first_line`."""
    lines = (DOCS / page).read_text(encoding="utf-8").splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(first_line))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip().strip("*") for cell in line.strip("|").split("|")])
    return rows


def _numbers(cell: str) -> list[float]:
    """Return the numbers in a cell before its bracket."""
    result = re.findall(r"\d[\d,]*\.?\d*", cell.partition("(")[0].replace(", ", " "))
    return [float(item.replace(",", "")) for item in result]


# ---- bar charts from tables


def decode() -> str:
    """Draw the time of a decode step next to vLLM's, for two models."""
    rows = _table("performance.md", "| decode step, ms |")
    groups = []
    for vllm, quire_row in ((rows[0], rows[1]), (rows[3], rows[4])):
        name = vllm[0].partition(",")[0]
        for size, a, b in zip((1, 8, 32, 128, 256), vllm[1:], quire_row[1:], strict=True):
            values = {"vLLM 0.24": _numbers(a)[0], "Quire": _numbers(b)[0]}
            groups.append(
                BarGroup(f"{name}, batch {size}", values, {k: f"{v:g} ms" for k, v in values.items()})
            )
    return bar_chart("A decode step on one H200, ms", groups)


def peers() -> str:
    """Draw the throughput of several engines on two CPU cores."""
    rows = _table("performance.md", "| | ready s | first token s |")[:4]
    columns = {"one prompt, tok/s": 4, "one stream, tok/s": 5, "32 at once, tok/s": 6}
    groups = []
    for label, column in columns.items():
        values = {row[0]: _numbers(row[column])[0] for row in rows}
        groups.append(BarGroup(label, values, {name: f"{value:g}" for name, value in values.items()}))
    return bar_chart("SmolLM2-135M on two ARM cores", groups)


def drafts() -> str:
    """Draw the gain of speculation by kind of text."""
    groups = []
    for name, plain, drafted, *_ in _table("speculation.md", "| workload | plain tok/s"):
        values = {"plain": median(_numbers(plain)), "with drafts": median(_numbers(drafted))}
        groups.append(BarGroup(name, values, {key: f"{value:g} tok/s" for key, value in values.items()}))
    return bar_chart("One stream, plain and with drafts by prompt lookup (two cores)", groups)


def formats() -> str:
    """Draw tokens per second by the format of the weights."""
    rows = _table("quantization.md", "| | weights | prompt of 512 | decode |")
    groups = []
    for row in rows:
        value = _numbers(row[3])[0]
        groups.append(
            BarGroup(f"{row[0]} {row[1]}".strip(), {"decode": value}, {"decode": f"{value:g} tok/s"})
        )
    return bar_chart("One stream of SmolLM2-135M by format, two cores", groups)


def shares() -> str:
    """Draw how soon another API key gets its share of the engine."""
    groups = []
    for name, cell, _ in _table("keys.md", "| | share of the other key"):
        values = dict(
            zip(("after 500 steps", "after 2,000", "after 3,800"), map(float, cell.split(", ")), strict=True)
        )
        groups.append(
            BarGroup(
                name.removeprefix("lowest level first, "),
                values,
                {key: f"{value:g}" for key, value in values.items()},
            )
        )
    return bar_chart("The share of a second key beside one that floods", groups, mark=0.5)


# ---- drawings of what the code does


def _steps(*, chunked: bool) -> list[dict[str, int]]:
    """Return the tokens of each request, step by step: four streams, and two prompts after the second
    step."""
    kv = KVManager(num_blocks=400, block_size=16, max_rows=8, share_prefixes=False)
    budget = 64 if chunked else 256
    scheduler = Scheduler(
        kv=kv, max_num_seqs=8, max_num_batched_tokens=budget, max_model_len=512, chunked_prefill=chunked
    )
    add_requests(scheduler, [(8, 40)] * 4)
    results: list[dict[str, int]] = []
    names: dict[int, str] = {}
    for number in range(8):
        if number == 2:
            for name, length in (("long", 150), ("short", 30)):
                scheduler.add(_request(name, list(range(length)), 40))
        plan = scheduler.plan()
        assert plan is not None
        names |= {item.row: item.request_id for item in plan.admitted}
        counts = zip(plan.rows.tolist(), plan.num_tokens.tolist(), strict=True)
        results.append({names[row]: count for row, count in counts})
        tokens = np.full(int(plan.samples.sum()), 7, np.int32)
        scheduler.update(plan, StepResult(token_ids=tokens))
    return results


def _request(name: str, tokens: list[int], num_out: int) -> Request:
    return Request(
        id=name,
        tokens=tokens,
        params=SamplingParams(max_tokens=num_out, ignore_eos=True),
        prompt_len=len(tokens),
        limit=len(tokens) + num_out,
        seed=0,
    )


def chunks() -> str:
    """Draw steps as the scheduler plans them, prompts in chunks and whole."""
    fills = {"streams": COLOURS[0], "long": COLOURS[2], "short": COLOURS[1]}
    parts, scale, y = [], 2.6, 40
    for title, chunked in _WAYS.items():
        parts.append(f'<text x="12" y="{y - 14}" font-size="14" fill="{INK}">{title}</text>')
        x = 12.0
        for number, step in enumerate(_steps(chunked=chunked)):
            counts = {"streams": sum(count for name, count in step.items() if name.isdigit())}
            counts |= {name: step[name] for name in ("long", "short") if name in step}
            for name, count in counts.items():
                title_text, text = (
                    f"step {number + 1}: {count} tokens of {name}",
                    str(count) if count > 8 else "",
                )
                parts.append(box(x, y, count * scale, 26, fills[name], text, title_text))
                x += count * scale
            x += 6
        y += 76
    x = 12
    for name, fill in fills.items():
        parts.append(box(x, y - 26, 12, 12, fill))
        parts.append(f'<text x="{x + 17}" y="{y - 16}" fill="{INK}">{_CHUNK_WORDS[name]}</text>')
        x += 24 + 7 * len(_CHUNK_WORDS[name])
    legend = "A gap is the end of a step: each stream has a token more. Width: tokens, and so about time."
    parts.append(f'<text x="12" y="{y + 8}" fill="{INK}">{legend}</text>')
    return frame(860, y + 24, parts)


_WAYS = {"Prompts in chunks: no step is long": True, "Prompts whole: everybody waits for one step": False}
_CHUNK_WORDS = {
    "streams": "four streams, a token each",
    "long": "a prompt of 150 tokens",
    "short": "one of 30 behind it",
}


def cache() -> str:
    """Draw the blocks of three requests, two with a common prefix."""
    kv = KVManager(num_blocks=64, block_size=16, max_rows=8, share_prefixes=True)
    scheduler = Scheduler(kv=kv, max_num_seqs=8, max_num_batched_tokens=512, max_model_len=512)
    common = list(range(64))
    prompts = {"first": common + [100] * 30, "again": common + [200] * 50, "other": [300] * 40}
    parts, y, seen = [], 44, set[int]()
    title = "Blocks of 16 tokens, as the scheduler gave them out"
    parts.append(f'<text x="12" y="22" font-size="14" fill="{INK}">{title}</text>')
    for name, tokens in prompts.items():
        scheduler.add(_request(name, tokens, 8))
        plan = scheduler.plan()
        assert plan is not None
        (admitted,) = plan.admitted
        known = f"{name}: {len(tokens)} tokens, {admitted.num_computed} known"
        parts.append(f'<text x="12" y="{y + 18}" fill="{INK}">{known}</text>')
        for place, block in enumerate(admitted.block_ids[0]):
            fill, label = (COLOURS[1], "found") if block in seen else (COLOURS[0], "computed")
            parts.append(box(220 + 58 * place, y, 54, 28, fill, str(block), label))
        seen |= {*admitted.block_ids[0]}
        y += 40
        scheduler.update(plan, StepResult(token_ids=np.full(int(plan.samples.sum()), 7, np.int32)))
    parts.append(box(12, y, 12, 12, COLOURS[0]) + f'<text x="29" y="{y + 10}" fill="{INK}">computed</text>')
    parts.append(box(110, y, 12, 12, COLOURS[1]) + f'<text x="127" y="{y + 10}" fill="{INK}">found</text>')
    return frame(760, y + 26, parts)


def memory() -> str:
    """Return the drawing of `quire plan` for a 70B model."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        path = Path(folder) / "memory.svg"
        assert quire(["plan", "llama-3-70b", "--gpu", "h200", "--concurrency", "8", "--svg", str(path)]) == 0
        return path.read_text(encoding="utf-8")


_WAY = (
    ("client", "API process", "POST /v1/chat/completions"),
    ("API process", "API process", "template, tokens, media, grammar: all that can be wrong is found here"),
    ("API process", "core", "request: token ids (msgpack over ZMQ)"),
    ("core", "core", "waits for a row and blocks; known prefixes are found"),
    ("core", "worker", "plan: rows, tokens, blocks"),
    ("worker", "worker", "one step: forward, sampling"),
    ("worker", "core", "a token for each row"),
    ("core", "API process", "outputs, of all requests of the step"),
    ("API process", "client", "text, as a server-sent event"),
)


def way() -> str:
    """Draw the path of a request through the processes, from top to bottom."""
    return _lanes(_WAY)


_ITEM = (
    ("client", "API process", "an image: url or data"),
    ("API process", "API process", "fetched, decoded, hashed; known ones are taken from the cache"),
    ("API process", "core", "arrays, or only their hash"),
    ("core", "core", "waits for room among the vectors that are kept"),
    ("core", "worker", "plan: items for the tower"),
    ("worker", "worker", "tower: pixels become vectors"),
    ("worker", "worker", "they stand among those of tokens"),
    ("worker", "core", "a token for each row"),
)


def media() -> str:
    """Draw the path of an image through the processes."""
    return _lanes(_ITEM)


def _lanes(steps: Sequence[tuple[str, str, str]]) -> str:
    """Draw messages between lanes: sender, receiver, text."""
    lanes = {"client": 90, "API process": 320, "core": 560, "worker": 780}
    bottom = 64 + 40 * len(steps)
    parts = []
    for name, x in lanes.items():
        parts.append(box(x - 60, 16, 120, 28, COLOURS[0], name))
        parts.append(f'<path d="M{x} 44V{bottom}" stroke="#bbb" stroke-dasharray="3 4"/>')
    for number, (start, end, text) in enumerate(steps):
        y, a, b = 84 + 40 * number, lanes[start], lanes[end]
        if start == end:
            anchor = "end" if a > 700 else "middle"
            parts.append(f'<circle cx="{a}" cy="{y - 4}" r="4" fill="{COLOURS[2]}"/>')
            parts.append(words(a, y - 12, text, anchor))
            continue
        parts.append(arrow(a, y, b, y))
        parts.append(words((a + b) / 2, y - 6, text))
    return frame(900, bottom + 12, parts)


_LOADS = (90, 20, 15, 10, 60, 15, 10, 10, 25, 10, 10, 5, 20, 10, 5, 5)
"""Number of tokens of each of 16 experts, some of which are popular."""


def experts() -> str:
    """Draw experts over four devices: in order, and balanced with four more slots."""
    parts, y = [], 36
    for title, places in (
        ("Neighbours together: all wait for device 0", initial_placement(16, 4)),
        ("Balanced, with a place more on each device", balance(_LOADS, 4, 5)),
    ):
        copies = [len(replica) for replica in places.replicas(len(_LOADS))]
        parts.append(f'<text x="12" y="{y - 12}" font-size="14" fill="{INK}">{title}</text>')
        for rank, experts_here in enumerate(places.by_rank):
            x = 90.0
            parts.append(f'<text x="12" y="{y + 16}" fill="{INK}">device {rank}</text>')
            for expert in experts_here:
                load = _LOADS[expert] / copies[expert]
                fill, label = COLOURS[2 if copies[expert] > 1 else 0], f"expert {expert}: {load:g} tokens"
                parts.append(box(x, y, 4.5 * load, 24, fill, str(expert) if load >= 5 else "", label))
                x += 4.5 * load
            y += 28
        y += 44
    legend = "Width: tokens of a step. A number is an expert; orange ones are on several devices."
    parts.append(f'<text x="12" y="{y - 22}" fill="{INK}">{legend}</text>')
    return frame(820, y - 8, parts)


def adapters() -> str:
    """Draw the cost of adapters at 64 sequences."""
    row = next(row for row in _table("lora.md", "| | no adapter | one |") if row[0].startswith("batch 64"))
    values = [float(re.findall(r"\d+\.\d+", cell)[0]) for cell in row[1:]]
    names = ("no adapter", "one adapter", "eight in the batch")
    groups = [
        BarGroup(name, {"ms a step": value}, {"ms a step": f"{value:g} ms"})
        for name, value in zip(names, values, strict=True)
    ]
    return bar_chart("Llama-3.1-8B on one H200, 64 sequences, rank 16", groups, mark=values[0])


PICTURES: dict[str, Callable[[], str]] = {
    "adapters.svg": adapters,
    "cache.svg": cache,
    "chunks.svg": chunks,
    "decode.svg": decode,
    "drafts.svg": drafts,
    "experts.svg": experts,
    "formats.svg": formats,
    "media.svg": media,
    "memory.svg": memory,
    "messages.svg": scenes.messages,
    "operate.svg": scenes.operate,
    "peers.svg": peers,
    "ranks.svg": scenes.ranks,
    "responses.svg": scenes.responses,
    "shares.svg": shares,
    "structured.svg": scenes.structured,
    "timeline.svg": scenes.timeline,
    "tools.svg": scenes.tools,
    "way.svg": way,
}

if __name__ == "__main__":
    for name, made in PICTURES.items():
        (DOCS / name).write_text(made(), encoding="utf-8")
