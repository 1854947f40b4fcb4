"""Messages between our own processes: small values through a connection, large ones through shared memory.

Large tensors and arrays are written, once for all receivers, into one piece of memory without a name, and its
descriptor goes along. So nothing stays behind, however the processes end. A receiver maps the memory privately: all
share the pages that nobody writes, and what one of them writes in place reaches no other.
"""

from __future__ import annotations

import io
import os
import pickle
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

LARGE = 4096  # bytes of a buffer that is not left within the pickle
MAPPED = 1 << 18  # bytes of memory worth mapping; less is read, since a process has 65,530 mappings and no more
ALIGNMENT = 64

Place = tuple[int, int]  # where a buffer begins and ends in the memory
Whole = tuple[bytes, list[Place], np.ndarray]  # a pickle, the places of its buffers, and the memory they are in


@dataclass(frozen=True)
class Message:
    """A packed value. It can be sent to any number of receivers."""

    text: bytes
    places: list[Place]
    memory: _Memory

    def send(self, connection: Connection) -> None:
        """Send it through a Unix-domain connection, to be met by `receive`."""
        connection.send((self.text, self.places, self.memory.size))
        if self.places and self.memory.file:
            send_handle(connection, self.memory.file.fileno(), None)

    def whole(self) -> Whole:
        """All of it, for others to carry. `opened` makes the value of it."""
        file = self.memory.file
        memory = _contents(os.dup(file.fileno()), self.memory.size) if file else np.empty(0, np.uint8)
        return self.text, self.places, memory


@contextmanager
def packed(*values: object) -> Iterator[list[Message]]:
    """Messages of these values, to be sent while this lasts. A buffer that several of them hold is laid out once."""
    memory = _Memory()
    try:
        messages = [_message(value, memory) for value in values]
        memory.flush()
        yield messages
    finally:
        memory.close()


def receive(connection: Connection) -> Any:
    """The value of the next message.

    Raises:
        EOFError, OSError: the other end is gone.
    """
    text, places, size = connection.recv()
    if not places:
        return pickle.loads(text)
    return opened(text, places, _contents(recv_handle(connection), size))


def opened(text: bytes, places: list[Place], memory: np.ndarray) -> Any:
    """The value of a whole message. Its arrays lie in this memory, which must be writable."""
    return pickle.loads(text, buffers=[memory[first:last] for first, last in places])


class _Memory:
    """Memory without a name, filled from the front."""

    def __init__(self) -> None:
        self.file: IO[bytes] | None = None  # made when it is needed: most messages are small
        self.size = 0
        self._laid: dict[tuple[int, int], tuple[Place, pickle.PickleBuffer]] = {}

    def place(self, buffer: pickle.PickleBuffer) -> Place:
        """Where these bytes lie. Those that are laid out already are found by their address."""
        data = buffer.raw()
        address = np.frombuffer(data, np.uint8).ctypes.data
        if (address, data.nbytes) not in self._laid:
            self.file = self.file or _nameless()
            first = self.size + -self.size % ALIGNMENT
            self.file.write(bytes(first - self.size))
            self.file.write(data)  # straight from where it is: a large federation has no copy on the way
            self.size = first + data.nbytes
            self._laid[address, data.nbytes] = (first, self.size), buffer  # held, so that no other takes its address
        return self._laid[address, data.nbytes][0]

    def flush(self) -> None:
        if self.file:
            self.file.flush()

    def close(self) -> None:
        if self.file:
            self.file.close()


def _nameless() -> IO[bytes]:
    try:
        return os.fdopen(os.memfd_create("fairveil"), "wb")
    except (AttributeError, OSError):  # another system than Linux, or forbidden
        return tempfile.TemporaryFile()  # it loses its name at once


def _contents(descriptor: int, size: int) -> np.ndarray:
    """The memory behind a descriptor, as this process's own (size,)."""
    try:
        if size < MAPPED:
            memory = np.empty(size, np.uint8)
            os.preadv(descriptor, [memory.data], 0)
            return memory
        # torch keeps the mapping and no descriptor; Python's mmap would keep one for as long as any tensor lives
        return torch.from_file(f"/dev/fd/{descriptor}", shared=False, size=size, dtype=torch.uint8).numpy()
    finally:
        os.close(descriptor)


def _message(value: object, memory: _Memory) -> Message:
    text, places = io.BytesIO(), []

    def within(buffer: pickle.PickleBuffer) -> bool:
        if buffer.raw().nbytes < LARGE:
            return True
        places.append(memory.place(buffer))
        return False

    _Pickler(text, protocol=5, buffer_callback=within).dump(value)
    return Message(text.getvalue(), places, memory)


class _Pickler(pickle.Pickler):
    """Sends tensors as plain arrays, whose bytes can be taken out of the pickle."""

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, Tensor):
            return _tensor, (value.detach().numpy(),)
        if isinstance(value, np.ndarray) and not (value.flags.c_contiguous or value.flags.f_contiguous):
            return np.ascontiguousarray(value).__reduce_ex__(5)  # or numpy would leave its bytes where they are
        return NotImplemented


def _tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array)
