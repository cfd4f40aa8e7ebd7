"""`quire.vllm`: a short name of `quire.entrypoints.vllm_shim`, for `python -m quire.vllm SCRIPT`."""

import sys

from quire.entrypoints.vllm_shim import install, main, run_script

__all__ = ["install", "main", "run_script"]

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
