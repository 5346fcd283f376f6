"""Calls in flight: the handle of one, and the thread that runs them in order."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from .errors import RingClosed, RingError

if TYPE_CHECKING:
    import torch

    from .call import Call


class Work:
    """An asynchronous call of a ring. Its tensors must not be touched until it is done."""

    def __init__(self, future: Future[Any], call: Call) -> None:
        self._future = future
        self._call = call
        self._process = os.getpid()

    @property
    def total_count(self) -> float:
        """Once done: the sum of counts over ranks; 0 where the normalization has none."""
        return self._call.total_count

    def wait(self, timeout: float | None = None) -> Any:
        """Blocks until the call is done and returns its result: the reduced tensor or array.

        Raises what the call raised; ``TimeoutError`` after ``timeout`` seconds (the call itself goes on); ``RingError``
        in a fork, where the thread that would end the call does not run.
        """
        if os.getpid() != self._process and not self._future.done():
            raise RingError("this process is a fork of the one that made the call; wait for it there")
        return self._future.result(timeout)

    def done(self) -> bool:
        """Whether the call has ended, well or not."""
        return self._future.done()

    def exception(self) -> BaseException | None:
        """What the call raised; None if it succeeded or is not done."""
        return self._future.exception() if self._future.done() else None

    def when_done(self, callback: Callable[[float, BaseException | None], object]) -> None:
        """Calls ``callback(total_count, exception)`` on the ring's thread, or here and now if the call has ended."""
        call = self._call  # not self: a cycle would keep the tensors
        self._future.add_done_callback(lambda future: callback(call.total_count, future.exception()))

    def tally(self) -> Tally:
        """The total count, without the tensors."""
        return Tally(self)

    def __repr__(self) -> str:
        state = "running" if not self.done() else "failed" if self._future.exception() else "done"
        return f"<Work {state}>"

    def get_future(self) -> torch.futures.Future[Any]:
        """The same as a torch future, as DDP's hooks return it. Its value is the result.

        Its ``wait()`` raises ``RuntimeError`` with the text of what the call raised.
        """
        import torch

        settled: torch.futures.Future[Any] = torch.futures.Future()
        # Through then(), since set_exception() of a torch future stores the exception as its value, which DDP's C++
        # would take for the result; an error in a callback is one there too.
        future = self._future
        result = settled.then(lambda _: future.result())
        self._future.add_done_callback(
            lambda _: settled.set_result(None)
        )  # not the future itself: a cycle in C++
        return result


class Tally:
    """The total count of a call once it is done; None before, and if it failed. Keeps none of its tensors."""

    last_only = False  # whether it is known only until the next call

    def __init__(self, work: Work) -> None:
        self.total_count: float | None = None
        work.when_done(self._done)

    def _done(self, total_count: float, error: BaseException | None) -> None:
        if error is None:
            self.total_count = total_count


class CommunicationThread:
    """Runs jobs one after another in a thread of its own, which the first job starts."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._unfinished = 0
        self._stopping = False
        self.idle = True  # whether no job is queued or running
        # threading.get_ident() in a callback of a future; None before the first job.
        self.ident: int | None = None

    def submit(self, job: Callable[[], Any]) -> Future[Any]:
        """Queues ``job``; the future gets what it returns or raises. ``RingClosed`` after :meth:`stop`."""
        future: Future[Any] = Future()
        with self._lock:
            if self._stopping:
                raise RingClosed(f"{self._name}: the ring is being closed; make a new one for further calls")
            if self._thread is None:
                # A daemon: a call that waits for a peer must not keep the interpreter from exiting. The ring's exit
                # handler ends it before Python does.
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                thread.start()  # raises where no thread can be had, and nothing has changed
                self._thread = thread
                self.ident = thread.ident
            self._unfinished += 1
            self.idle = False
            self._jobs.put((job, future))
        return future

    def stop(self, timeout: float) -> bool:
        """Ends the thread after the jobs queued so far; whether it ended within ``timeout`` seconds."""
        with self._lock:
            thread = self._thread
            if thread is not None and not self._stopping:
                self._jobs.put(None)
            self._stopping = True
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(timeout)
        return not thread.is_alive()

    def _run(self) -> None:
        while (entry := self._jobs.get()) is not None:
            self._run_one(*entry)
            del entry  # or its tensors would live until the next job

    def _run_one(self, job: Callable[[], Any], future: Future[Any]) -> None:
        try:
            result = job()
        except BaseException as error:
            self._finish_one()
            future.set_exception(error)
        else:
            self._finish_one()
            future.set_result(result)

    def _finish_one(self) -> None:
        with self._lock:
            self._unfinished -= 1  # before the result is there: who has waited for it finds the thread idle
            self.idle = self._unfinished == 0
