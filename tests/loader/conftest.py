"""Makes the shared helpers of tests/models importable from here."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "models"))
