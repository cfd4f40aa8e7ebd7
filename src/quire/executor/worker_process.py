"""A rank: one worker in its own process."""

import os
import pickle
import queue
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Protocol

from quire.config.engine import EngineConfig
from quire.config.expert_parallel import steps_together
from quire.config.parallel import Rank
from quire.config.plugins import load_plugins
from quire.config.sections import ParallelSection
from quire.data.codec import Outcome, decode_masks, decode_plan, encode_outcome
from quire.data.step_plan import Masks, Pending, StepPlan
from quire.errors import EngineDead, QuireError, RequestError, one_line
from quire.executor import FailedStep
from quire.executor.lora_loading import AdapterReading
from quire.executor.messages import (
    NUM_LOADERS,
    RUNNING,
    Failed,
    FromRank,
    Order,
    PhaseDone,
    PhaseProgress,
    Returned,
    WorkerCall,
    decode_call,
    decode_order,
    encode,
)
from quire.executor.rpc import invoke
from quire.kernels.compile_processes import compile_processes
from quire.logs import get_logger
from quire.system.platform import free_memory, hardware_threads
from quire.system.process import adopt
from quire.system.shm import SPIN_S, ShmReader, ShmWriter

log = get_logger(__name__)

STEPS_IN_FLIGHT = 2
"""Steps in flight on a GPU, or one per pipeline stage if that is more; buffers are made for this number."""
_LONG_S = 3600.0
_MAX_COMPILERS = 16
_COMPILER_BYTES = 2**30
"""Free host memory for each process that compiles kernels."""
_CUT_OFF = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out", "timeout")
"""Parts of error messages that only mean the loss of another rank."""


@dataclass(frozen=True, slots=True)
class RankAddress:
    """The rank, device and rendezvous of a worker process."""

    config: EngineConfig
    rank: Rank
    local: int
    """Index of the rank's device on the machine."""
    init_method: str
    """Rendezvous URL of all ranks."""
    interface: str = ""
    """Network interface of Gloo between the ranks; empty for its default."""

    @property
    def name(self) -> str:
        """Return the process name, like vLLM: dimensions of size 1 are omitted."""
        parallel, rank = self.config.parallel, self.rank
        parts = (
            ("DP", rank.dp, parallel.data_parallel_size),
            ("PP", rank.pp, parallel.pipeline_parallel_size),
            ("TP", rank.tp, parallel.tensor_parallel_size),
        )
        return "_".join(["Worker", *(f"{word}{number}" for word, number, size in parts if size > 1)])

    @property
    def sends_results(self) -> bool:
        """Whether this rank sends the results of steps."""
        return self.rank.tp == 0 and self.rank.pp == self.config.parallel.pipeline_parallel_size - 1


def world_size(parallel: ParallelSection) -> int:
    return parallel.tensor_parallel_size * parallel.pipeline_parallel_size


def local_ranks(
    config: EngineConfig, node_rank: int, init_method: str, interface: str = ""
) -> list[RankAddress]:
    """Return the ranks of one machine, which are consecutive."""
    parallel = config.parallel
    size, dp = world_size(parallel), parallel.data_parallel_rank or 0
    count = size // parallel.nnodes
    first = dp * size + node_rank * count
    ranks = [Rank.of(first + local, parallel) for local in range(count)]
    return [RankAddress(config, rank, local, init_method, interface) for local, rank in enumerate(ranks)]


class Port(Protocol):
    """The connection of a rank to its executor."""

    def order(self) -> Order:
        """Wait for the next order, and return it."""

    def report(self, message: FromRank) -> None: ...

    def plan(self) -> bytes:
        """Wait for the next encoded plan, worker call, or masks of the last plan, and return it."""

    def answer(self, outcome: bytes) -> None: ...


def serve(place: RankAddress, port: Port) -> None:
    """Run a rank until the process ends; return only after an error."""
    try:
        load_plugins(place.config.broken_plugins)
        with compile_processes(num_compilers(place.config)):
            worker = _start(place, port)
    except QuireError as error:
        port.report(Failed(str(error)))
        return
    except Exception as error:
        if is_cause := not is_cut_off(error):
            log.exception("%s cannot start", place.name)
        port.report(Failed(one_line(error), is_cause))
        return
    if place.config.lora.enable_lora or place.config.cache.has_tiers:
        args = worker, port
        threading.Thread(target=_run_background, args=args, name="quire-background", daemon=True).start()
    port.report(PhaseDone())
    Steps(worker, place, port).run()


