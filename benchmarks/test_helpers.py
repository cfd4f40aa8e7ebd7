"""Importing this module puts the folders of test helpers on the import path, for benchmarks that use them."""

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"
sys.path += [
    str(TESTS / name)
    for name in ("engine", "kernels", "worker/cuda", "e2e", "frontend", "multimodal", "models")
]
