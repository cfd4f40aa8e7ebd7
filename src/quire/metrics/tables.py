"""The names, help texts and buckets of the metrics of an engine."""

from quire.data.prefix_miss import MISS_REASONS
from quire.data.stats import SLO_RESULTS
from quire.metrics.kv_offload import COUNTERS as OFFLOAD_COUNTERS
from quire.metrics.kv_offload import GAUGES as OFFLOAD_GAUGES
from quire.metrics.kv_offload import HISTOGRAMS as OFFLOAD_HISTOGRAMS
from quire.metrics.kv_offload import LABELLED as OFFLOAD_LABELLED

_FIRST_TOKEN = [
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
]
_PER_TOKEN = [
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
]
_PER_REQUEST = [
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
]
_STEP_TOKENS = [1, *(2**power for power in range(3, 15))]

FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")

GAUGES = {
    "num_requests_running": "Requests in the running batch.",
    "num_requests_waiting": "Requests waiting to be admitted.",
    "kv_cache_usage_perc": "Share of the KV cache blocks in use, 0 to 1.",
    "gpu_cache_usage_perc": "Older name of the metric above.",
    "avg_prompt_throughput_toks_per_s": "Prompt tokens computed per second, over the last interval.",
    "avg_generation_throughput_toks_per_s": "Tokens generated per second, over the last interval.",
    **OFFLOAD_GAUGES,
}
START_GAUGES = {
    "engine_start_time_seconds": "Unix time at which the engine core was started, or last restarted.",
    "max_num_seqs": "Maximum number of requests in the running batch.",
}
"""Gauges that an engine core sets when it is ready; before that, the gauges are absent."""
COUNTERS = {
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "mm_cache_queries": "Images, videos and audio items looked up in the multimodal cache.",
    "mm_cache_hits": "Items found in the multimodal cache.",
    "num_preemptions": "Preempted requests, whose blocks are computed again or loaded from a lower tier.",
    "kv_event_batches_dropped": "Batches of KV events that were not published, because the queue was full.",
    "request_resumed": "Requests that continued in another or a restarted engine core after a crash.",
    "prompt_tokens": "Prompt tokens processed, including cached ones.",
    "prompt_tokens_cached": "Prompt tokens taken from the prefix cache.",
    "generation_tokens": "Tokens generated.",
    **OFFLOAD_COUNTERS,
}
HISTOGRAMS: dict[str, tuple[str, list[float]]] = {
    "iteration_tokens_total": ("Tokens computed in one step.", [float(edge) for edge in _STEP_TOKENS]),
    "time_to_first_token_seconds": ("From arrival to the first token.", _FIRST_TOKEN),
    "inter_token_latency_seconds": ("Between two tokens of a request.", _PER_TOKEN),
    "time_per_output_token_seconds": ("Older name of the metric above.", _PER_TOKEN),
    "request_time_per_output_token_seconds": ("Mean time per token after the first, by request.", _PER_TOKEN),
    "e2e_request_latency_seconds": ("From arrival to the last token.", _PER_REQUEST),
    "request_queue_time_seconds": ("Time spent waiting.", _PER_REQUEST),
    "request_inference_time_seconds": ("From admission to the last token.", _PER_REQUEST),
    "request_prefill_time_seconds": ("From admission to the first token.", _PER_REQUEST),
    "request_decode_time_seconds": ("From the first token to the last.", _PER_REQUEST),
    "request_params_n": ("The n of a request.", [1, 2, 5, 10, 20]),
    **OFFLOAD_HISTOGRAMS,
}
LABELLED = {
    "request_success": ("Requests that ended.", "finished_reason", FINISH_REASONS),
    "prompt_tokens_by_source": (
        "Prompt tokens by source.",
        "source",
        ("local_compute", "local_cache_hit", "external_kv_transfer"),
    ),
    "prefix_cache_misses": ("Requests with a prefix cache miss.", "reason", tuple(MISS_REASONS)),
    "slo_requests": ("Requests with latency targets that ended or were refused.", "result", SLO_RESULTS),
    "num_requests_waiting_by_reason": ("Waiting requests by reason.", "reason", ("capacity", "deferred")),
    "engine_sleep_state": (
        "1 for the current sleep state of the engine.",
        "sleep_state",
        ("awake", "weights_offloaded", "discard_all"),
    ),
    **OFFLOAD_LABELLED,
}
"""Metrics with a label besides model and engine: (help text, label name, label values) by metric name."""
LABELLED_GAUGES = ("num_requests_waiting_by_reason", "engine_sleep_state")
LENGTHS = {
    "request_prompt_tokens": "Prompt tokens of a request.",
    "request_generation_tokens": "Tokens generated for a request.",
    "request_max_num_generation_tokens": "Most tokens generated for any sequence of a request.",
    "request_params_max_tokens": "The max_tokens of a request.",
    "request_prefill_kv_computed_tokens": "Prompt tokens computed, without cached ones.",
}
DRAFT_COUNTERS = {
    "spec_decode_num_drafts": "Drafts of one or more tokens.",
    "spec_decode_num_draft_tokens": "Draft tokens.",
    "spec_decode_num_accepted_tokens": "Accepted draft tokens.",
}
"""Counters of speculative decoding: help texts by metric name, without the prefix `vllm:`."""
ACCEPTED = "spec_decode_num_accepted_tokens_per_pos"
