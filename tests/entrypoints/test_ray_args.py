"""Tests of the arguments of the Ray Serve application and of its autoscaling, without Ray."""

from types import SimpleNamespace
from typing import Any

import pytest

from quire.entrypoints.ray_args import read_args
from quire.entrypoints.ray_scaling import replicas_for, scale
from quire.errors import ConfigError


def test_flags_and_fleet_settings_are_told_apart() -> None:
    """Check names with dashes, texts of `serve run`, and defaults."""
    (model,) = read_args(
        {
            "model": "org/name",
            "max-num-seqs": "64",
            "enable_lora": "true",
            "max_replicas": "4",
            "api-key": ["k"],
        }
    )
    assert model.engine == {"model": "org/name", "max_num_seqs": 64, "enable_lora": True}
    assert model.server == {"api_key": ["k"]}
    assert (model.fleet.min_replicas, model.fleet.max_size, model.fleet.ingress_replicas) == (1, 4, 1)
    assert not model.uses_ray_ranks


def test_models_share_the_other_arguments() -> None:
    first, second = read_args(
        {"max_num_seqs": 8, "models": [{"model": "a"}, {"model": "b", "max_num_seqs": 9}]}
    )
    assert first.engine == {"model": "a", "max_num_seqs": 8}
    assert second.engine == {"model": "b", "max_num_seqs": 9}


def test_ranks_are_ray_actors_unless_processes_are_wanted() -> None:
    (spread,) = read_args({"model": "a", "tensor_parallel_size": 4, "pipeline_parallel_size": 2})
    assert spread.num_ranks == 8 and spread.uses_ray_ranks
    assert spread.engine["distributed_executor_backend"] == "ray"
    (near,) = read_args({"model": "a", "tensor_parallel_size": 4, "distributed_executor_backend": "mp"})
    assert near.num_ranks == 4 and not near.uses_ray_ranks


def test_prompts_and_answers_have_fleets_with_a_role_each() -> None:
    args = {"model": "a", "max_replicas": 4, "max_num_seqs": 64, "kv_transfer_config": {"engine_id": "e"}}
    (model,) = read_args(args | {"prefill": {"max-num-seqs": 8, "min_replicas": 2}})
    roles = {"kv_connector": "NixlConnector", "engine_id": "e"}
    assert model.engine["kv_transfer_config"] == roles | {"kv_role": "kv_consumer"}
    assert (model.engine["max_num_seqs"], model.fleet.max_size, model.shares_prefixes) == (64, 4, True)
    assert model.prefill is not None and model.prefill.prefill is None
    assert model.prefill.engine["kv_transfer_config"] == roles | {"kv_role": "kv_producer"}
    assert (model.prefill.engine["max_num_seqs"], model.prefill.fleet.min_replicas) == (8, 2)
    (alone,) = read_args({"model": "a"})
    assert alone.prefill is None and not alone.shares_prefixes


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"prefill": 2}, "prefill=2 must be the flags of the replicas that compute prompts"),
        ({"modle": "a"}, "unknown flag 'modle'; did you mean '--model'"),
        ({"min_replicas": 0}, "min_replicas=0 must be at least 1"),
        ({"min_replicas": 3, "max_replicas": 2}, "max_replicas=2 is less than min_replicas=3"),
        ({"ingress_replicas": 0}, "ingress_replicas=0 must be at least 1"),
        ({"max_replicas": "many"}, "fleet settings: Expected `int`, got `str`"),
        ({"port": 8000}, "port has no effect in Ray Serve: set http_options"),
        ({"data_parallel_size": 2}, "data_parallel_size has no effect in Ray Serve: min_replicas"),
        ({"models": "a"}, "models must be a list of flags"),
        ({"models": []}, "models must be a list of flags"),
        ({"enable_lora": "maybe"}, "enable_lora must be true or false, not 'maybe'"),
    ],
)
def test_wrong_arguments_are_refused(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_args(args)


# ---- autoscaling


def test_waiting_requests_add_replicas() -> None:
    load = {"kv_usage": 1.9, "max_num_seqs": 256}
    assert replicas_for(current=2, running=40, waiting=40, **load) == 4, "twice as many requests as run now"
    assert replicas_for(current=2, running=40, waiting=1, **load) == 3
    assert replicas_for(current=1, running=0, waiting=5, kv_usage=0, max_num_seqs=4) == 5, "nothing runs yet"


def test_cache_usage_and_full_batches_add_replicas_before_requests_wait() -> None:
    assert replicas_for(current=2, running=10, waiting=0, kv_usage=1.8, max_num_seqs=256) == 3
    assert replicas_for(current=1, running=240, waiting=0, kv_usage=0.1, max_num_seqs=256) == 2
    assert replicas_for(current=2, running=10, waiting=0, kv_usage=1.6, max_num_seqs=256) == 2


def test_idle_fleet_shrinks_to_one() -> None:
    assert replicas_for(current=8, running=0, waiting=0, kv_usage=0.0, max_num_seqs=256) == 1
    assert replicas_for(current=8, running=200, waiting=0, kv_usage=0.9, max_num_seqs=256) == 2


def test_policy_adds_up_the_reports_of_all_replicas() -> None:
    metrics = {
        "num_running": {"a": 4.0, "b": 4.0},
        "num_waiting": {"a": 8.0, "b": 0.0},
        "kv_usage": {"a": 0.9, "b": 0.5},
        "max_num_seqs": {"a": 4.0, "b": 4.0},
        "ray_num_running_requests": {"a": 99.0},
    }
    assert scale(SimpleNamespace(aggregated_metrics=metrics, target_num_replicas=2)) == (4, {})
    assert scale(SimpleNamespace(aggregated_metrics={}, target_num_replicas=3)) == (3, {})
