"""What lies in deploy/: valid manifests, alerts that fire, a dashboard whose queries find something."""

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
from serve_process import ServeProcess, Start, eventually, free_port

DEPLOY = Path(__file__).parents[2] / "deploy"
OVERLAYS = sorted(path.parent.name for path in DEPLOY.glob("kubernetes/overlays/*/kustomization.yaml"))


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


@functools.cache
def kubectl() -> str:
    """One that knows components: that of Debian 12 does not."""
    path = tool("kubectl")
    told = subprocess.run([path, "version", "--client", "-o", "json"], capture_output=True, text=True)
    version = json.loads(told.stdout)["clientVersion"]
    if (int(version["major"]), int(re.match(r"\d+", version["minor"])[0])) < (1, 21):  # type: ignore[index]
        pytest.skip(f"{path} is {version['gitVersion']}; components need 1.21")
    return path


@functools.cache
def documents(overlay: str) -> dict[str, dict[str, Any]]:
    words = [kubectl(), "kustomize", str(DEPLOY / "kubernetes" / "overlays" / overlay)]
    made = subprocess.run(words, capture_output=True, text=True, check=True)
    return {each["kind"]: each for each in yaml.safe_load_all(made.stdout)}


def make() -> Any:
    spec = importlib.util.spec_from_file_location("make", DEPLOY / "grafana" / "make.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_image_is_built_of_what_the_build_may_see() -> None:
    """Whatever the Dockerfile copies is there and let in, and so are the files that the wheel must have."""
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
        if kind not in ("PodMonitor", "LeaderWorkerSet"):  # of operators, which have schemas of their own
            validate.validate(document, "1.33", strict=True)
    for pod in pods(overlay):
        whole = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": pod["spec"]}
        validate.validate(whole, "1.33", strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_end_after_their_requests_and_write_nothing(overlay: str) -> None:
    """What the server gives running requests, and the pause before, fit into what the cluster waits."""
    for pod in pods(overlay):
        (container,) = pod["spec"]["containers"]
        assert pod["spec"]["securityContext"]["runAsNonRoot"]
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert {each["mountPath"] for each in container["volumeMounts"]} == {"/cache", "/tmp", "/dev/shm"}
        if "--headless" in container["command"][2]:
            continue
        given = int(re.search(r"--shutdown-timeout (\d+)", container["command"][2])[1])  # type: ignore[index]
        pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
        assert given + pause < pod["spec"]["terminationGracePeriodSeconds"]
        probes = [container[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")]
        assert {each["httpGet"]["path"] for each in probes} == {"/health"}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_who_watches_and_guards_pods_finds_them_and_no_others(overlay: str) -> None:
    made = documents(overlay)
    selectors = [made["PodMonitor"]["spec"]["selector"]]
    if overlay != "multi-node":
        selectors.append(made["NetworkPolicy"]["spec"]["podSelector"])
        selectors.append(made["PodDisruptionBudget"]["spec"]["selector"])
    for selector in selectors:
        wanted = selector["matchLabels"]
        assert wanted and all(wanted.items() <= pod["metadata"]["labels"].items() for pod in pods(overlay))


def pods(overlay: str) -> list[dict[str, Any]]:
    """The templates of pods."""
    made = documents(overlay)
    if "LeaderWorkerSet" not in made:
        return [made["Deployment"]["spec"]["template"]]
    group = made["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    return [group["leaderTemplate"], group["workerTemplate"]]


def test_replicas_follow_those_who_wait(server: ServeProcess) -> None:
    """The rule of the adapter renames a metric that the server has to the one that is asked for."""
    scaler = documents("single-gpu")["HorizontalPodAutoscaler"]["spec"]
    (metric,) = scaler["metrics"]
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (2, 10)
    assert metric["pods"]["target"]["averageValue"] == "10"
    adapter = yaml.safe_load((DEPLOY / "kubernetes/components/hpa/adapter-rules.yaml").read_text())
    (rule,) = adapter["rules"]["custom"]
    theirs = re.search(r'__name__=~"([^"]*)"', rule["seriesQuery"])[1]  # type: ignore[index]
    names = {line.split("{")[0] for line in server.client.get("/metrics").text.splitlines()}
    found = [name for name in names if re.fullmatch(theirs, name)]
    ours = re.compile(rule["name"]["matches"])
    renamed = {ours.sub(rule["name"]["as"].replace("${1}", r"\1"), name) for name in found}
    assert metric["pods"]["metric"]["name"] in renamed


def test_whoever_reads_metrics_asks_for_those_that_there_are(server: ServeProcess) -> None:
    """Alerts, and KEDA; and the job that alerts know the server by is its job in a cluster, too."""
    assert server.client.get("/v1/models").status_code == 200  # answers are counted from the first on
    names = {re.split(r"[{ ]", line)[0] for line in server.client.get("/metrics").text.splitlines()}
    alerts = (DEPLOY / "prometheus/alerts.yml").read_text()
    keda = (DEPLOY / "kubernetes/components/keda/scaled-object.yaml").read_text()
    asked = set(re.findall(r"\b(?:vllm|quire|http|process)[:_][a-z_0-9:]+", alerts + keda))
    assert asked and asked <= names
    monitor = yaml.safe_load((DEPLOY / "kubernetes/monitor/monitor.yaml").read_text())
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    (config,) = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())["scrape_configs"]
    known = {*re.findall(r'job="([^"]*)"', alerts)}
    assert known == {config["job_name"]} == {each["replacement"] for each in endpoint["relabelings"]}


def test_alerts_fire_when_they_should() -> None:
    words = [tool("promtool"), "test", "rules", "alerts_test.yml"]
    subprocess.run(words, cwd=DEPLOY / "prometheus", check=True)
    rules = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())["groups"][0]["rules"]
    tried = (DEPLOY / "prometheus/alerts_test.yml").read_text()
    assert [rule["alert"] for rule in rules if rule["alert"] not in tried] == []


def test_the_dashboard_is_what_its_table_says() -> None:
    kept = json.loads((DEPLOY / "grafana/dashboards/quire.json").read_text())
    assert kept == make().dashboard(), "run: python deploy/grafana/make.py"


@pytest.mark.slow
def test_every_query_finds_something(start: Start, tmp_path: Path) -> None:
    """By a real Prometheus, over a real server with adapters and drafts."""
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
    queries = [query for _, _, _, each in make().PANELS for _, query in each]
    missing = list(queries)

    def ask() -> bool:
        body = {"model": "tiny", "prompt": "a b c a b c a b c", "max_tokens": 32, "temperature": 0}
        assert server.client.post("/v1/completions", json=body).status_code == 200
        time.sleep(1.0)
        for query in list(missing):
            plain = query.replace("$__rate_interval", "10s").replace("$model", ".*")
            found = api.get("/query", params={"query": plain}).json()
            assert found["status"] == "success", found
            if found["data"]["result"]:
                missing.remove(query)
        return not missing

    try:
        eventually("Prometheus is there", lambda: _is_up(api))
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
