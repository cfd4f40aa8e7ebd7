"""The metadata of the package `vllm`, as the import hook of `vllm_shim` provides it."""

from importlib.metadata import Distribution
from os import PathLike
from typing import Any

from quire.version import VLLM_VERSION


class VllmDistribution(Distribution):
    """A distribution with a name and a version, and without files."""

    def read_text(self, filename: str) -> str | None:
        if filename != "METADATA":
            return None
        return f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_VERSION}\n"

    def locate_file(self, path: str | PathLike[str]) -> Any:
        raise FileNotFoundError(f"{path}: the names of vllm are Quire's, and have no files")
