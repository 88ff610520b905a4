"""What the loop and everybody else share: which requests are alive, what has come of them, what was fetched."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence

from cbjax.manager.entry import Entry, Reader
from cbjax.requests import GenerationOutput


class Ledger:
    """Every request has one terminal output, and it is taken once: fetched, iterated over, or told to a handler.

    Until then it is kept. Methods take the lock, unless they say that it is held.

    Attributes:
      lock: guards all of it, every entry, and the loop's inbox.
      news: of `lock`; something was published, or the loop has ended.
      is_open: a loop runs, so more can come.
      alive: requests that can be cancelled, by their ids.
      unfinished: those without a terminal output, by index.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.news = threading.Condition(self.lock)
        self.is_open = False
        self.alive: dict[str, Entry] = {}
        self.unfinished: dict[int, Entry] = {}
        self._finished: dict[int, Entry] = {}  # with an output that anybody may take, in the order of their ends
        self._handled: dict[int, Entry] = {}  # with a handler that has not been told the end
        self._not_taken: defaultdict[str, deque[Entry]] = defaultdict(deque)  # by id, in order of submission

    def add(self, entry: Entry) -> None:
        """A new request. The lock is held."""
        self.alive[entry.request_id] = self.unfinished[entry.index] = entry
        self._not_taken[entry.request_id].append(entry)

    def knows(self, request_id: str) -> bool:
        """Whether a request of that id is alive or was not fetched. The lock is held."""
        return request_id in self._not_taken

    def find(self, request_id: str) -> Entry:
        """The oldest request of that id that was not fetched. The lock is held.

        Raises:
          KeyError: there is none.
        """
        if request_id not in self._not_taken:
            raise KeyError(f"no request {request_id!r}: it was never submitted, or its output was fetched already")
        return self._not_taken[request_id][0]

    def cancel(self, request_id: str) -> Entry | None:
        """Takes a request out of the living, its id free at once. The lock is held."""
        entry = self.alive.pop(request_id, None)
        if entry is not None:
            entry.cancelled = True
        return entry

    def publish(self, entries: Sequence[Entry], outputs: Mapping[int, GenerationOutput]) -> None:
        """Lets readers see the tokens that a step gave these requests, and the ends of some, by index."""
        with self.lock:
            for entry in entries:
                if entry.cancelled or entry.state is None:
                    continue
                if entry.index in outputs:
                    self._finish(entry, outputs[entry.index])
                else:
                    entry.num_tokens = len(entry.state.generated_tokens)
            if outputs or any(entry.streaming for entry in entries):
                self.news.notify_all()

    def finish(self, entry: Entry, output: GenerationOutput) -> None:
        """A request's terminal output; a second one is dropped."""
        with self.lock:
            self._finish(entry, output)
            self.news.notify_all()

    def _finish(self, entry: Entry, output: GenerationOutput) -> None:
        if entry.output is not None:
            return
        entry.output, entry.num_tokens = output, len(output.generated_tokens)
        del self.unfinished[entry.index]
        if self.alive.get(entry.request_id) is entry:
            del self.alive[entry.request_id]
        if entry.handler is None:
            self._finished[entry.index] = entry

    def handle(self, entry: Entry) -> None:
        """From now on the entry's handler is told, and nobody else can take the output. The lock is held."""
        self._finished.pop(entry.index, None)
        self._handled[entry.index] = entry

    def due(self) -> list[Entry]:
        """Requests whose handlers have not been told the end. The lock is held."""
        return [entry for entry in self._handled.values() if entry.output is not None]

    def next_for_handler(self, entry: Entry) -> GenerationOutput | None:
        """What the entry's handler is to be told next, if anything; the terminal output is then taken.

        The first time it is all that was there when the handler was registered, then token by token.
        """
        with self.lock:
            reader, count = entry.reader, entry.num_tokens
            if entry.index not in self._handled or reader is None:
                return None
            following = max(reader.num_seen + 1, reader.first)
            in_between = entry.streaming and not entry.cancelled
            if entry.output is not None and (not in_between or following >= count):
                self._take(entry)
                return entry.output
        return reader.read(following) if in_between and following <= count else None

    def result(self, request_id: str, timeout: float | None) -> GenerationOutput | None:
        """Waits for one request's terminal output and takes it; None if it does not come."""
        with self.news:
            entry = self.find(request_id)
            self.news.wait_for(lambda: entry.output is not None or not self.is_open, timeout)
            if entry.output is not None:
                self._take(entry)
            return entry.output

    def next_result(self, timeout: float | None, *, until_drained: bool = False) -> GenerationOutput | None:
        """Waits for any terminal output and takes it; None if none comes, or (`until_drained`) none can."""
        with self.news:
            self.news.wait_for(
                lambda: self._finished or not self.is_open or (until_drained and not self.unfinished), timeout
            )
            if not self._finished:
                return None
            entry = next(iter(self._finished.values()))
            self._take(entry)
            return entry.output

    def stream(self, entry: Entry, reader: Reader) -> Iterator[GenerationOutput]:
        """A snapshot for each token as it comes, the last one terminal."""
        while True:
            with self.news:
                self.news.wait_for(
                    lambda: entry.output or not self.is_open or (entry.streaming and entry.num_tokens > reader.num_seen)
                )
                output, count = entry.output, entry.num_tokens
                if output is None and not self.is_open:
                    raise RuntimeError("the manager does not run, so nothing will come: start() it first")
                last = output is not None and (not entry.streaming or reader.num_seen >= count - 1)
                if last:
                    self._take(entry)
            if last and output is not None:
                yield output
                return
            yield reader.read(reader.num_seen + 1)

    def _take(self, entry: Entry) -> None:
        """Forgets a finished request. The lock is held."""
        self._finished.pop(entry.index, None)
        self._handled.pop(entry.index, None)
        same = self._not_taken.get(entry.request_id)
        if same and entry in same:
            same.remove(entry)
            if not same:
                del self._not_taken[entry.request_id]

    def forget(self) -> None:
        """Drops what was not fetched."""
        with self.lock:
            for entry in list(self._finished.values()):
                self._take(entry)
