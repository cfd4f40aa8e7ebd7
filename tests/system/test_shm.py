"""Tests of shared memory rings: every reader gets every message, complete and in order."""

import os
import random
import subprocess
import sys
import threading
import time

import pytest

from quire.system.shm import ShmReader, ShmWriter, create

PATIENCE_S = 120.0


def messages(count: int, longest: int, seed: int = 1) -> list[bytes]:
    draw = random.Random(seed)
    return [draw.randbytes(draw.randrange(longest)) for _ in range(count)]


@pytest.mark.parametrize("longest", [40, 5000], ids=["wrapping", "longer than the ring"])
@pytest.mark.parametrize("num_readers", [1, 5])
def test_many_readers(num_readers: int, longest: int) -> None:
    fd, sent = create(num_readers, capacity=1 << 10), messages(400, longest)
    got: list[list[bytes | None]] = [[] for _ in range(num_readers)]

    def read(index: int) -> None:
        reader, draw = ShmReader(fd, index, spin_s=1e-4 * (index % 2)), random.Random(index)
        for _ in sent:
            got[index].append(reader.receive(PATIENCE_S))
            if draw.random() < 0.02:
                time.sleep(0.002)

    threads = [threading.Thread(target=read, args=(index,)) for index in range(num_readers)]
    for thread in threads:
        thread.start()
    writer = ShmWriter(fd)
    for message in sent:
        writer.send(message, PATIENCE_S)
    for thread in threads:
        thread.join()
    assert got == [sent] * num_readers


def test_counters_wrap_after_four_gigabytes() -> None:
    fd = create(1, capacity=1 << 10)
    near = (1 << 32) - 100
    for end in (writer := ShmWriter(fd), reader := ShmReader(fd)):
        end._words[0] = end._words[16] = near
    writer._head = reader._tail = near
    for message in messages(20, 90):
        writer.send(message, 1.0)
        assert reader.receive(1.0) == message


def test_incomplete_message_is_not_read_and_not_lost() -> None:
    fd = create(1, capacity=1 << 10)
    writer, reader = ShmWriter(fd), ShmReader(fd)
    assert reader.receive(0.001) is None
    message = b"x" * 1500
    sending = threading.Thread(target=writer.send, args=(message, PATIENCE_S))
    sending.start()
    while (got := reader.receive(0.0)) is None:
        pass
    assert got == message
    sending.join()


def test_writer_does_not_wait_forever_for_a_dead_reader() -> None:
    writer = ShmWriter(create(1, capacity=1 << 10))
    with pytest.raises(TimeoutError, match="4000 bytes"):
        writer.send(bytes(4000), 0.05)


SLEEPER = """
import sys, time
from quire.system.shm import ShmReader
reader = ShmReader(int(sys.argv[1]))
print("there", flush=True)
print(reader.receive(60), flush=True)
"""


def test_process_is_woken_and_no_file_is_left() -> None:
    fd = create(1)
    child = [sys.executable, "-c", SLEEPER, str(fd)]
    with subprocess.Popen(child, pass_fds=(fd,), stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None and reader.stdout.readline() == "there\n"
        ShmWriter(fd).send(b"plan", PATIENCE_S)
        assert reader.stdout.readline() == "b'plan'\n"
    if sys.platform == "linux":
        assert os.readlink(f"/proc/self/fd/{fd}").endswith("(deleted)")
