"""The Ray Serve application: an HTTP ingress over replicas of an engine, which Ray starts and scales."""

from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from quire.entrypoints.ray_args import FleetModel, read_args
from quire.entrypoints.ray_ingress import Ingress
from quire.entrypoints.ray_replica import EngineReplica

STATS_PERIOD_S = 1.0
"""Seconds between two reports of a replica to the routers of all ingresses."""
UNLIMITED = 1_000_000
"""Ray Serve's limit of requests at a replica, which is never reached: the engine core queues them itself."""
HEALTH_CHECK_PERIOD_S = 5.0


def build(args: Mapping[str, Any]) -> serve.Application:
    """Build the application from the flags of `quire serve` and of the fleet (docs/fleet.md), for
    `serve run quire.entrypoints.ray_serve:build model=...` and the `args` of a Serve config file."""
    models = read_args(args)
    first = models[0].fleet
    engines = []
    for number, model in enumerate(models):
        suffix = "" if len(models) == 1 else str(number)
        engines.append(_deploy(model).options(name=f"Engine{suffix}").bind(model))
        if model.prefill is not None:
            engines.append(_deploy(model.prefill).options(name=f"Prefill{suffix}").bind(model.prefill))
    ingress = serve.deployment(
        serve.ingress(None)(Ingress),
        name="Ingress",
        num_replicas=first.ingress_replicas,
        max_ongoing_requests=UNLIMITED,
        ray_actor_options={"num_cpus": first.ingress_num_cpus},
        graceful_shutdown_timeout_s=first.drain_s,
    )
    return ingress.bind(models, *engines)


def _deploy(model: FleetModel) -> Any:
    fleet = model.fleet
    return serve.deployment(
        EngineReplica,
        max_ongoing_requests=UNLIMITED,
        request_router_config=RequestRouterConfig(
            request_router_class=fleet.request_router,
            request_routing_stats_period_s=STATS_PERIOD_S,
            request_routing_stats_timeout_s=10 * STATS_PERIOD_S,
        ),
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        graceful_shutdown_timeout_s=fleet.drain_s,
        logging_config={"enable_access_log": False},  # ingresses log requests
        **_scaling(model),
        **_resources(model),
    )


def _scaling(model: FleetModel) -> dict[str, Any]:
    """Return the deployment options for a fixed number of replicas, or for autoscaling by load."""
    fleet = model.fleet
    if fleet.max_size == fleet.min_replicas:
        return {"num_replicas": fleet.min_replicas}
    config = AutoscalingConfig(
        min_replicas=fleet.min_replicas,
        max_replicas=fleet.max_size,
        policy={"policy_function": "quire.entrypoints.ray_scaling:scale"},
        metrics_interval_s=fleet.scaling_interval_s,
        look_back_period_s=2 * fleet.scaling_interval_s,
        upscale_delay_s=fleet.upscale_delay_s,
        downscale_delay_s=fleet.downscale_delay_s,
    )
    return {"autoscaling_config": config}


def _resources(model: FleetModel) -> dict[str, Any]:
    """Return the deployment options for the resources of a replica: those of its actor, or a placement group
    with a bundle for the actor and one for each tensor- and pipeline-parallel rank."""
    kind, num_cpus = ("CPU" if model.is_on_cpu else "GPU"), model.fleet.num_cpus
    if not model.uses_ray_ranks:
        num_gpus = 0 if model.is_on_cpu else model.num_ranks
        return {"ray_actor_options": {"num_cpus": num_cpus, "num_gpus": num_gpus}}
    ranks = [{"CPU": 1.0, kind: 1.0}] * model.num_ranks
    return {
        "ray_actor_options": {"num_cpus": num_cpus},
        "placement_group_bundles": [{"CPU": num_cpus}, *ranks],
        "placement_group_strategy": "PACK",
    }
