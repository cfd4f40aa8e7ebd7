"""Tests of simulated clusters: measured values are reproduced, and nothing exceeds its bounds."""

import dataclasses
import json
import random

import pytest
import scale
from layouts import GpuLayout, StepCost
from scale import FREE
from shapes import MEASURED, SHAPES, Measured
from simulated import SimulatedCore, Traffic, run
from step_costs import PREFILL, Correction, Links, StepShape, decode_of

from quire.bench import gpu
from quire.data.params import SamplingParams
from quire.data.request import Request
from quire.errors import ConfigError
from quire.plan.rates import BATCHES, LLAMA_8B

WHOLE = [row for row in MEASURED if row.tp == 1]
LIMITS = {"max_num_seqs": 1024, "max_num_batched_tokens": 16384}


def seconds(model: str, layout: GpuLayout, step: StepShape, links: Links = FREE) -> float:
    return sum(StepCost(model, layout, links).stage_s(step))


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: f"{row.model}/{row.tp}")
def test_measured_steps_are_reproduced(row: Measured) -> None:
    for batch, ms in zip(BATCHES, row.decode_ms, strict=False):
        assert 1e3 * seconds(row.model, GpuLayout(tp=row.tp), decode_of(batch)) == pytest.approx(ms, rel=0.01)
    rate = PREFILL.num_tokens / seconds(row.model, GpuLayout(tp=row.tp), PREFILL)
    assert rate == pytest.approx(row.prefill_tok_s, rel=0.01)


@pytest.mark.parametrize("row", WHOLE, ids=lambda row: row.model)
def test_rates_alone_are_close(row: Measured) -> None:
    """Check the model of a step without corrections, which would hide errors at other sizes."""
    cost = StepCost(row.model, GpuLayout(), FREE)
    cost.correction = Correction()
    actual = [1e3 * cost.stage_s(decode_of(batch))[0] for batch in BATCHES]
    assert actual == pytest.approx(list(row.decode_ms), rel=0.08)


@pytest.mark.parametrize(
    ("model", "out_tok_s"),
    [
        pytest.param("qwen3-0.6b", 27_021, marks=pytest.mark.slow),
        pytest.param("llama-3.1-8b", 10_400, marks=pytest.mark.slow),
        ("qwen3-30b-a3b", 6_412),
    ],
)
def test_whole_run_matches_its_measured_time(model: str, out_tok_s: float) -> None:
    """Check the offline workload of `quire.bench.gpu`, to which no rate is fitted."""
    draw = random.Random(0)
    num_in = []
    for _ in range(gpu.OFFLINE_REQUESTS):
        num_in.append(draw.randint(gpu.SHORTEST, gpu.LONGEST))
        for _ in range(num_in[-1]):
            draw.randint(0, gpu.VOCAB)
    num_out = [draw.randint(gpu.SHORTEST, gpu.LONGEST) for _ in num_in]
    core = SimulatedCore(StepCost(model, GpuLayout(), Links()), max_len=4096, **LIMITS)
    for number, (prompt_len, length) in enumerate(zip(num_in, num_out, strict=True)):
        core.scheduler.add(
            Request(
                id=str(number),
                tokens=[0] * prompt_len,
                params=SamplingParams(max_tokens=length, ignore_eos=True),
                prompt_len=prompt_len,
                limit=prompt_len + length,
                seed=0,
            )
        )
    now = 0.0
    while core.load:
        core.launch(now)
        now = core.next_at
        core.land()
    assert sum(num_out) / now == pytest.approx(out_tok_s, rel=0.04)


@pytest.mark.parametrize("model", SHAPES)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_twice_the_devices_are_at_most_twice_as_fast(model: str, tp: int) -> None:
    for step in [*map(decode_of, (1, 4, 8, 20, 32, 64, 128, 200, 256)), PREFILL]:
        one, two = (seconds(model, GpuLayout(tp=size), step, Links()) for size in (tp, 2 * tp))
        assert one / 2 <= two * 1.0001, step


def test_all_reduce_uses_the_fastest_method_and_nodes_cost_more() -> None:
    links = Links()
    times = [links.all_reduce_s(size, 8) for size in (1 << 13, 1 << 17, 1 << 20, 1 << 24, 1 << 28)]
    assert (
        times == sorted(times) and times[0] < 1.1 * links.one_shot_s and links.all_reduce_s(1 << 20, 1) == 0
    )
    assert links.all_reduce_s(1 << 13, 16) > 5 * times[0]
    assert links.sent_s(1 << 27, other_node=True) > 5 * links.sent_s(1 << 27, other_node=False)


def test_stages_share_the_layers_and_sends_cost_time() -> None:
    step = decode_of(32)
    full, halves = (StepCost("llama-3.1-8b", GpuLayout(pp=pp), FREE).stage_s(step) for pp in (1, 2))
    assert sum(halves) == pytest.approx(full[0]) and halves[0] < halves[1]  # the head is on the last stage
    assert StepCost("llama-3.1-8b", GpuLayout(pp=2), Links()).stage_s(step)[0] > halves[0]
    near, far = (StepCost("llama-3.1-8b", GpuLayout(tp=tp, pp=2), Links()) for tp in (4, 8))
    assert near._send_s(0, PREFILL) < far._send_s(0, PREFILL) / 5


