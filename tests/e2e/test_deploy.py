"""Tests of the files in deploy/: valid manifests, alerts that fire, and a dashboard with queries that return
data."""

import functools
import importlib.util
import json
import re
import shutil
import subprocess
import time
import tomllib
from pathlib import Path
from typing import Any

import httpx
import inference_gateway
import jsonschema
import pytest
import yaml
from kustomize import render
from ports import free_port
from serve_process import ServeProcess, Start, eventually

from quire.entrypoints.ray_args import read_args

DEPLOY = Path(__file__).parents[2] / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
OVERLAYS = sorted(path.parent.name for path in KUBERNETES.glob("overlays/*/kustomization.yaml"))
OPERATORS = {
    *(
        "PodMonitor",
        "LeaderWorkerSet",
        "HTTPRoute",
        "ScaledObject",
        "NodePool",
        "EC2NodeClass",
        "RayJob",
        "RayService",
    )
}
"""Kinds of resources of operators, whose schemas are not known here."""


def tool(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


def kubectl() -> str | None:
    """Return a kubectl that supports `replacements`, which that of Debian 12 does not."""
    path = shutil.which("kubectl")
    if path is None:
        return None
    done = subprocess.run([path, "version", "--client", "-o", "json"], capture_output=True, text=True)
    version = json.loads(done.stdout)["clientVersion"]
    is_new = (int(version["major"]), int(re.match(r"\d+", version["minor"])[0])) >= (1, 22)  # type: ignore[index]
    return path if is_new else None


@functools.cache
def documents(overlay: str) -> list[dict[str, Any]]:
    """Return the documents of an overlay, rendered by kubectl, or here if it is too old."""
    folder = KUBERNETES / "overlays" / overlay
    if (path := kubectl()) is None:
        return render(folder)
    made = subprocess.run([path, "kustomize", str(folder)], capture_output=True, text=True, check=True)
    return list(yaml.safe_load_all(made.stdout))


def of_kind(overlay: str, kind: str) -> list[dict[str, Any]]:
    return [document for document in documents(overlay) if document["kind"] == kind]


def make() -> Any:
    spec = importlib.util.spec_from_file_location("make", DEPLOY / "grafana" / "make.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_docker_build_context_has_all_files() -> None:
    """The Docker build context has every path that the Dockerfile copies, and every file of the wheel."""
    root = DEPLOY.parent
    copied = {
        path
        for line in (DEPLOY / "Dockerfile").read_text().splitlines()
        if line.startswith("COPY ") and "--from" not in line
        for path in line.split()[1:-1]
    }
    ignored = (root / ".dockerignore").read_text().splitlines()
    assert copied == {line[1:] for line in ignored if line.startswith("!")}
    assert [path for path in copied if not (root / path).exists()] == []
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert {project["readme"], *project["license-files"]} <= copied


OTHERS = sorted(
    str(path.relative_to(KUBERNETES))
    for path in (*KUBERNETES.glob("components/*/*.yaml"), *KUBERNETES.glob("examples/*.yaml"))
    if path.name not in ("kustomization.yaml", "adapter-rules.yaml", "gpu-operator.yaml", "llm-d.values.yaml")
)
"""Manifests of components and examples. The files that are left out are values of charts."""


def check(document: dict[str, Any]) -> None:
    """Validate a document and its pods."""
    validate = pytest.importorskip("kubernetes_validate")
    assert {"apiVersion", "kind", "metadata", "spec"} - document.keys() <= {"spec"}, document
    if document["kind"] == "InferencePool":
        jsonschema.validate(document, inference_gateway.POOL)
    elif document["kind"] not in OPERATORS:
        validate.validate(document, "1.33", strict=True)
    for pod in pod_templates(document):
        whole = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": pod["spec"]}
        validate.validate(whole, "1.33", strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_manifests_are_rendered_and_valid(overlay: str) -> None:
    made = documents(overlay)
    assert made
    for document in made:
        check(document)
    names = [(document["kind"], document["metadata"]["name"]) for document in made]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kubectl_renders_the_same_manifests(overlay: str) -> None:
    """Checks the renderer of the tests, for machines without a new kubectl. kubectl adds a hash to the names
    of ConfigMaps."""
    if kubectl() is None:
        pytest.skip("no kubectl 1.22 or newer")
    text = re.sub(r"(: quire[a-z-]*)-[2-9bcdfghkmt]{10}\n", r"\1\n", yaml.safe_dump_all(documents(overlay)))
    expected, actual = (
        {(item["kind"], item["metadata"]["name"]): item for item in items}
        for items in (yaml.safe_load_all(text), render(KUBERNETES / "overlays" / overlay))
    )
    assert actual == expected


@pytest.mark.parametrize("file", OTHERS)
def test_components_and_examples_are_valid(file: str) -> None:
    for document in yaml.safe_load_all((KUBERNETES / file).read_text()):
        check(document)


def serve_configs() -> dict[str, dict[str, Any]]:
    """Return the configurations of Ray Serve by file name."""
    files = sorted((DEPLOY / "ray-serve").glob("*.yaml"))
    service = yaml.safe_load((KUBERNETES / "examples/ray-service.yaml").read_text())
    configs = {path.name: yaml.safe_load(path.read_text()) for path in files}
    return configs | {"ray-service.yaml": yaml.safe_load(service["spec"]["serveConfigV2"])}


@pytest.mark.parametrize("name", serve_configs())
def test_configurations_of_ray_serve_are_valid(name: str) -> None:
    """The builder of Quire accepts the arguments, and Ray the rest, if it is installed."""
    config = serve_configs()[name]
    (application,) = config["applications"]
    assert application["import_path"] == "quire.entrypoints.ray_serve:build"
    assert all(model.engine["model"] for model in read_args(application["args"]))
    if importlib.util.find_spec("ray") is not None:
        from ray.serve.schema import ServeDeploySchema

        ServeDeploySchema.model_validate(config)


def pod_templates(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the pod templates of a document of any kind, which all have containers in their `spec`."""
    if "containers" in document.get("spec", {}):
        return [document]
    children = (
        child for value in document.values() for child in (value if isinstance(value, list) else [value])
    )
    return [pod for child in children if isinstance(child, dict) for pod in pod_templates(child)]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_drain_in_time_and_have_a_read_only_root(overlay: str) -> None:
    """The server's drain timeout and the pause before it fit into the grace period of the pods."""
    for pod in pods(overlay):
        (container,) = pod["spec"]["containers"]
        assert pod["spec"]["securityContext"]["runAsNonRoot"]
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert {mount["mountPath"] for mount in container["volumeMounts"]} == {
            "/cache",
            "/tmp",
            "/dev/shm",
        }
        if "--headless" in container["command"][2]:
            continue
        drain_s = int(re.search(r"--shutdown-timeout (\d+)", container["command"][2])[1])  # type: ignore[index]
        pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
        assert drain_s + pause < pod["spec"]["terminationGracePeriodSeconds"]
        probes = [container[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")]
        assert {probe["httpGet"]["path"] for probe in probes} == {"/health"}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_selectors_match_the_pods(overlay: str) -> None:
    """Each monitor, policy and budget selects pods; each pod is selected by exactly one of each kind."""
    fields = {"PodMonitor": "selector", "NetworkPolicy": "podSelector", "PodDisruptionBudget": "selector"}
    for kind, field in fields.items():
        made = of_kind(overlay, kind)
        assert made or overlay == "multi-node"
        selectors = [document["spec"][field]["matchLabels"] for document in made]
        for pod in pods(overlay) if made else []:
            labels = pod["metadata"]["labels"].items()
            assert sum(selector.items() <= labels for selector in selectors) == 1, (kind, labels)


def pods(overlay: str) -> list[dict[str, Any]]:
    """Return the pod templates of the servers."""
    everything = [pod for document in documents(overlay) for pod in pod_templates(document)]
    return [pod for pod in everything if pod["spec"]["containers"][0]["name"] != "picker"]


def test_pods_with_gpus_tolerate_the_nodes_of_the_examples() -> None:
    """Every pod with GPUs has the label and tolerates the taint of Karpenter's nodes."""
    pool, _ = yaml.safe_load_all((KUBERNETES / "examples/karpenter.yaml").read_text())
    template = pool["spec"]["template"]
    job = next(yaml.safe_load_all((KUBERNETES / "examples/ray-job.yaml").read_text()))
    service = yaml.safe_load((KUBERNETES / "examples/ray-service.yaml").read_text())
    everything = [
        *pod_templates(job),
        *pod_templates(service),
        *(pod for overlay in OVERLAYS for pod in pods(overlay)),
    ]
    with_gpus = [
        pod for pod in everything if "nvidia.com/gpu" in str(pod["spec"]["containers"][0]["resources"])
    ]
    assert len(with_gpus) == 9
    for pod in with_gpus:
        assert pod["spec"]["nodeSelector"].items() <= template["metadata"]["labels"].items()
        (taint,) = template["spec"]["taints"]
        assert {"key": taint["key"], "operator": "Exists", "effect": taint["effect"]} in pod["spec"][
            "tolerations"
        ]


def test_init_container_downloads_the_model_that_is_served() -> None:
    (pod,) = pods("bucket")
    (init,), (server,) = pod["spec"]["initContainers"], pod["spec"]["containers"]
    assert init["image"] == server["image"] != "quire"
    assert init["envFrom"][0] == server["envFrom"][0]
    assert (
        init["command"][2] == 'exec quire download "$MODEL"'
        and 'quire serve "$MODEL"' in server["command"][2]
    )
    assert {"name": "HF_HUB_OFFLINE", "value": "1"} in server["env"], "the server reads the cache only"
    (config,) = of_kind("bucket", "ConfigMap")
    assert config["data"]["MODEL"].startswith("s3://")
    assert pod["spec"]["serviceAccountName"] == of_kind("bucket", "ServiceAccount")[0]["metadata"]["name"]


def test_split_routes_to_both_variants() -> None:
    """Services, weights and the canary's Ingress agree; the variants have the same adapter name."""
    services = {item["metadata"]["name"]: item["spec"] for item in of_kind("split", "Service")}
    (route,) = of_kind("split", "HTTPRoute")
    backends = [backend for rule in route["spec"]["rules"] for backend in rule["backendRefs"]]
    assert {backend["name"] for backend in backends} == services.keys()
    assert sum(backend.get("weight", 0) for backend in backends) == 100
    for backend in backends:
        assert backend["port"] in [port["port"] for port in services[backend["name"]]["ports"]]
    for spec in services.values():
        labels = [pod["metadata"]["labels"].items() for pod in pods("split")]
        assert sum(spec["selector"].items() <= items for items in labels) == 1
    adapters = {
        re.search(r"--lora-modules (\w+)=", item["data"]["FLAGS"])[1]
        for item in of_kind("split", "ConfigMap")
    }  # type: ignore[index]
    assert adapters == {"support"}
    text = (KUBERNETES / "components/ingress-canary/ingress.yaml").read_text()
    main, canary = yaml.safe_load_all(text)
    paths = [item["spec"]["rules"][0]["http"]["paths"][0] for item in (main, canary)]
    assert [path["backend"]["service"]["name"] for path in paths] == sorted(services)
    assert main["spec"]["rules"][0]["host"] == canary["spec"]["rules"][0]["host"]
    assert canary["metadata"]["annotations"]["nginx.ingress.kubernetes.io/canary"] == "true"


def test_autoscaler_uses_the_waiting_requests(server: ServeProcess) -> None:
    """The rule of the adapter renames a metric of the server to the requested one."""
    scaler = of_kind("single-gpu", "HorizontalPodAutoscaler")[0]["spec"]
    (metric,) = scaler["metrics"]
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (2, 10)
    assert metric["pods"]["target"]["averageValue"] == "10"
    adapter = yaml.safe_load((DEPLOY / "kubernetes/components/hpa/adapter-rules.yaml").read_text())
    (rule,) = adapter["rules"]["custom"]
    pattern = re.search(r'__name__=~"([^"]*)"', rule["seriesQuery"])[1]  # type: ignore[index]
    names = {line.split("{")[0] for line in server.client.get("/metrics").text.splitlines()}
    results = [name for name in names if re.fullmatch(pattern, name)]
    matches = re.compile(rule["name"]["matches"])
    renamed = {matches.sub(rule["name"]["as"].replace("${1}", r"\1"), name) for name in results}
    assert metric["pods"]["metric"]["name"] in renamed


def test_alerts_and_scalers_use_existing_metrics(server: ServeProcess) -> None:
    """Alerts and KEDA use metrics that exist, and the alerts use the job name of the cluster."""
    assert server.client.get("/v1/models").status_code == 200  # answers are counted from the first one
    names = {re.split(r"[{ ]", line)[0] for line in server.client.get("/metrics").text.splitlines()}
    alerts = (DEPLOY / "prometheus/alerts.yml").read_text()
    keda = (DEPLOY / "kubernetes/components/keda/scaled-object.yaml").read_text()
    used = set(re.findall(r"\b(?:vllm|quire|http|process)[:_][a-z_0-9:]+", alerts + keda))
    assert used and used <= names
    monitor = yaml.safe_load((DEPLOY / "kubernetes/monitor/monitor.yaml").read_text())
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    (config,) = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())["scrape_configs"]
    known = {*re.findall(r'job="([^"]*)"', alerts)}
    assert (
        known == {config["job_name"]} == {relabeling["replacement"] for relabeling in endpoint["relabelings"]}
    )


def test_alerts_fire_when_they_should() -> None:
    words = [tool("promtool"), "test", "rules", "alerts_test.yml"]
    subprocess.run(words, cwd=DEPLOY / "prometheus", check=True)
    rules = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())["groups"][0]["rules"]
    tried = (DEPLOY / "prometheus/alerts_test.yml").read_text()
    assert [rule["alert"] for rule in rules if rule["alert"] not in tried] == []


def test_dashboard_matches_its_generator() -> None:
    kept = json.loads((DEPLOY / "grafana/dashboards/quire.json").read_text())
    assert kept == make().dashboard(), "run: python deploy/grafana/make.py"


@pytest.mark.slow
def test_every_dashboard_query_returns_data(start: Start, tmp_path: Path) -> None:
    """A real Prometheus scrapes a real server with adapters and drafts."""
    prometheus = tool("prometheus")
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    server = start("--enable-lora", "--speculative-config", json.dumps(drafts))
    server.until_healthy()
    port = free_port()
    config = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [f"127.0.0.1:{server.port}"]
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(DEPLOY / "prometheus/alerts.yml")]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    words = [prometheus, f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
    running = subprocess.Popen([*words, f"--web.listen-address=127.0.0.1:{port}"], stderr=subprocess.DEVNULL)
    api = httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1", timeout=60)
    queries = [query for _, _, _, panel in make().PANELS for _, query in panel]
    missing = list(queries)

    def ask() -> bool:
        body = {"model": "tiny", "prompt": "a b c a b c a b c", "max_tokens": 32, "temperature": 0}
        assert server.client.post("/v1/completions", json=body).status_code == 200
        time.sleep(1.0)
        for query in list(missing):
            plain = query.replace("$__rate_interval", "10s").replace("$model", ".*")
            reply_body = api.get("/query", params={"query": plain}).json()
            assert reply_body["status"] == "success", reply_body
            if reply_body["data"]["result"]:
                missing.remove(query)
        return not missing

    try:
        eventually("Prometheus is ready", lambda: _is_up(api))
        eventually(f"all have values: {missing}", ask)
        groups = api.get("/rules").json()["data"]["groups"]
        assert {rule["health"] for group in groups for rule in group["rules"]} == {"ok"}
    finally:
        running.kill()
        running.wait()


def _is_up(api: httpx.Client) -> bool:
    try:
        return api.get("/query", params={"query": "up"}).status_code == 200
    except httpx.HTTPError:
        return False
