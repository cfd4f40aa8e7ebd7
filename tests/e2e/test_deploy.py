"""Files in deploy/: valid manifests, alerts that fire, and a dashboard with queries that return data."""

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
import pytest
import yaml
from ports import free_port
from serve_process import ServeProcess, Start, eventually

DEPLOY = Path(__file__).parents[2] / "deploy"
OVERLAYS = sorted(path.parent.name for path in DEPLOY.glob("kubernetes/overlays/*/kustomization.yaml"))


def tool(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


@functools.cache
def kubectl() -> str:
    """Return a kubectl that supports components, which that of Debian 12 does not."""
    path = tool("kubectl")
    done = subprocess.run([path, "version", "--client", "-o", "json"], capture_output=True, text=True)
    version = json.loads(done.stdout)["clientVersion"]
    if (int(version["major"]), int(re.match(r"\d+", version["minor"])[0])) < (1, 21):  # type: ignore[index]
        pytest.skip(f"{path} is {version['gitVersion']}; components need 1.21")
    return path


@functools.cache
def documents(overlay: str) -> dict[str, dict[str, Any]]:
    words = [kubectl(), "kustomize", str(DEPLOY / "kubernetes" / "overlays" / overlay)]
    made = subprocess.run(words, capture_output=True, text=True, check=True)
    return {item["kind"]: item for item in yaml.safe_load_all(made.stdout)}


def make() -> Any:
    spec = importlib.util.spec_from_file_location("make", DEPLOY / "grafana" / "make.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_docker_build_context_has_all_files() -> None:
    """Every path that the Dockerfile copies exists and is in the context, and so are the files of the
    wheel."""
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


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_manifests_are_rendered_and_valid(overlay: str) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    for kind, document in documents(overlay).items():
        if kind not in ("PodMonitor", "LeaderWorkerSet"):  # of operators, which have their own schemas
            validate.validate(document, "1.33", strict=True)
    for pod in pods(overlay):
        whole = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": pod["spec"]}
        validate.validate(whole, "1.33", strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_drain_in_time_and_have_a_read_only_root(overlay: str) -> None:
    """The drain timeout of the server and the pause before fit into the grace period of the cluster."""
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
def test_monitors_and_policies_select_the_pods(overlay: str) -> None:
    made = documents(overlay)
    selectors = [made["PodMonitor"]["spec"]["selector"]]
    if overlay != "multi-node":
        selectors.append(made["NetworkPolicy"]["spec"]["podSelector"])
        selectors.append(made["PodDisruptionBudget"]["spec"]["selector"])
    for selector in selectors:
        wanted = selector["matchLabels"]
        assert wanted and all(wanted.items() <= pod["metadata"]["labels"].items() for pod in pods(overlay))


def pods(overlay: str) -> list[dict[str, Any]]:
    """Return the pod templates."""
    made = documents(overlay)
    if "LeaderWorkerSet" not in made:
        return [made["Deployment"]["spec"]["template"]]
    group = made["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    return [group["leaderTemplate"], group["workerTemplate"]]


def test_autoscaler_uses_the_waiting_requests(server: ServeProcess) -> None:
    """The rule of the adapter renames a metric of the server to the requested one."""
    scaler = documents("single-gpu")["HorizontalPodAutoscaler"]["spec"]
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
    """Alerts and KEDA use them; the job name of the alerts is that of the cluster, too."""
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
