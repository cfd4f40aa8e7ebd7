"""`quire run-batch`: answers the requests of a file. The same command resumes a killed run."""

import argparse
import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

import msgspec
from tqdm import tqdm

from quire.batch.journal import Journal
from quire.batch.lines import Line, answer_line, error_line, index, read_request, refusal
from quire.batch.transport import AsgiTransport, BatchAnswer, HttpTransport, Transport
from quire.config.cli import FlagParser, add_engine_flags, engine_args_from
from quire.config.plugins import load_plugins
from quire.configure import configure
from quire.entrypoints.child_cores import private_engine
from quire.errors import ConfigError
from quire.remote.http import HttpClient, ServerGone
from quire.remote.openai import bearer
from quire.server.app import Application
from quire.server.settings import add_api_flags, server_flags, server_settings

FIRST_WAIT_S = 0.25
_RETRIED = (429, 500, 502, 503, 504)
"""HTTP statuses after which a request is retried."""


def add_flags(parser: FlagParser) -> None:
    group = parser.add_argument_group("Batch", "Input, output and server.")
    group.add_argument("-i", "--input-file", required=True, metavar="FILE", help="Requests as JSON lines.")
    group.add_argument("-o", "--output-file", required=True, metavar="FILE", help="Answers as JSON lines.")
    group.add_argument(
        "--output-tmp-dir",
        metavar="DIR",
        help="Directory of the journal of finished answers. Default: that of the output file.",
    )
    group.add_argument(
        "--url", help="URL of a running server, such as http://localhost:8000. Default: run the model here."
    )
    group.add_argument(
        "--api-key", metavar="KEY", help="API key of the server. Default: the variable OPENAI_API_KEY."
    )
    group.add_argument(
        "--max-concurrency",
        type=int,
        default=256,
        metavar="N",
        help="Maximum concurrent requests. Default: 256.",
    )
    group.add_argument(
        "--max-retries",
        type=int,
        default=5,
        metavar="N",
        help="Retries, with backoff, of requests that a busy or failed server rejected. Default: 5.",
    )
    add_api_flags(parser)
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    if args.max_concurrency < 1 or args.max_retries < 0:
        raise ConfigError("--max-concurrency must be at least 1 and --max-retries at least 0")
    source, output = Path(args.input_file), Path(args.output_file)
    lines = index(source)
    journal = Journal(Path(args.output_tmp_dir or output.parent) / f"{output.name}.part")
    try:
        journal.check(line.custom_id for line in lines if line.custom_id is not None)
        work = [line for line in lines if line.error is None and line.custom_id not in journal.finished]
        if work:
            asyncio.run(_answer(args, source, work, journal))
        num_refused, first_reason = write_output(output, lines, journal)
        journal.remove()
    except BaseException:
        journal.close()
        raise
    num_answered = len(lines) - num_refused
    print(f"{num_answered} of {len(lines)} requests answered, {num_refused} refused: {output}")
    if first_reason:
        print(f"First refused: {first_reason}")
    return 0


@asynccontextmanager
async def open_transport(args: argparse.Namespace) -> AsyncIterator[Transport]:
    """Open the transport to the server at `--url`, or without this option to an engine in this process."""
    if args.url is None:
        load_plugins()  # plugins may register parsers that the settings name
    engine_args, settings = engine_args_from(args), server_settings(args)
    if args.url is None:
        async with private_engine(configure(engine_args, usage="server")) as engine:
            application = Application(engine, settings)
            await application.api.adapters.load_all()
            yield AsgiTransport(application.asgi)
        return
    engine_args |= server_flags(args)
    if engine_args:
        flag = "--" + next(iter(engine_args)).replace("_", "-")
        raise ConfigError(f"{flag} has no meaning with --url: the server has its own settings")
    headers = bearer(args.api_key or os.environ.get("OPENAI_API_KEY"))
    client = HttpClient(args.url.rstrip("/").removesuffix("/v1"), headers=headers)
    try:
        yield HttpTransport(client)
    finally:
        client.close()


async def _answer(args: argparse.Namespace, source: Path, work: Sequence[Line], journal: Journal) -> None:
    """Send the requests of `work`, the lines of the file `source` without an answer in the journal, and store
    the answers in the journal. If the server is gone, raise a ServerGone error that reports the progress."""
    num_before = len(journal.finished)
    total = num_before + len(work)
    async with open_transport(args) as transport:
        with source.open("rb") as file, tqdm(total=total, initial=num_before, desc="Requests") as bar:
            batch = BatchRun(
                transport, file, journal, max_retries=args.max_retries, on_done=lambda: bar.update(1)
            )
            try:
                await batch.answer(work, args.max_concurrency)
            except ServerGone as error:
                done = f"{len(journal.finished)} of {total} requests are answered"
                raise ServerGone(f"{error}; {done}, run the same command again to resume") from None


class BatchRun:
    """Sends the requests of a file concurrently and stores the answers in a journal."""

    def __init__(
        self,
        transport: Transport,
        file: BinaryIO,
        journal: Journal,
        *,
        max_retries: int,
        on_done: Callable[[], object],
    ) -> None:
        self._transport = transport
        self._file = file
        self._journal = journal
        self._max_retries = max_retries
        self._on_done = on_done

    async def answer(self, work: Sequence[Line], max_concurrency: int) -> None:
        rest = iter(work)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(max_concurrency, len(work))):
                    group.create_task(self._worker(rest))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _worker(self, rest: Iterator[Line]) -> None:
        for line in rest:
            request = read_request(self._file, line)
            request_id = f"batch-{uuid4().hex}"
            answer = await self._send_with_retries(request.url, bytes(request.body), request_id)
            entry = answer_line(
                request.custom_id, status=answer.status, request_id=request_id, body=_parse_json(answer.body)
            )
            self._journal.add(request.custom_id, entry)
            self._on_done()

    async def _send_with_retries(self, url: str, body: bytes, request_id: str) -> BatchAnswer:
        """Send a request, with up to `max_retries` retries and exponential backoff while the server is gone
        or returns a status of `_RETRIED`. Return the last answer; raise ServerGone if the last attempt has
        none."""
        for attempt in range(self._max_retries):
            try:
                answer = await self._transport.send(url, body, request_id)
            except ServerGone:
                pass
            else:
                if answer.status not in _RETRIED:
                    return answer
            await asyncio.sleep(FIRST_WAIT_S * 2**attempt)
        return await self._transport.send(url, body, request_id)


def write_output(path: Path, lines: Sequence[Line], journal: Journal) -> tuple[int, str]:
    """Write all answers to the file `path`, in the order of the requests; it is replaced atomically. Return
    the number of requests that were invalid or refused by the server, and the reason for the first."""
    unfinished, num_refused, first_reason = path.with_name(path.name + ".tmp"), 0, ""
    try:
        with unfinished.open("wb") as file:
            for line in lines:
                valid = line.error is None and line.custom_id is not None
                entry = journal.read(str(line.custom_id)) if valid else error_line(line)
                file.write(entry)
                if reason := refusal(entry):
                    num_refused, first_reason = num_refused + 1, first_reason or reason
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
    return num_refused, first_reason


def _parse_json(body: bytes) -> Any:
    """Return the parsed JSON of an answer; its text if it is not JSON."""
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return body.decode(errors="replace")
