"""Renders the kustomizations of deploy/ with the features that they use, for machines without a kustomize."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

Document = dict[str, Any]
_KNOWN = {
    *("apiVersion", "kind", "resources", "components", "configMapGenerator", "patches", "labels", "images"),
    *("nameSuffix", "replacements"),
}
_SELECTORS = {
    "Deployment": ("spec", "selector", "matchLabels"),
    "Service": ("spec", "selector"),
    "NetworkPolicy": ("spec", "podSelector", "matchLabels"),
    "PodDisruptionBudget": ("spec", "selector", "matchLabels"),
}
"""Selectors that includeSelectors sets; those of custom resources are unknown to kustomize."""


def render(folder: Path, documents: list[Document] | None = None) -> list[Document]:
    """Return the YAML documents of a kustomization. A component changes the `documents` of the kustomization
    that uses it."""
    (name,) = folder.glob("kustomization.yaml")
    rules = yaml.safe_load(name.read_text())
    assert rules.keys() <= _KNOWN, f"{name}: {rules.keys() - _KNOWN} are not supported here"
    documents = list(documents or [])
    for resource in rules.get("resources", []):
        path = folder / resource
        documents += render(path) if path.is_dir() else yaml.safe_load_all(path.read_text())
    documents = copy.deepcopy(documents)  # anchors in a file are one object
    _generate(rules.get("configMapGenerator", []), documents)
    for component in rules.get("components", []):
        documents = render(folder / component, documents)
    for patch in rules.get("patches", []):
        targets = [item for item in documents if _is_target(item, patch["target"])]
        assert targets, f"{name}: no {patch['target']}"
        for item in targets:
            _apply(yaml.safe_load(patch["patch"]), item)
    for labels in rules.get("labels", []):
        for item in documents:
            _label(item, labels["pairs"], labels.get("includeSelectors", False))
    for image in rules.get("images", []):
        old, new = image["name"], f"{image['newName']}:{image['newTag']}"
        _each_image(documents, lambda text, old=old, new=new: new if text == old else text)
    for rule in rules.get("replacements", []):
        _replace(rule, documents)
    return _add_suffix(documents, rules["nameSuffix"]) if "nameSuffix" in rules else documents


def _generate(generators: list[Document], documents: list[Document]) -> None:
    for rule in generators:
        data = dict(line.split("=", 1) for line in rule["literals"])
        maps = [item for item in documents if _is_target(item, {"kind": "ConfigMap", "name": rule["name"]})]
        assert bool(maps) == (rule.get("behavior") == "merge"), rule
        if maps:
            maps[0]["data"] |= data
        else:
            names = {"name": rule["name"]}
            documents.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": names, "data": data})


def _is_target(document: Document, target: dict[str, str]) -> bool:
    return document["kind"] == target["kind"] and target.get("name") in (None, document["metadata"]["name"])


def _apply(operations: list[Document], document: Document) -> None:
    """Apply a JSON patch."""
    for operation in operations:
        *parents, last = [part.replace("~1", "/") for part in operation["path"].split("/")[1:]]
        place: Any = document
        for part in parents:
            place = place[int(part)] if isinstance(place, list) else place[part]
        if isinstance(place, list):
            assert operation["op"] == "add" and last == "-", operation
            place.append(operation["value"])
        elif operation["op"] == "remove":
            del place[last]
        else:
            assert operation["op"] == "add" or last in place, f"nothing to replace: {operation}"
            place[last] = operation["value"]


def _replace(rule: Document, documents: list[Document]) -> None:
    (source,) = (item for item in documents if _is_target(item, rule["source"]))
    place, field = _find(source, rule["source"]["fieldPath"])
    for target in rule["targets"]:
        (item,) = (item for item in documents if _is_target(item, target["select"]))
        for path in target["fieldPaths"]:
            other, other_field = _find(item, path)
            assert other_field in other, f"nothing to replace: {path}"
            other[other_field] = place[field]


def _find(document: Document, path: str) -> tuple[Any, str]:
    """Return the parent of a field such as `spec.containers.[name=x].image`, and the name of the field."""
    *parents, last = path.split(".")
    place: Any = document
    for part in parents:
        if part.startswith("["):
            key, value = part[1:-1].split("=")
            (place,) = (child for child in place if child[key] == value)
        else:
            place = place[part]
    return place, last


def _label(document: Document, pairs: dict[str, str], with_selectors: bool) -> None:
    places = [("metadata", "labels")]
    if with_selectors and document["kind"] in _SELECTORS:
        places.append(_SELECTORS[document["kind"]])
    if with_selectors and document["kind"] == "Deployment":
        places.append(("spec", "template", "metadata", "labels"))
    for path in places:
        place = document
        for part in path:
            place = place.setdefault(part, {})
        place |= pairs


def _each_image(value: Any, change: Callable[[str], str]) -> None:
    for child in value.values() if isinstance(value, dict) else value:
        if isinstance(child, dict | list):
            _each_image(child, change)
    if isinstance(value, dict) and isinstance(value.get("image"), str):
        value["image"] = change(value["image"])


def _add_suffix(documents: list[Document], suffix: str) -> list[Document]:
    """Add a suffix to the names of all documents, and to the references of pods to them."""
    names = {(item["kind"], item["metadata"]["name"]) for item in documents}
    kinds = {
        "configMapRef": "ConfigMap",
        "secretRef": "Secret",
        "persistentVolumeClaim": "PersistentVolumeClaim",
    }

    def visit(value: Any) -> None:
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            if key in kinds:
                field = "claimName" if "claimName" in child else "name"
                child[field] += suffix if (kinds[str(key)], child[field]) in names else ""
            elif isinstance(child, dict | list):
                visit(child)

    for item in documents:
        item["metadata"]["name"] += suffix
        visit(item.get("spec", {}))
    return documents
