"""The dashboard, out of a table of its panels: `python deploy/grafana/make.py`."""

import json
from pathlib import Path
from typing import Any

SOURCE = {"type": "prometheus", "uid": "${source}"}
ONE = 'model_name=~"$model"'


def rate(name: str, by: str = "") -> str:
    return f"sum{f' by ({by})' if by else ''} (rate({name}{{{ONE}}}[$__rate_interval]))"


def quantiles(name: str) -> list[tuple[str, str]]:
    buckets = rate(f"vllm:{name}_bucket", "le")
    return [(f"p{share}", f"histogram_quantile({share / 100}, {buckets})") for share in (50, 90, 99)]


def heat(name: str) -> list[tuple[str, str]]:
    return [("{{le}}", f"sum by (le) (increase(vllm:{name}_bucket{{{ONE}}}[$__rate_interval]))")]


PANELS: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    (
        "Requests",
        "timeseries",
        "short",
        [
            ("running", f"sum(vllm:num_requests_running{{{ONE}}})"),
            ("waiting", f"sum(vllm:num_requests_waiting{{{ONE}}})"),
        ],
    ),
    (
        "Tokens a second",
        "timeseries",
        "short",
        [
            ("generated", rate("vllm:generation_tokens_total")),
            ("prompts", rate("vllm:prompt_tokens_total")),
        ],
    ),
    (
        "Requests that ended, by why",
        "timeseries",
        "reqps",
        [
            ("{{finished_reason}}", rate("vllm:request_success_total", "finished_reason")),
        ],
    ),
    (
        "HTTP answers",
        "timeseries",
        "reqps",
        [
            ("{{status}}", "sum by (status) (rate(http_requests_total[$__rate_interval]))"),
        ],
    ),
    ("Time to first token", "timeseries", "s", quantiles("time_to_first_token_seconds")),
    ("Between two tokens", "timeseries", "s", quantiles("inter_token_latency_seconds")),
    ("Time to first token, all of them", "heatmap", "s", heat("time_to_first_token_seconds")),
    ("Between two tokens, all of them", "heatmap", "s", heat("inter_token_latency_seconds")),
    ("Whole requests", "timeseries", "s", quantiles("e2e_request_latency_seconds")),
    ("Time in the line", "timeseries", "s", quantiles("request_queue_time_seconds")),
    (
        "KV cache in use, by engine",
        "timeseries",
        "percentunit",
        [
            ("engine {{engine}}", f"max by (engine) (vllm:kv_cache_usage_perc{{{ONE}}})"),
        ],
    ),
    (
        "Prefix cache: share of prompt tokens found",
        "timeseries",
        "percentunit",
        [
            ("hits", f"{rate('vllm:prefix_cache_hits_total')} / {rate('vllm:prefix_cache_queries_total')}"),
        ],
    ),
    (
        "Preemptions a minute",
        "timeseries",
        "short",
        [
            ("preemptions", f"60 * {rate('vllm:num_preemptions_total')}"),
        ],
    ),
    ("Tokens in a step", "heatmap", "short", heat("iteration_tokens_total")),
    (
        "Speculation: share of drafts that held",
        "timeseries",
        "percentunit",
        [
            (
                "accepted",
                f"{rate('vllm:spec_decode_num_accepted_tokens_total')}"
                f" / {rate('vllm:spec_decode_num_draft_tokens_total')}",
            ),
        ],
    ),
    (
        "Speculation: drafts that held, by place",
        "timeseries",
        "short",
        [
            ("{{position}}", rate("vllm:spec_decode_num_accepted_tokens_per_pos_total", "position")),
        ],
    ),
    (
        "Adapters in use",
        "table",
        "short",
        [
            ("{{running_lora_adapters}}", "vllm:lora_requests_info"),
        ],
    ),
    (
        "Balance of engines: running requests",
        "timeseries",
        "short",
        [
            ("engine {{engine}}", f"sum by (engine) (vllm:num_requests_running{{{ONE}}})"),
        ],
    ),
    ("Lengths: prompts", "heatmap", "short", heat("request_prompt_tokens")),
    ("Lengths: answers", "heatmap", "short", heat("request_generation_tokens")),
]


def panel(number: int, title: str, kind: str, unit: str, queries: list[tuple[str, str]]) -> dict[str, Any]:
    targets = [
        {
            "refId": chr(65 + i),
            "datasource": SOURCE,
            "expr": expr,
            "legendFormat": legend,
            **({"format": "heatmap"} if kind == "heatmap" else {}),
            **({"format": "table", "instant": True} if kind == "table" else {}),
        }
        for i, (legend, expr) in enumerate(queries)
    ]
    return {
        "id": number + 1,
        "title": title,
        "type": kind,
        "datasource": SOURCE,
        "gridPos": {"x": 12 * (number % 2), "y": 8 * (number // 2), "w": 12, "h": 8},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "options": {"calculate": False} if kind == "heatmap" else {},
        "targets": targets,
    }


def variable(name: str, kind: str, query: str, label: str) -> dict[str, Any]:
    more = (
        {"datasource": SOURCE, "includeAll": True, "multi": True, "allValue": ".*"} if kind == "query" else {}
    )
    return {"name": name, "type": kind, "query": query, "label": label, "refresh": 2, **more}


def dashboard() -> dict[str, Any]:
    return {
        "uid": "quire",
        "title": "Quire",
        "tags": ["quire", "vllm"],
        "schemaVersion": 39,
        "refresh": "5s",
        "time": {"from": "now-15m", "to": "now"},
        "templating": {
            "list": [
                variable("source", "datasource", "prometheus", "Source"),
                variable("model", "query", "label_values(vllm:num_requests_running, model_name)", "Model"),
            ]
        },
        "panels": [panel(number, *each) for number, each in enumerate(PANELS)],
    }


if __name__ == "__main__":
    target = Path(__file__).parent / "dashboards" / "quire.json"
    target.write_text(json.dumps(dashboard(), indent=1) + "\n")
