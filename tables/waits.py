"""What is said while somebody waits: who a block of code tells that it still runs, and what it is at."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def ticking(tell: Callable[[float], None], first: float, every: float) -> Iterator[None]:
    """Call `tell` with the seconds that this block has taken, after `first` of them and again every `every`.

    Args:
        tell: called in a thread of its own, until the block ends.
        first, every: seconds.
    """
    over = threading.Event()

    def tick() -> None:
        start, wait = time.monotonic(), first
        while not over.wait(wait):
            tell(time.monotonic() - start)
            wait = every

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def phases_of(logger: str, first: str) -> Iterator[Callable[[], str]]:
    """Yield a function that returns the last line of level INFO that a logger has had inside this block, or `first`.

    Where the logger was not at that level, its lines go nowhere else.
    """
    handler = _Last(first)
    log = logging.getLogger(logger)
    level, propagates = log.level, log.propagate
    log.propagate = propagates and log.isEnabledFor(logging.INFO)
    log.addHandler(handler)
    log.setLevel(min(logging.INFO, log.getEffectiveLevel()))
    try:
        yield lambda: handler.text
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        log.propagate = propagates


class _Last(logging.Handler):
    """Keeps the text of the last record."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()
