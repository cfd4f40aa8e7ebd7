"""Random images and videos to measure with, as parts of chat messages."""

import base64
import io
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image

from quire.errors import ConfigError

Bucket = tuple[int, int, int]
"""Height, width and frames: with one frame an image, with more a video."""
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
    """The items of `count` requests: each of a bucket as likely as its weight says, and at most `limits` of a
    modality. Their number varies by `range_ratio` around `num_items`."""
    draw = np.random.default_rng(seed)
    least, most = _range(num_items, range_ratio, sum(limits.values()))
    counts = [int(draw.integers(least, most + 1)) for _ in range(count)]
    return [[_part(bucket, draw) for bucket in _chosen(each, limits, buckets, draw)] for each in counts]


def _range(num_items: int, ratio: float, limit: int) -> tuple[int, int]:
    if num_items < 0 or not 0 <= ratio <= 1:
        raise ConfigError(
            f"--random-mm-base-items-per-request {num_items} must be at least 0, and "
            f"--random-mm-num-mm-items-range-ratio {ratio} from 0 to 1"
        )
    least, most = math.floor(num_items * (1 - ratio)), min(math.ceil(num_items * (1 + ratio)), limit)
    if least > most:
        raise ConfigError(
            f"requests are to have at least {least} items, but --random-mm-limit-mm-per-prompt allows {limit}"
        )
    return least, most


def _chosen(
    count: int, limits: Mapping[str, int], buckets: Mapping[Bucket, float], draw: np.random.Generator
) -> list[Bucket]:
    left, chosen = dict(limits), list[Bucket]()
    while len(chosen) < count:
        open_ones = [each for each, weight in buckets.items() if weight > 0 and left.get(modality(each), 0)]
        if not open_ones:
            break
        weights = np.array([buckets[each] for each in open_ones])
        chosen.append(open_ones[int(draw.choice(len(open_ones), p=weights / weights.sum()))])
        left[modality(chosen[-1])] -= 1
    return chosen


def _part(bucket: Bucket, draw: np.random.Generator) -> dict[str, Any]:
    """Noise, so that no two items are the same and none is small for its size."""
    height, width, num_frames = bucket
    frames = (draw.integers(0, 256, (height, width, 3), np.uint8) for _ in range(num_frames))
    kind = modality(bucket)
    url = f"data:{kind}/jpeg;base64," + ",".join(_jpeg(frame) for frame in frames)
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


def _jpeg(pixels: np.ndarray) -> str:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG")
    return base64.b64encode(file.getvalue()).decode()
