"""`quire.vllm`: a short name of `quire.entrypoints.vllm_shim`, for `python -m quire.vllm SCRIPT`."""

import sys

from quire.entrypoints.vllm_shim import executed, install, main

__all__ = ["executed", "install", "main"]

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
