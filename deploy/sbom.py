"""What Quire is made of, as CycloneDX: it and all that it needs, as they are installed here."""

import json
import re
import sys
import uuid
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

NOTICE = Path(__file__).parents[1] / "NOTICE"


def needed(name: str, found: dict[str, metadata.Distribution]) -> dict[str, metadata.Distribution]:
    """A distribution and, without extras, all that it needs."""
    key = re.sub(r"[-_.]+", "-", name).lower()
    if key in found:
        return found
    try:
        found[key] = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return found
    for line in found[key].requires or ():
        if "extra ==" not in line:
            needed(re.split(r"[\s;<>=!~\[(]", line, maxsplit=1)[0], found)
    return found


def component(distribution: metadata.Distribution) -> dict[str, Any]:
    name, version = distribution.metadata["Name"], distribution.version
    licence = licence_of(distribution.metadata)
    named = {"licenses": [{"license": {"name": licence}}]} if licence else {}
    purl = f"pkg:pypi/{name.lower()}@{version.split('+')[0]}"
    return {"type": "library", "name": name, "version": version, "purl": purl, "bom-ref": purl, **named}


def licence_of(about: metadata.PackageMetadata) -> str:
    """As an expression, in words, or by the classifiers."""
    said = (about.get("License-Expression") or about.get("License") or "").strip()
    if said:
        return said.splitlines()[0][:80]
    kinds = [each for each in about.get_all("Classifier") or () if each.startswith("License :: ")]
    return ", ".join(each.rpartition(" :: ")[2] for each in kinds)


def noticed() -> list[dict[str, Any]]:
    """What NOTICE speaks of: files with words of others, and the model that is fetched."""
    lines = re.findall(
        r"^- (\S+): (.+)\. Licence: (\S+)\.$", NOTICE.read_text(encoding="utf-8"), re.MULTILINE
    )
    return [
        {
            "type": "machine-learning-model" if name.endswith(".gguf") else "file",
            "name": name,
            "description": text,
            "bom-ref": name,
            "licenses": [{"license": {"id": licence}}],
        }
        for name, text, licence in lines
    ]


def bill() -> dict[str, Any]:
    found = needed("quire", {})
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid4()}",
        "version": 1,
        "metadata": {
            "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
            "component": component(found.pop("quire")) | {"type": "application"},
        },
        "components": [*(component(each) for _, each in sorted(found.items())), *noticed()],
    }


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(bill(), indent=1) + "\n", encoding="utf-8")
