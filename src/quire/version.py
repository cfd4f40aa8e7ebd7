"""The versions of Quire and of the vLLM interface that it has."""

__version__ = "0.1.0"
VLLM_VERSION = "0.24.0"
"""Flags, fields, metrics and Python names follow this release of vLLM; scripts see it as
`vllm.__version__`."""
VLLM_VERSION_TUPLE = tuple(int(part) for part in VLLM_VERSION.split("."))
