"""Desk: what API processes ask of a core beside requests, each answered when it is done."""

import threading
from collections.abc import Callable, Generator
from typing import Any

import msgspec

from quire.core.control import Operator, Work
from quire.core.engine_core import EngineCore
from quire.data.lora import LoRARequest
from quire.data.plan import FinishReason
from quire.data.wire import ControlCall, Reply
from quire.errors import EngineDead, RequestError
from quire.logs import get_logger
from quire.sched.mm_receiver_cache import ReceiverCache

log = get_logger(__name__)


class RpcJob:
    """Work of the workers, in a thread: the core stays able to speak."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self._value: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="quire-job", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value = self._work()
        except BaseException as error:  # raised by who waits for it
            self._error = error

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._value


class CoreRpc:
    """Questions in the order in which they came. Those that take the workers' time come one after the other,
    and no step is taken meanwhile."""

    def __init__(
        self,
        core: EngineCore,
        send: Callable[[bytes, Reply], None],
        end: Callable[[dict[str, FinishReason]], None],
        receiver_cache: ReceiverCache,
    ) -> None:
        """`send` answers a client, `end` tells those whose requests were ended."""
        self.operator = Operator(core)
        self._core = core
        self._send = send
        self._end = end
        self._job: RpcJob | None = None
        self._open: list[tuple[bytes, int, Work]] = []
        self._answers: dict[str, Callable[..., Any]] = {
            "reset_prefix_cache": core.reset_prefix_cache,
            "reset_encoder_cache": core.scheduler.media.reset,
            "reset_mm_cache": receiver_cache.clear,
            "reset_running": self.operator.reset_running,
            "block_map": core.block_map,
            "sleep_level": lambda: core.gate.level,
            "settled_level": lambda: core.gate.settled_level,
            "is_paused": lambda: self.operator.is_at_rest,
            "resume": self.operator.resume,
            "abort": self._abort,
            "pause": self._pause,
            "sleep": self.operator.sleep,
            "wake_up": self.operator.wake_up,
            "warm_up": self.operator.warm_up,
            "collective_rpc": self.operator.collective_rpc,
            "profile": self.operator.profile,
            "add_adapter": self._add_adapter,
            "remove_adapter": self.operator.remove_adapter,
            "list_adapters": lambda: core.scheduler.adapters.names,
        }

    @property
    def is_busy(self) -> bool:
        """Whether the workers do something that is no step."""
        return self._job is not None

    @property
    def has_questions(self) -> bool:
        return bool(self._open)

    def ask(self, client: bytes, call: ControlCall) -> None:
        self._open.append((client, call.number, self._work(call)))
        self.turn()

    def turn(self) -> None:
        """Go on with all of them; answer those that are done."""
        for question in list(self._open):
            client, number, work = question
            try:
                next(work)
                continue
            except StopIteration as done:
                reply = Reply(number, done.value)
            except EngineDead:
                raise
            except Exception as error:
                reply = _refusal(number, error)
            self._open.remove(question)
            self._send(client, _sendable(reply))

    def _work(self, call: ControlCall) -> Work:
        """The answer, of work that the workers do in a thread."""
        answer = self._answers[call.method](**call.args)
        if not isinstance(answer, Generator):
            return answer
        while self._job is not None:  # it finds the core as that leaves it
            yield None
        try:
            asked = next(answer)
            while True:
                if asked is None:
                    yield None
                    asked = next(answer)
                else:
                    asked = answer.send((yield from self._by_workers(asked)))
        except StopIteration as end:
            return end.value

    def _abort(self, names: list[str]) -> int:
        ended = self.operator.abort(names)
        self._end(ended)
        return len(ended)

    def _add_adapter(self, lora: dict[str, Any]) -> Work:
        return self.operator.add_adapter(msgspec.convert(lora, LoRARequest))

    def _pause(self, mode: str, clear_cache: bool = False) -> Work:
        self._end(self.operator.pause(mode))
        while not self.operator.is_at_rest:
            if self._core.gate.is_open:
                raise RequestError("somebody has resumed the engine before it came to rest")
            yield None
        if clear_cache:
            self._core.reset_prefix_cache()

    def _by_workers(self, asked: Callable[[], Any]) -> Work:
        while self._job is not None:
            yield None
        job = self._job = RpcJob(asked)
        try:
            while not job.is_over:
                yield None
        finally:
            self._job = None
        return job.result()


def _refusal(number: int, error: Exception) -> Reply:
    said = str(error).encode(errors="backslashreplace").decode()  # what cannot be encoded would end the core
    if isinstance(error, RequestError | TypeError | ValueError):
        return Reply(number, error=said, is_request=True, param=getattr(error, "param", None))
    log.error("A call failed", exc_info=error)
    return Reply(number, error=said or type(error).__name__)


def _sendable(reply: Reply) -> Reply:
    """What workers return need not be."""
    try:
        msgspec.msgpack.encode(reply.value)
    except Exception as error:
        text = f"what was returned cannot be sent: {error}"
        return Reply(reply.number, error=text, is_request=True)
    return reply
