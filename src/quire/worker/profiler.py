"""The torch profiler: records a trace to disk between start and stop."""

import time
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from quire.config.profiling import Profiling
from quire.errors import RequestError
from quire.logs import get_logger

log = get_logger(__name__)


class TorchProfiler:
    """Records one profile at a time, of the calling thread and the device."""

    def __init__(self, profiling: Profiling, name: str, *, on_gpu: bool) -> None:
        self._profiling = profiling
        self._name = name
        self._activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_gpu]
        self._running: profile | None = None
        self._prefix = ""

    def start(self, prefix: str | None = None) -> None:
        if self._running is not None:
            raise RequestError("a profile is being recorded already: stop it first")
        config, self._prefix = self._profiling, prefix or self._name
        self._running = profile(
            activities=self._activities,
            with_stack=config.torch_profiler_with_stack,
            record_shapes=config.torch_profiler_record_shapes,
            profile_memory=config.torch_profiler_with_memory,
            with_flops=config.torch_profiler_with_flops,
        )
        self._running.start()

    def stop(self) -> Path:
        if self._running is None:
            raise RequestError("no profile is being recorded: start one first")
        running, self._running = self._running, None
        running.stop()
        folder = Path(self._profiling.torch_profiler_dir)
        folder.mkdir(parents=True, exist_ok=True)
        end = ".gz" if self._profiling.torch_profiler_use_gzip else ""
        file = folder / f"{self._prefix}.{time.time_ns() // 1_000_000}.pt.trace.json{end}"
        running.export_chrome_trace(str(file))
        log.info("Profile written to %s", file)
        return file
