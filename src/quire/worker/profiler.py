"""Recorder: what torch does between two moments, as a trace on disk."""

import time
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from quire.config.profiling import Profiling
from quire.errors import RequestError
from quire.logs import get_logger

log = get_logger(__name__)


class TorchProfiler:
    """One recording at a time, of the thread that starts it and of the device."""

    def __init__(self, profiling: Profiling, name: str, *, on_gpu: bool) -> None:
        self._profiling = profiling
        self._name = name
        self._activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_gpu]
        self._running: profile | None = None
        self._prefix = ""

    def start(self, prefix: str | None = None) -> None:
        if self._running is not None:
            raise RequestError("a profile is being recorded already: stop it first")
        asked, self._prefix = self._profiling, prefix or self._name
        self._running = profile(
            activities=self._activities,
            with_stack=asked.torch_profiler_with_stack,
            record_shapes=asked.torch_profiler_record_shapes,
            profile_memory=asked.torch_profiler_with_memory,
            with_flops=asked.torch_profiler_with_flops,
        )
        self._running.start()

    def stop(self) -> Path:
        """The trace."""
        if self._running is None:
            raise RequestError("no profile is being recorded: start one first")
        running, self._running = self._running, None
        running.stop()
        folder = Path(self._profiling.torch_profiler_dir)
        folder.mkdir(parents=True, exist_ok=True)
        end = ".gz" if self._profiling.torch_profiler_use_gzip else ""
        file = folder / f"{self._prefix}.{time.time_ns() // 1_000_000}.pt.trace.json{end}"
        running.export_chrome_trace(str(file))
        log.info("The profile is in %s", file)
        return file
