"""Without a GPU the kernels run in Triton's interpreter, to be asked for before triton is imported."""

import os
from pathlib import Path

if not Path("/proc/driver/nvidia").exists():
    os.environ["TRITON_INTERPRET"] = "1"