def _start(place: RankAddress, port: Port) -> Any:
    """Run all phases of the worker's start, as the executor orders them, and return the worker."""
    worker = _join(place, port)
    phases: dict[str, Callable[[Order], Any]] = {
        "load": lambda order: worker.load(lambda share: port.report(PhaseProgress("loading", share))),
        "measure": lambda order: worker.measure(),
        "allocate": lambda order: worker.allocate(order.size),
        "warm_up": lambda order: worker.warm_up(),
    }
    while (order := port.order()).phase != "run":
        port.report(PhaseProgress(RUNNING[order.phase]))
        result = phases[order.phase](order)
        port.report(PhaseDone(result if order.phase == "measure" else None))
    return worker


def num_compilers(config: EngineConfig) -> int:
    """Return how many processes compile kernels for a rank, by its share of cores and memory; 0 on a CPU."""
    if config.machine.device == "cpu":
        return 0
    parallel = config.parallel
    num_engines = parallel.data_parallel_size_local or parallel.data_parallel_size
    num_ranks = max(world_size(parallel) // parallel.nnodes, 1) * num_engines
    room = free_memory() // _COMPILER_BYTES
    return min(_MAX_COMPILERS, hardware_threads() // num_ranks - 1, room // num_ranks)


def _run_background(worker: Any, port: Port) -> None:
    """Handle the orders that come while steps run: adapters, and KV cache blocks to load."""
    reading = AdapterReading(worker)
    loading = ThreadPoolExecutor(NUM_LOADERS, "quire-kv-load")
    reads = ThreadPoolExecutor(1, "quire-kv-read")  # apart: loads wait for reads of other engines
    while True:
        order = port.order()
        if order.phase == "load":
            load = loading.submit(worker.load_blocks, order.load)
            load.add_done_callback(partial(_send_result, port, order.number))
            continue
        if order.phase == "read":
            read = reads.submit(worker.read_blocks, order.read)
            read.add_done_callback(partial(_send_result, port, order.number))
            continue
        if order.phase == "drop":
            reading.drop(order.name)
            continue
        assert order.adapter is not None
        reading.fetch(order.adapter).add_done_callback(partial(_send_result, port, order.number))


def _send_result(port: Port, number: int, read: Future[Any]) -> None:
    error = read.exception()
    if isinstance(error, Exception):
        port.report(refusal(number, error))
    else:
        port.report(Returned(number, read.result()))


def refusal(number: int, error: Exception) -> Returned:
    """Return the message that the call or background work with this number has failed."""
    is_request = isinstance(error, RequestError | TypeError | ValueError)
    text = str(error) if isinstance(error, QuireError) else one_line(error)
    return Returned(number, error=text, is_request=is_request)


def _join(place: RankAddress, port: Port) -> Any:
    """Build the worker after this rank has joined the process group of all ranks, and return it."""
    port.report(PhaseProgress("starting"))
    config, parallel = place.config, place.config.parallel
    import torch

    from quire.parallel.world import World, join
    from quire.worker.vllm_worker import open_worker

    device = torch.device(config.machine.device)
    if device.type == "cuda":
        device = torch.device("cuda", place.local % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if world_size(parallel) == 1 and not steps_together(parallel):
        return open_worker(config, World(place.rank), place.local)
    if place.interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", place.interface)
    port.report(PhaseProgress("waiting for the other ranks"))
    timeout_s, ordered = parallel.distributed_timeout_seconds, config.model.batch_invariant
    world = join(parallel, place.rank, place.init_method, device, timeout_s, ordered=ordered)
    return open_worker(config, world, place.local)


def is_cut_off(error: BaseException) -> bool:
    """Whether the error only means that another rank is gone, and is not the cause of a failure."""
    return any(sign in str(error) for sign in _CUT_OFF)


class Steps:
    """Runs plans on a worker, in order. On a GPU a second thread waits for their results."""

    def __init__(self, worker: Any, place: RankAddress, port: Port) -> None:
        self.worker = worker
        self.place = place
        self.port = port
        self._rows = threading.Lock()
        """Held while the state of requests in the worker is read or written."""
        self._in_flight = threading.Semaphore(
            max(STEPS_IN_FLIGHT, place.config.parallel.pipeline_parallel_size)
        )
        self._launched: queue.SimpleQueue[tuple[int, Pending]] = queue.SimpleQueue()

    def run(self) -> None:
        """Run plans and calls until the process ends."""
        waits = self.place.config.machine.device != "cpu"
        if waits:
            import torch

            device = torch.cuda.current_device()
            threading.Thread(target=self._finish_all, args=(device,), name="quire-done", daemon=True).start()
        while True:
            data = self.port.plan()
            if (call := decode_call(data)) is not None:
                self.port.report(self._call(call))
                continue
            plan = decode_plan(data)
            if waits:
                self._in_flight.acquire()
            pending = self._launch(plan)
            if len(plan.constrained):
                pending = self._sample_tokens(pending, decode_masks(self.port.plan()))
            if waits:
                self._launched.put((plan.step, pending))
            else:
                self._finish(plan.step, pending)

    def _launch(self, plan: StepPlan) -> Pending:
        try:
            with self._rows:
                launched: Pending = self.worker.submit(plan)
                return launched
        except Exception as error:
            return FailedStep(error)

    def _call(self, call: WorkerCall) -> Returned:
        """Call a worker method; after an error the rank continues."""
        try:
            with self._rows:
                value = invoke(self.worker, call.packed or call.method, call.args, call.kwargs)
        except Exception as error:
            refused = refusal(call.number, error)
            if not refused.is_request:
                log.error("The worker method %r failed", call.method, exc_info=error)
            return refused
        try:
            encode(value)
        except Exception as error:
            text = f"{call.method} returned a value that cannot be sent: {one_line(error)}"
            return Returned(call.number, error=text, is_request=True)
        return Returned(call.number, value)

    def _sample_tokens(self, pending: Pending, masks: Masks) -> Pending:
        try:
            with self._rows:
                if not isinstance(pending, FailedStep):
                    self.worker.sample_tokens(masks)
                return pending
        except Exception as error:
            return FailedStep(error)

    def _finish_all(self, device: int) -> None:
        import torch

        torch.cuda.set_device(device)  # the current device is per thread
        while True:
            self._finish(*self._launched.get())
            self._in_flight.release()

    def _finish(self, step: int, pending: Pending) -> None:
        try:
            pending.ready(_LONG_S)
            with self._rows:
                result = pending.wait()
        except Exception as error:
            if self.place.rank.tp == 0 and not is_cut_off(error):  # the other ranks would log the same
                log.error(
                    "Step %d failed in this worker process; the engine core looks for the cause",
                    step,
                    exc_info=error,
                )
            is_fatal = isinstance(error, EngineDead)
            self.port.report(Failed(one_line(error), step=step, is_fatal=is_fatal))
            if self.place.sends_results:
                self.port.answer(encode_outcome(Outcome(step, error=one_line(error))))
        else:
            if self.place.sends_results:
                self.port.answer(encode_outcome(Outcome(step, result)))


# ---- as a child of the executor


class PipePort:
    """Connection of a child process: a pipe for orders, shared-memory rings for plans and results. The
    process ends when the pipe is closed."""

    def __init__(self, pipe: Connection, plans: ShmReader, outcomes: ShmWriter | None) -> None:
        self._pipe = pipe
        self._plans = plans
        self._outcomes = outcomes
        self._lock = threading.Lock()
        self._orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name="quire-orders", daemon=True).start()

    def _listen(self) -> None:
        try:
            while True:
                self._orders.put(decode_order(self._pipe.recv_bytes()))
        except (EOFError, OSError):
            os._exit(0)

    def order(self) -> Order:
        return self._orders.get()

    def report(self, message: FromRank) -> None:
        with self._lock:
            try:
                self._pipe.send_bytes(encode(message))
            except BrokenPipeError:  # the parent has ended, and `_listen` is about to notice it
                os._exit(0)

    def plan(self) -> bytes:
        while (data := self._plans.receive(_LONG_S)) is None:
            pass
        return data

    def answer(self, outcome: bytes) -> None:
        assert self._outcomes is not None
        self._outcomes.send(outcome, _LONG_S)


def main() -> None:
    """Run a worker process. Arguments: file descriptors of the pipe to the parent and of the shared-memory
    rings of plans and outcomes, and the reader index in the ring of plans."""
    pipe_fd, plans_fd, outcomes_fd, reader = map(int, sys.argv[1:])
    pipe = Connection(pipe_fd)
    try:
        place: RankAddress = pickle.loads(pipe.recv_bytes())  # trusted: the parent created the pipe
    except EOFError:
        sys.exit(1)
    adopt(place.name)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the rank ends with its parent, which may have work left
    is_cpu = place.config.machine.device == "cpu"
    plans = ShmReader(plans_fd, reader, spin_s=0.0 if is_cpu else SPIN_S)
    serve(place, PipePort(pipe, plans, ShmWriter(outcomes_fd) if place.sends_results else None))
    sys.exit(1)
