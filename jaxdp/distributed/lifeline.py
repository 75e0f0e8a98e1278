"""A connection from every process to process 0, from before JAX starts to the end.

The roll call has made them. The kernel closes those of a process that dies, however it
dies, so all others know at once, where a collective would leave them waiting.
"""

import os
import selectors
import threading
import time
from collections.abc import Callable
from typing import Final

from .launchers import Place
from .roll_call import Message, RollCall

GRACE: Final = 3.0
"""Seconds in which a process may still come to the error that another one has had."""

_PAUSE: Final = 0.3


class Lifeline:
    """What the processes of a job hear of each other while it runs.

    A thread of every process listens, and tells process 0 once a second what its own
    is doing; process 0 passes on what all must know. Without a word for `timeout`
    seconds a process counts as dead. `end` ends this one, with a text for the user.
    """

    def __init__(
        self,
        place: Place,
        roll: RollCall,
        timeout: float,
        end: "Callable[[Lifeline, str], None]",
    ):
        self.place = place
        self.names = roll.names
        self.timeout = timeout
        self.where = "before the first fit"  # for the others to tell if this one dies
        self.is_fitting = False  # and needs all others
        self.lost: dict[int, str] = {}  # why each is gone that should not be
        self._connections = roll.connections
        self._end_process = end
        self._fits = 0
        self._failing = False
        self._heard_at: dict[int, tuple[float, str]] = {}
        self._done: dict[int, str] = {}
        self._thread = threading.Thread(
            target=self._watch, name="jaxdp Lifeline", daemon=True
        )
        # A forked worker would keep the connections open after this process's death.
        os.register_at_fork(after_in_child=self._close)

    def start(self) -> None:
        self._thread.start()

    def begin_fit(self) -> None:
        """From now on no other process may go missing."""
        self._fits, self.is_fitting = self._fits + 1, True
        for process, where in self._done.items():
            self._end_later(f"{self.names[process]} has ended, {where}", self._fits)

    def end_fit(self, failure: str | None = None) -> None:
        """The fit has ended here; elsewhere too, unless by a `failure` of this one."""
        if self.is_fitting and failure is not None:
            self._tell({"failed": f"{self.where}: {failure}", "fit": self._fits})
        self.is_fitting = False

    def fail(self, failure: str) -> None:
        """Tells all others that this process ends now; they do not end it any more."""
        self._failing = True
        # If it fails by the death of another one, that will be heard of soon.
        time.sleep(_PAUSE)
        self._tell({"failed": f"{self.where}: {failure}", "fit": None})

    def wait_for_others(self) -> None:
        """To be called last: process 0 waits for the others to leave.

        With it goes JAX's service, and JAX ends them before they can tell anything.
        """
        end = time.monotonic() + 2 * GRACE if self.place.process_id == 0 else 0.0
        while self._connections and time.monotonic() < end:
            time.sleep(0.02)

    def leave(self) -> None:
        """This process has come to its end, and is not missed from now on."""
        self._tell({"done": self.where})

    def _tell(self, message: Message) -> None:
        message = {"from": self.place.process_id, **message}
        for connection in list(self._connections.values()):
            connection.send(message)

    def _watch(self) -> None:
        # Not so often that process 0 of a large job is kept busy.
        interval = max(min(1.0, self.timeout / 5), self.place.num_processes / 500)
        spoke = 0.0
        with selectors.DefaultSelector() as selector:
            for process, connection in self._connections.items():
                selector.register(connection.sock, selectors.EVENT_READ, process)
            while self._connections:
                # What others tell.
                for key, _ in selector.select(interval):
                    messages = self._connections[key.data].receive()
                    for message in messages or ():
                        self._hear(message)
                    if messages is None:
                        selector.unregister(key.fileobj)
                        self._lose(key.data, "its connection was closed")

                # What this process does.
                now = time.monotonic()
                if now - spoke > interval:
                    spoke = now
                    self._tell({"at": self.where})

                # Who tells nothing any more.
                for process, connection in list(self._connections.items()):
                    silent = now - connection.heard
                    if silent > self.timeout and process not in self._done:
                        selector.unregister(connection.sock)
                        self._lose(process, f"not a word of it for {silent:.0f} s")

    def _hear(self, message: Message) -> None:
        process = message["from"]
        if "at" in message:
            self._heard_at[process] = time.monotonic(), message["at"]
            return

        # Process 0 passes the rest on.
        if self.place.process_id == 0:
            for other, connection in list(self._connections.items()):
                if other != process:
                    connection.send(message)

        name = self.names[process]
        if "dead" in message:
            self._end(message["dead"], message["text"])
        elif "done" in message:
            self._done[process] = message["done"]
            if self.is_fitting:
                self._end_later(f"{name} has ended, {message['done']}", self._fits)
        elif "failed" in message:
            text, fit = f"{name} failed, {message['failed']}", message["fit"]
            if fit is None:
                self.lost.setdefault(process, text)
            self._end_later(text, fit)

    def _lose(self, process: int, how: str) -> None:
        self._connections.pop(process).close()
        if process in self._done or process in self.lost:
            return
        text = f"{self.names[process]} died ({how})"
        if process in self._heard_at:
            when, where = self._heard_at[process]
            text += f"; {time.monotonic() - when:.1f} s before it was {where}"
        if self.place.process_id == 0:
            self._tell({"dead": process, "text": text})
        self._end(process, text)

    def _end(self, process: int, text: str) -> None:
        if process == self.place.process_id:
            return
        self.lost.setdefault(process, text)
        if not self._failing:
            self._end_process(self, text)

    def _end_later(self, text: str, fit: int | None) -> None:
        """Ends this process after a while, if it is still in that fit, or for None."""

        def end() -> None:  # all may have the same error, and something to do about it
            is_concerned = fit is None or self.is_fitting and self._fits == fit
            if is_concerned and not self._failing:
                self._end_process(self, text)

        timer = threading.Timer(GRACE, end)
        timer.daemon = True
        timer.start()

    def _close(self) -> None:
        for connection in self._connections.values():
            connection.close()
