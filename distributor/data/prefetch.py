"""Prepares what a consumer wants next in a thread."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Generator, Iterator, Sized
from typing import Generic, TypeVar

T = TypeVar("T", bound=Sized)


def prefetched(items: Iterator[T], ahead: int) -> Generator[T, None, None]:
    """Yield items that a thread makes before they are wanted.

    Parameters
    ----------
    items : iterator of sized
        The items, each of which consists of some parts. The thread owns the iterator.
    ahead : int
        Another item is made while the items that are ready have fewer parts than this; 0 makes
        each when it is wanted, in the consumer's thread.
    """
    if ahead == 0:
        yield from items
        return
    channel: _Channel[T] = _Channel(ahead)
    thread = threading.Thread(
        target=channel.fill, args=(items,), name="distributor-batches", daemon=True
    )
    del items
    thread.start()
    try:
        yield from channel.received()
    finally:
        channel.close()


class _Channel(Generic[T]):
    """Passes items from a thread to another one."""

    def __init__(self, ahead: int) -> None:
        self._ahead = ahead
        self._changed = threading.Condition()
        self._ready: deque[T] = deque()
        self._end: BaseException | None = None
        self._closed = False
        self._process = os.getpid()

    def fill(self, items: Iterator[T]) -> None:
        """Make items while there is room for them, until the channel is closed."""
        end: BaseException = StopIteration()
        try:
            while self._waits_for_room():
                item = next(items)
                with self._changed:
                    self._ready.append(item)
                    self._changed.notify_all()
                del item  # it is the consumer's
        except BaseException as error:
            end = error
        with self._changed:
            self._end = end
            self._changed.notify_all()

    def received(self) -> Iterator[T]:
        """Yield the items; an error in the thread is raised here."""
        while True:
            if os.getpid() != self._process:
                raise RuntimeError(
                    "These batches are prepared by a thread of another process, from which this "
                    "one was forked. Begin a new pass here, or set prefetch_batches=0."
                )
            with self._changed:
                self._changed.wait_for(lambda: self._ready or self._end)
                if not self._ready:
                    break
                item = self._ready.popleft()
                self._changed.notify_all()
            yield item
            del item  # its memory may be needed for the next one
        if self._end is not None and not isinstance(self._end, StopIteration):
            raise self._end

    def close(self) -> None:
        """End the thread as soon as it has made its current item."""
        if os.getpid() != self._process:
            return  # the lock may have been held when this process was forked
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _waits_for_room(self) -> bool:
        """Wait until another item may be made; return False if the channel is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or sum(map(len, self._ready)) < self._ahead)
            return not self._closed
