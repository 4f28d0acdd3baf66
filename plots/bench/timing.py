"""The timing loop of all benches: contestants take turns, so that drifting machine speed affects all equally.

    times = take_turns({"fewbit": ours, "torch": theirs}, rounds=15)
    times.median("fewbit"), times.best("torch"), times.ratio("fewbit", to="torch")

A clock calls a contestant and returns the seconds it took:

        processor       wall time from call to return
        computing       the process's own processor time, of all its threads
        synchronized    likewise, with the GPU idle before and after
        gpu_events      between two GPU events
        gpu_alone       likewise, with the GPU kept busy, so that Python and launch overhead are excluded
"""

import math
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Reading = TypeVar("Reading")
Result = TypeVar("Result")
Run = Callable[[], object]
Clock = Callable[[Run], float]

_GPU_CYCLES_AHEAD = 3_000_000  # 1.5 ms: four calls of the slowest quantizer, 0.12 ms each from Python, and room


@dataclass(frozen=True)
class Times(Generic[Key]):
    """Seconds of each contestant, one mapping per round."""

    rounds: Sequence[Mapping[Key, float]]

    def of(self, who: Key) -> list[float]:
        """Return the seconds of one contestant in all rounds."""
        return [seconds[who] for seconds in self.rounds]

    def median(self, who: Key) -> float:
        """Return the median over rounds."""
        return statistics.median(self.of(who))

    def best(self, who: Key) -> float:
        """Return the minimum over rounds, the one that other work on the machine disturbed least."""
        return min(self.of(who))

    def ratio(self, who: Key, to: Key) -> float:
        """Return the median over rounds of one contestant's time divided by another's in the same round."""
        return statistics.median(seconds[who] / seconds[to] for seconds in self.rounds)


def timed(run: Callable[[], Result]) -> tuple[float, Result]:
    """Return the seconds of one call, and its result."""
    start = time.perf_counter()
    result = run()
    return time.perf_counter() - start, result


def processor(run: Run) -> float:
    """Return the seconds of one call; its result is freed afterwards."""
    return timed(run)[0]


def computing(run: Run) -> float:
    """Return the processor time of one call, which other work on the machine disturbs least."""
    start = time.process_time()
    result = run()
    seconds = time.process_time() - start
    del result
    return seconds


def synchronized(run: Run) -> float:
    """Return the seconds of one call until the GPU is idle again."""
    import torch

    torch.cuda.synchronize()

    def finish() -> object:
        result = run()
        torch.cuda.synchronize()
        return result

    return processor(finish)


def gpu_events(run: Run) -> float:
    """Return the seconds between a GPU event before the call and one after it."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    result = run()
    end.record()
    end.synchronize()
    del result
    return begin.elapsed_time(end) / 1e3


def gpu_alone(run: Run) -> float:
    """Return the GPU's own seconds: the GPU is kept busy while Python queues the call."""
    import torch

    torch.cuda._sleep(_GPU_CYCLES_AHEAD)
    return gpu_events(run)


def clock_of(device: str) -> Clock:
    """Return the clock that times calls as a user makes them, on "cpu" or "cuda"."""
    return synchronized if device == "cuda" else processor


def repeated(run: Run, times: int) -> Run:
    """Return a function that calls `run` `times` times, as one short call is below a clock's resolution."""

    def many() -> None:
        for _ in range(times):
            run()

    return many


def take_turns(
    contestants: Mapping[Key, Run],
    rounds: int,
    *,
    clock: Clock = processor,
    warm_up: int = 2,
    after: Callable[[Key], object] | None = None,
    rotate: bool = False,
    budget: float = math.inf,
) -> Times[Key]:
    """Time all contestants once per round; takes the arguments of `readings`."""
    return Times(readings(contestants, rounds, clock, warm_up=warm_up, after=after, rotate=rotate, budget=budget))


def readings(
    contestants: Mapping[Key, Run],
    rounds: int,
    clock: Callable[[Run], Reading],
    *,
    warm_up: int = 2,
    after: Callable[[Key], object] | None = None,
    rotate: bool = False,
    budget: float = math.inf,
) -> list[dict[Key, Reading]]:
    """Return the clock's readings of each contestant in each round.

    Args:
        contestants: functions to call.
        rounds: measurements of each.
        clock: calls a contestant and returns its reading.
        warm_up: rounds before the counted ones.
        after: called with the contestant's key after each call, outside the measurement.
        rotate: start each round with another contestant.
        budget: seconds after which no further round starts; at least one round runs.
    """
    keys = list(contestants)
    found: list[dict[Key, Reading]] = []
    begun = time.perf_counter()
    for number in range(warm_up + rounds):
        if number > warm_up and time.perf_counter() - begun >= budget:
            break
        first = number % len(keys) if rotate else 0
        found.append({})
        for key in keys[first:] + keys[:first]:
            found[-1][key] = clock(contestants[key])
            if after is not None:
                after(key)
    return found[warm_up:]
