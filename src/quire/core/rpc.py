"""Control calls of API server processes to a core; each call is answered when it is done."""

import threading
from collections.abc import Callable, Generator
from typing import Any

import msgspec

from quire.core.control import Operator, Work
from quire.core.engine_core import EngineCore
from quire.data.step_plan import FinishReason
from quire.data.wire import ControlCall, Reply
from quire.errors import EngineDead, RequestError
from quire.logs import get_logger
from quire.sched.mm_receiver_cache import ReceiverCache

log = get_logger(__name__)


class RpcJob:
    """A function that calls the workers and runs in a new thread, so that the core's main loop stays
    responsive."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self._value: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="quire-job", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value = self._work()
        except BaseException as error:  # raised again by result()
            self._error = error

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._value


class CoreRpc:
    """Runs control calls in order of arrival. Calls that occupy the workers run one at a time, and no step
    runs meanwhile."""

    def __init__(
        self,
        core: EngineCore,
        send: Callable[[bytes, Reply], None],
        end: Callable[[dict[str, FinishReason]], None],
        receiver_cache: ReceiverCache,
    ) -> None:
        """Set the callbacks: `send` answers a client, `end` notifies the clients of aborted requests."""
        self._calls = Operator(core, end, receiver_cache.clear).calls
        self._send = send
        self._job: RpcJob | None = None
        self._open_calls: list[tuple[bytes, ControlCall, Work]] = []

    @property
    def is_busy(self) -> bool:
        """Whether the workers run something other than a step."""
        return self._job is not None

    @property
    def has_calls(self) -> bool:
        return bool(self._open_calls)

    def submit(self, client: bytes, call: ControlCall) -> None:
        self._open_calls.append((client, call, self._work(call)))
        self.turn()

    def turn(self) -> None:
        """Continue each open control call until it waits for something, and answer the calls that are
        done."""
        for entry in list(self._open_calls):
            client, call, work = entry
            try:
                next(work)
                continue
            except StopIteration as done:
                reply = Reply(call.number, done.value)
            except EngineDead:
                raise
            except Exception as error:
                reply = _error_reply(call, error)
            self._open_calls.remove(entry)
            self._send(client, _check_encodable(reply))

    def _work(self, call: ControlCall) -> Work:
        """Run a control call and return its result. The functions that it yields for the workers run in a
        thread."""
        result = self._calls[call.method](**call.args)
        if not isinstance(result, Generator):
            return result
        while self._job is not None:  # it runs after the current job
            yield None
        try:
            job = next(result)
            while True:
                if job is None:
                    yield None
                    job = next(result)
                else:
                    job = result.send((yield from self._run_job(job)))
        except StopIteration as end:
            return end.value

    def _run_job(self, work: Callable[[], Any]) -> Work:
        while self._job is not None:
            yield None
        job = self._job = RpcJob(work)
        try:
            while not job.is_over:
                yield None
        finally:
            self._job = None
        return job.result()


def _error_reply(call: ControlCall, error: Exception) -> Reply:
    text = str(error).encode(errors="backslashreplace").decode()  # invalid text would end the core
    if isinstance(error, RequestError | TypeError | ValueError):
        return Reply(call.number, error=text, is_request=True, param=getattr(error, "param", None))
    log.error("The engine core failed to run %r; the caller gets the error", call.method, exc_info=error)
    return Reply(call.number, error=text or type(error).__name__)


def _check_encodable(reply: Reply) -> Reply:
    """Return the reply, or an error reply if its value cannot be encoded."""
    try:
        msgspec.msgpack.encode(reply.value)
    except Exception as error:
        text = f"the returned value cannot be sent: {error}"
        return Reply(reply.number, error=text, is_request=True)
    return reply
