"""Tests of ranks as actors of a real two-node Ray cluster on this machine."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from oracle import make_tiny
from tiny import SMALL

from quire import LLM, SamplingParams
from quire.errors import ConfigError, EngineDead

pytestmark = pytest.mark.slow

SETTINGS: dict[str, Any] = {
    **SMALL,
    "max_num_seqs": 4,
}
PROMPTS = [{"prompt_token_ids": [5, 6, 7, number]} for number in range(4)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("ray"))[0]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, connect=True, head_node_args={"num_cpus": 1})
    made.add_node(num_cpus=1)
    made.wait_for_nodes()
    yield made
    ray.shutdown()
    made.shutdown()


def answers(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]


def opened(tiny: Path) -> LLM:
    return LLM(str(tiny), distributed_executor_backend="ray", tensor_parallel_size=2, **SETTINGS)


def actors() -> list[psutil.Process]:
    actual = [item for item in psutil.process_iter(["cmdline"]) if item.info["cmdline"]]
    return [item for item in actual if item.info["cmdline"][0].startswith("ray::RayRank")]


def test_two_nodes_match_one_and_their_death_is_noticed(cluster: Any, tiny: Path) -> None:
    expected = answers(LLM(str(tiny), **SETTINGS))
    llm = opened(tiny)
    assert answers(llm) == expected
    assert len(actors()) == 2
    os.kill(actors()[1].pid, signal.SIGKILL)
    with pytest.raises(EngineDead, match="is gone"):
        answers(llm)
    llm.llm_engine.close()
    psutil.wait_procs(actors(), timeout=10)
    assert not actors()

    second = opened(tiny)
    assert answers(second) == expected
    cluster.remove_node(next(iter(cluster.worker_nodes)))
    with pytest.raises(EngineDead, match="is gone"):
        answers(second)
    second.llm_engine.close()
    with pytest.raises(ConfigError, match="2 ranks need as many CPUs, and the Ray cluster has 1"):
        opened(tiny)
