"""Tests of the model-server protocol of the Gateway API inference extension, and of its manifests."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import inference_gateway
import jsonschema
import pytest
import yaml
from kustomize import render
from prometheus_client.parser import text_string_to_metric_families
from serve_process import ServeProcess, Start

from quire.config.cli import FlagParser, add_engine_flags, engine_args_from
from quire.config.kv_events import KVEventSettings

KUBERNETES = Path(__file__).parents[2] / "deploy" / "kubernetes"
OVERLAY = render(KUBERNETES / "overlays" / "inference-pool")
VALUES = yaml.safe_load((KUBERNETES / "examples" / "llm-d.values.yaml").read_text())


def find(kind: str, name: str = "quire") -> Any:
    (document,) = (item for item in OVERLAY if (item["kind"], item["metadata"]["name"]) == (kind, name))
    return document


def picker_configs() -> dict[str, Any]:
    epp = VALUES["router"]["epp"]
    return {
        "component": yaml.safe_load(find("ConfigMap", "quire-picker")["data"]["plugins.yaml"]),
        "llm-d": yaml.safe_load(epp["pluginsCustomConfig"][epp["pluginsConfigFile"]]),
    }


def served_flags() -> dict[str, Any]:
    """Return the engine arguments of the pods, as their shell starts the server."""
    (container,) = find("Deployment")["spec"]["template"]["spec"]["containers"]
    command = container["command"][2]
    variables = find("ConfigMap")["data"] | {"POD_IP": "10.0.0.7"}
    words = re.sub(r"\$(\w+)", lambda found: variables[found[1]], command)
    parser = FlagParser()
    add_engine_flags(parser)
    known, _ = parser.parse_known_args(shlex.split(words)[3:])
    return engine_args_from(known)


def samples(server: ServeProcess) -> dict[str, list[Any]]:
    families = text_string_to_metric_families(server.client.get("/metrics").text)
    return {family.name: family.samples for family in families}


def test_metrics_are_what_an_endpoint_picker_reads(server: ServeProcess) -> None:
    """An endpoint picker reads the newest sample of a metric family, so each family has one sample per
    server."""
    families = samples(server)
    for name in ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc"):
        (sample,) = families[f"vllm:{name}"]
        assert 0 <= sample.value <= 1 and {"model_name", "engine"} <= sample.labels.keys()
    (info,) = families["vllm:cache_config_info"]
    assert int(info.labels["block_size"]) > 0 and int(info.labels["num_gpu_blocks"]) > 0
    assert info.value == 1 and "model_name" not in info.labels
    assert "vllm:lora_requests_info" not in families, "only with --enable-lora"


@pytest.mark.slow
def test_lora_metric_has_the_labels_of_the_protocol(start: Start) -> None:
    server = start("--enable-lora", "--max-loras", "3")
    server.until_healthy()
    (sample,) = samples(server)["vllm:lora_requests_info"]
    assert sample.labels == {"max_lora": "3", "running_lora_adapters": "", "waiting_lora_adapters": ""}
    assert sample.value > 1e9, "a unix time"


def test_pool_and_route_find_the_pods_and_the_picker() -> None:
    pool, pods, service = find("InferencePool")["spec"], find("Deployment"), find("Service", "quire-picker")
    template = pods["spec"]["template"]
    assert pool["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    ports = {port["name"]: port["containerPort"] for port in template["spec"]["containers"][0]["ports"]}
    assert [port["number"] for port in pool["targetPorts"]] == [ports["http"]]
    assert pool["endpointPickerRef"]["name"] == service["metadata"]["name"]
    assert pool["endpointPickerRef"]["port"]["number"] in [port["port"] for port in service["spec"]["ports"]]
    picker = find("Deployment", "quire-picker")["spec"]["template"]
    assert service["spec"]["selector"].items() <= picker["metadata"]["labels"].items()
    assert (
        f"--pool-name={find('InferencePool')['metadata']['name']}" in picker["spec"]["containers"][0]["args"]
    )
    ((backend,),) = (rule["backendRefs"] for rule in find("HTTPRoute")["spec"]["rules"])
    assert (backend["kind"], backend["name"]) == ("InferencePool", "quire")
    role = find("Role", "quire-picker")["rules"]
    assert {"pods", "inferencepools"} <= {name for rule in role for name in rule["resources"]}


@pytest.mark.parametrize("name", ["component", "llm-d"])
def test_picker_reads_the_events_that_the_pods_publish(name: str) -> None:
    """The ports, topic, block size, model and encoding of the picker equal those of the pods."""
    config = picker_configs()[name]
    jsonschema.validate(config, inference_gateway.PICKER)
    plugins = {plugin["type"]: plugin.get("parameters", {}) for plugin in config["plugins"]}
    used = set(re.findall(r'"pluginRef": "([^"]*)"', json.dumps(config)))
    assert used <= plugins.keys() and plugins["prefix-cache-scorer"]["prefixMatchInfoProducerName"] in plugins
    args = served_flags()
    settings = KVEventSettings.of(args["kv_events_config"])
    assert settings is not None and settings.encoding == "array", "the picker reads no maps"
    index = plugins["precise-prefix-cache-producer"]
    assert index["tokenProcessorConfig"]["blockSizeTokens"] == args["block_size"]
    events, model = index["kvEventsConfig"], plugins["token-producer"]["modelName"]
    assert settings.endpoint == f"tcp://*:{events['podDiscoveryConfig']['socketPort']}"
    assert settings.topic.startswith(events["topicFilter"]) and settings.topic == f"kv@10.0.0.7:8000@{model}"
    assert model == find("ConfigMap")["data"]["MODEL"]
    policy = find("NetworkPolicy")["spec"]["ingress"]
    (rule,) = (rule for rule in policy if rule["ports"][0]["port"] == "kv-events")
    picker = find("Deployment", "quire-picker")["spec"]["template"]["metadata"]["labels"]
    assert [peer["podSelector"]["matchLabels"] for peer in rule["from"]] == [picker]
    url = plugins["token-producer"]["vllm"]["url"]
    assert url == f"http://quire:{find('Service')['spec']['ports'][0]['port']}"


def test_llm_d_values_select_the_pods() -> None:
    jsonschema.validate(VALUES, inference_gateway.VALUES)
    servers, pool = VALUES["router"]["modelServers"], find("InferencePool")["spec"]
    assert servers["matchLabels"] == pool["selector"]["matchLabels"]
    assert servers["targetPorts"] == pool["targetPorts"]


def test_a_pool_with_the_fields_of_an_older_version_is_refused() -> None:
    pool = find("InferencePool")
    old = pool | {"spec": pool["spec"] | {"extensionRef": {"name": "quire-picker"}}}
    with pytest.raises(jsonschema.ValidationError, match="extensionRef"):
        jsonschema.validate(old, inference_gateway.POOL)
