"""The metric of the weight version."""

from collections.abc import Mapping, Sequence

from prometheus_client.core import GaugeMetricFamily


def version_family(
    versions: Mapping[int, str], engines: Sequence[tuple[int, list[str]]], names: list[str]
) -> GaugeMetricFamily:
    """Return the weight version of each engine as a label; `engines` are indices and labels."""
    text = "Version of the weights, as the trainer named it."
    family = GaugeMetricFamily("vllm:weight_version_info", text, labels=[*names, "weight_version"])
    for engine, labels in engines:
        if engine in versions:
            family.add_metric([*labels, versions[engine]], 1)
    return family
