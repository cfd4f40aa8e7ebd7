"""Qwen-VL, GLM-V and PaddleOCR-VL: an image or a video as a grid of patches, with limited pixels."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.qwen import GridFacts
from quire.data.multimodal import Array, MediaItem
from quire.errors import RequestError
from quire.multimodal.images import check_frames, resized
from quire.multimodal.processors import Audio, Content, ProcessedItem, Video
from quire.multimodal.processors.grid import USUAL_FPS, PatchSpans, patches_of, sample_frames
from quire.multimodal.processors.grid_settings import GridSettings, read_settings
from quire.multimodal.processors.mrope import mrope_positions
from quire.text.tokenizer import Tokenizer

_TIMES: dict[str, Callable[[float, float], str]] = {
    "before": lambda first, last: f"<{(first + last) / 2:.1f} seconds>",
    "behind": lambda first, last: str(int(first)),
    "seconds": lambda first, last: f"{first:.1f} seconds",
}
"""Functions that format the time of a step (the frames of one patch) as text, by `GridFacts.times`. The
arguments are the times of the step's first and last frame in seconds."""
_MAX_SECONDS = 86400
"""Upper bound of the seconds between two steps (patches in time) of a video."""


class GridProcessor:
    """Processor of Qwen-VL, GLM-V and PaddleOCR-VL. It cuts images and videos into patches; for some models,
    the span of a video has frame times as text."""

    def __init__(self, path: Path, facts: MediaFacts, tokenizer: Tokenizer) -> None:
        self.modalities = facts.modalities
        self.tower: GridFacts = facts.tower
        self.width = self.tower.size_out * (1 + facts.levels)
        self.tokenizer = tokenizer
        self.settings = read_settings(path, facts)

    def marks(self, modality: str) -> list[int]:
        tower = self.tower
        if modality == "image":
            return [tower.image_id]
        return [tower.start_id, tower.video_id, tower.end_id] if tower.times == "before" else [tower.video_id]

    def text(self, modality: str, number: int) -> str:
        tower = self.tower
        ids = [tower.start_id, tower.image_id, tower.end_id]
        if modality == "video":
            ids = [tower.video_start_id, tower.video_id, tower.video_end_id]
        return "".join(token or "" for token in self.tokenizer.convert_ids_to_tokens(ids))

    def process(self, modality: str, content: Content, arguments: Mapping[str, Any]) -> ProcessedItem:
        assert not isinstance(content, Audio), "these models have no audio input"
        settings = self.settings[modality].with_arguments(arguments)
        if isinstance(content, Video):
            return self._process_video(content, settings)
        size = settings.size_of(content.height, content.width)
        pixels = patches_of(resized(content, size, settings.resample)[None], settings)
        grid = PatchSpans(*pixels.shape[:3])
        span = [self.tower.image_id] * grid.num_vectors(settings.merge)
        return _with_grid(ProcessedItem(span, arrays=settings.scaling.to_arrays(pixels=pixels)), grid)

    def num_vectors(self, video: Video, arguments: Mapping[str, Any]) -> int:
        settings = self.settings["video"].with_arguments(arguments)
        chosen, _, _ = sample_frames(video, settings, self.tower.times)
        height, width = self._frame_size(video, len(chosen), settings)
        patches = (height // settings.patch, width // settings.patch)
        return PatchSpans(-(-len(chosen) // settings.frames), *patches).num_vectors(settings.merge)

    def _frame_size(self, video: Video, count: int, settings: GridSettings) -> tuple[int, int]:
        """Return the height and width to which each of `count` frames is resized."""
        check_frames(count)
        height, width = video.frames.shape[1:3]
        return settings.size_of(height, width, num_frames=max(count, settings.frames))

    def _process_video(self, video: Video, settings: GridSettings) -> ProcessedItem:
        chosen, indices, fps = sample_frames(video, settings, self.tower.times)
        size = self._frame_size(video, len(chosen), settings)
        sized = [resized(Image.fromarray(video.frames[i]), size, settings.resample) for i in chosen]
        pixels = patches_of(np.stack(sized), settings)
        grid = PatchSpans(*pixels.shape[:3])
        total = video.total_frames or len(video.frames)
        rate = fps * len(indices) / total if fps else USUAL_FPS
        times = [index / (fps or USUAL_FPS) for index in indices]
        processed = self._video_span(grid, times, settings.frames / rate)
        processed.arrays = settings.scaling.to_arrays(pixels=pixels)
        return _with_grid(processed, grid)

    def _video_span(self, grid: PatchSpans, times: list[float], seconds: float) -> ProcessedItem:
        """Build the span of a video: one run of tokens or, for models that read timestamps, one run per step,
        next to its time. `times` are the seconds of the frames, `seconds` the length of a step."""
        tower, count = self.tower, grid.num_vectors(self.tower.merge)
        if not tower.times:
            processed = ProcessedItem([tower.video_id] * count)
            processed.facts["step"] = (tower.pace * seconds) if tower.pace else 1.0
            return processed
        processed, is_before = ProcessedItem([]), tower.times == "before"
        ids, frames, last = processed.token_ids, tower.frames, len(times) - 1
        token = tower.video_id if is_before else tower.image_id
        for step in range(grid.steps):
            text = _TIMES[tower.times](
                times[min(step * frames, last)], times[min((step + 1) * frames - 1, last)]
            )
            time = self.tokenizer.encode(text, add_special_tokens=False)
            ids += [*time, tower.start_id] if is_before else [tower.start_id]
            processed.runs.append((len(ids), count // grid.steps))
            ids += [token] * (count // grid.steps)
            ids += [tower.end_id] if is_before else [tower.end_id, *time]
        return processed

    def process_embeds(self, modality: str, embeds: Mapping[str, NDArray[Any]]) -> ProcessedItem:
        vectors, key = embeds["embeds"], f"{modality}_grid_thw"
        if key not in embeds:
            raise RequestError(f"{modality}_embeds need {key}: steps, height and width in patches", key)
        numbers, merge = np.asarray(embeds[key]).reshape(-1)[:4].tolist(), self.tower.merge
        units = zip(numbers, (1, merge, merge), strict=False)
        if len(numbers) != 3 or not all(number >= 1 and number % unit == 0 for number, unit in units):
            raise RequestError(
                f"{key} is {numbers}, expected [steps, height, width] in patches, with height and width that "
                f"are multiples of {merge}",
                key,
            )
        grid = PatchSpans(*map(int, numbers))
        expected = (grid.num_vectors(merge), self.width)
        if vectors.shape != expected:
            raise RequestError(
                f"{modality}_embeds have the shape {vectors.shape}, expected {expected} for {key} {numbers}",
                f"{modality}_embeds",
            )
        if modality == "image":
            return _with_grid(ProcessedItem([self.tower.image_id] * len(vectors)), grid, embeds=vectors)
        step_seconds = np.asarray(embeds.get("second_per_grid_ts", self.tower.frames / USUAL_FPS))
        if step_seconds.size != 1 or not 0 < step_seconds.item() < _MAX_SECONDS:
            raise RequestError("second_per_grid_ts must be a number of seconds", "second_per_grid_ts")
        seconds = float(step_seconds.item())
        times = [seconds * i / self.tower.frames for i in range(grid.steps * self.tower.frames)]
        return _with_grid(self._video_span(grid, times, seconds), grid, embeds=vectors)

    def max_vectors(self, modality: str) -> int:
        return self.settings[modality].max_vectors()

    def largest(self, modality: str) -> tuple[int, ...]:
        settings = self.settings[modality]
        frames = settings.max_frames if modality == "video" else 0
        steps = -(-frames // settings.frames) or 1
        if frames and settings.counts_frames:  # all pixels in the fewest frames
            frames = max(settings.frames, settings.min_frames)
            steps = -(-frames // settings.frames)
        per_step = max(1, settings.max_vectors() // steps)
        rows = math.isqrt(per_step)
        size = (per_step // rows * settings.unit, rows * settings.unit)
        return (frames, *size) if frames else size

    def positions(
        self, token_ids: Sequence[int], items: Sequence[MediaItem], facts: Sequence[Mapping[str, Any]]
    ) -> Array | None:
        if not items:
            return None
        return Array.of(mrope_positions(len(token_ids), items, facts, self.tower.merge))


class PlainGridProcessor(GridProcessor):
    """Processor of EXAONE 4.5, HyperCLOVA X and LFM3-VL, whose decoders have plain positions."""

    def positions(
        self, token_ids: Sequence[int], items: Sequence[MediaItem], facts: Sequence[Mapping[str, Any]]
    ) -> Array | None:
        return None


def _with_grid(processed: ProcessedItem, grid: PatchSpans, **arrays: NDArray[Any]) -> ProcessedItem:
    processed.facts["grid"] = list(grid)
    if arrays:
        processed.arrays = {name: Array.of(numbers) for name, numbers in arrays.items()}
    return processed