def test_stages_are_busy_while_rows_decode() -> None:
    """Check that two stages with two plans in flight serve twice the requests in the same time."""

    def took_s(pp: int) -> float:
        core = SimulatedCore(StepCost("llama-3.1-8b", GpuLayout(pp=pp), FREE), max_len=256, **LIMITS)
        watch = run([core], Traffic(64 * pp, 4, 200, concurrency=64 * pp, spread=0.0))
        return max(watch.last.values())

    assert took_s(1) < took_s(2) < 1.1 * took_s(1)


def test_requests_go_to_the_core_with_fewest() -> None:
    cores = [
        SimulatedCore(StepCost("qwen3-0.6b", GpuLayout(dp=2), FREE), max_len=64, **LIMITS) for _ in range(2)
    ]
    most = [0, 0]

    class Seen(Traffic):
        def requests(self):  # type: ignore[no-untyped-def]
            for request in super().requests():
                yield request
                most[:] = [max(old, core.load) for old, core in zip(most, cores, strict=True)]

    run(cores, Seen(40, 8, 8, concurrency=10))
    assert max(most) <= 6 and min(most) >= 4


def test_cores_in_lockstep_pay_for_each_others_tokens() -> None:
    cost = StepCost("qwen3-30b-a3b", GpuLayout(dp=8, ep=True), Links())
    step = decode_of(4)
    assert cost.stage_s(step, all_tokens=8192)[0] > 2 * cost.stage_s(step, all_tokens=32)[0]
    alone = dataclasses.replace(cost.layout, ep=False)
    assert cost.weights_bytes() < StepCost("qwen3-30b-a3b", alone, Links()).weights_bytes() / 5


def test_configuration_that_does_not_fit_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    scale.main(["--model", "llama-3.1-70b", "--layouts", "tp1", "tp3", "dp2ep", "--json"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["refused"] for row in rows] == [
        "141 GB of weights on a GPU with 131 GB do not fit",
        "tp 3 does not divide 64 heads and 8 KV heads",
        "there are no experts",
    ]
    assert "out_tok_s" not in rows[0]


SMALL = ["--concurrency", "4", "--num-requests", "24", "--input-len", "64", "--output-len", "8"]


def test_table_is_deterministic(capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for _ in range(2):
        scale.simulate.cache_clear()
        scale.main(["--model", "qwen3-0.6b", "--gpus", "1", "2", *SMALL])
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] and "assumed" in shown[0]
    layouts = [line.split()[1] for line in shown[0].splitlines() if line[0] != "#"]
    assert layouts == ["layout", "tp1", "dp2", "pp2", "tp2"]


@pytest.mark.parametrize(
    "flags", [["--request-rate", "50"], ["--layouts", "dp2tp1ep", "dp4ep", "--all-to-all"]]
)
def test_other_traffic_and_experts(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    scale.main(["--model", "qwen3-30b-a3b", "--gpus", "1", *SMALL, "--json", *flags])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(row["out_tok_s"] > 0 and row["ttft_ms"] > 0 and row["itl_ms"] > 0 for row in rows)


def test_single_steps(capsys: pytest.CaptureFixture[str]) -> None:
    scale.main(["--steps", "--layouts", "tp1", "tp2", "tp3", "--json"])
    one, two, three = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    measured = (LLAMA_8B.decode_ms[0], 0.0, LLAMA_8B.prefill_tok_s)
    assert (one["ms_1"], one["links_ms_1"], one["prefill_tok_s"]) == measured and "refused" in three
    assert two["ms_1"] - two["links_ms_1"] == pytest.approx(2.238, abs=0.01)
    assert two["links_ms_1"] == pytest.approx(32 * 2 * 0.008, rel=0.1)
    scale.main(["--steps", "--layouts", "tp2", "tp3"])
    shown = capsys.readouterr().out.splitlines()
    assert f"{two['ms_1']} ({two['links_ms_1']})" in shown[-2] and "not simulated" in shown[-1]


@pytest.mark.parametrize("text", ["tp1", "dp2", "tp8pp2", "dp16tp8", "dp2tp8ep"])
def test_layouts_are_parsed_as_written(text: str) -> None:
    assert str(GpuLayout.of(text)) == text


@pytest.mark.parametrize("text", ["", "tp", "tp0", "8tp", "tp8-pp2", "cp2"])
def test_invalid_layout(text: str) -> None:
    with pytest.raises(ConfigError, match="not a layout"):
        GpuLayout.of(text)


def test_sensible_layouts_use_all_gpus() -> None:
    actual = scale.sensible("qwen3-30b-a3b", [1, 2, 8, 128])
    assert {layout.num_gpus for layout in actual} == {1, 2, 8, 128} and len(actual) == len(set(actual))
    assert (
        all(layout.tp <= 8 for layout in actual)
        and GpuLayout(16, 8) in actual
        and GpuLayout(128, ep=True) in actual
    )
