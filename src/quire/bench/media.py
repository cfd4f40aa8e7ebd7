"""Random images and videos for benchmarks, as parts of chat messages."""

import base64
import io
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image

from quire.errors import ConfigError

Bucket = tuple[int, int, int]
"""Size of a random image or video: (height, width, number of frames), 1 frame for an image, more for a
video."""
BUCKETS: dict[Bucket, float] = {(256, 256, 1): 0.5, (720, 1280, 1): 0.5, (720, 1280, 16): 0.0}
LIMITS = {"image": 255, "video": 1}


def modality(bucket: Bucket) -> str:
    return "image" if bucket[2] == 1 else "video"


def random_media(
    count: int,
    *,
    num_items: int,
    range_ratio: float,
    limits: Mapping[str, int],
    buckets: Mapping[Bucket, float],
    seed: int = 0,
) -> list[list[dict[str, Any]]]:
    """Return the media parts of `count` chat requests. A request has `num_items` parts, varied evenly by
    the share `range_ratio`, and at most `limits[modality]` of a modality. `buckets` maps each size
    (height, width, frames) to the weight with which it is drawn."""
    draw = np.random.default_rng(seed)
    least, most = _range(num_items, range_ratio, sum(limits.values()))
    counts = [int(draw.integers(least, most + 1)) for _ in range(count)]
    return [
        [_random_part(bucket, draw) for bucket in _choose_buckets(num_chosen, limits, buckets, draw)]
        for num_chosen in counts
    ]


def _range(num_items: int, ratio: float, limit: int) -> tuple[int, int]:
    if num_items < 0 or not 0 <= ratio <= 1:
        raise ConfigError(
            f"--random-mm-base-items-per-request {num_items} must be at least 0, and "
            f"--random-mm-num-mm-items-range-ratio {ratio} from 0 to 1"
        )
    least, most = math.floor(num_items * (1 - ratio)), min(math.ceil(num_items * (1 + ratio)), limit)
    if least > most:
        raise ConfigError(
            f"requests have at least {least} items, but --random-mm-limit-mm-per-prompt allows {limit}"
        )
    return least, most


def _choose_buckets(
    count: int, limits: Mapping[str, int], buckets: Mapping[Bucket, float], draw: np.random.Generator
) -> list[Bucket]:
    left, chosen = dict(limits), list[Bucket]()
    while len(chosen) < count:
        available = [
            bucket for bucket, weight in buckets.items() if weight > 0 and left.get(modality(bucket), 0)
        ]
        if not available:
            break
        weights = np.array([buckets[bucket] for bucket in available])
        chosen.append(available[int(draw.choice(len(available), p=weights / weights.sum()))])
        left[modality(chosen[-1])] -= 1
    return chosen


def _random_part(bucket: Bucket, draw: np.random.Generator) -> dict[str, Any]:
    """Return an image or video of random noise, so that no two are equal and none compresses well."""
    height, width, num_frames = bucket
    frames = (draw.integers(0, 256, (height, width, 3), np.uint8) for _ in range(num_frames))
    kind = modality(bucket)
    url = f"data:{kind}/jpeg;base64," + ",".join(_jpeg(frame) for frame in frames)
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


def _jpeg(pixels: np.ndarray) -> str:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG")
    return base64.b64encode(file.getvalue()).decode()
