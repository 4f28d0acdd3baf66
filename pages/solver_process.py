"""A process that solves what a visitor types: whatever an expression does there, the server goes on.

Three limits, from the inside out: the grammar of `fewbit_gen`, which evaluates nothing but arithmetic; the solver's own
time limit, which gives a table with a weaker bound; and the process, which is killed when even that does not help.
"""

import contextlib
import math
import multiprocessing
import signal
import threading
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

from ..fewbit_gen import Weight, parse_activation, parse_weight, solve
from ..fewbit_gen.activations.expression import LONGEST
from ..fewbit_gen.weights import histogram
from ..tables import FewbitError
from ..tables.errors import shown
from ..tables.table import check_bits, check_kind
from . import explorer_data

EFFORT = 10.0  # seconds of the solver, of which the lower bound takes most
DEADLINE = 25.0  # seconds of an answer, after which the process is killed
_FIRST = 180.0  # seconds in which the process starts: the first one after an install compiles
_MEMORY = 6 << 30  # bytes of address space
_LONGEST_WEIGHT = 300  # characters
_MOST_BINS = 1000


class Busy(Exception):
    """Another request is being solved."""


def answer(request: Any) -> dict[str, Any]:
    """Return the table that `request` asks for, as `explorer_data.solved` describes it.

    Args:
        request: an object with `activation` (text), `bits`, `kind`, and `weight` (text), or `inputs` in its place: an
            object with the `edges` and `counts` of a histogram.

    Raises:
        FewbitError: the request is not such an object, or there is no such table.
    """
    if not isinstance(request, Mapping):
        raise FewbitError(f"a request is an object, not {shown(request)}")
    text = _text(request, "activation", LONGEST)
    if "inputs" in request:
        weight = _measured(request["inputs"])
    else:  # a visitor may not name files of this machine
        weight = parse_weight(_text(request, "weight", _LONGEST_WEIGHT), files=False)
    bits, kind = check_bits(request.get("bits")), check_kind(str(request.get("kind")))
    activation = parse_activation(text)
    table = solve(activation, bits=bits, kind=kind, weight=weight, effort=EFFORT)
    return explorer_data.solved(activation, weight, table)


def _measured(inputs: Any) -> Weight:
    if not isinstance(inputs, Mapping) or not all(isinstance(inputs.get(k), list) for k in ("edges", "counts")):
        raise FewbitError("inputs have edges and counts, each a list of numbers")
    if len(inputs["counts"]) > _MOST_BINS:
        raise FewbitError(f"a histogram of inputs has at most {_MOST_BINS} bins, not {len(inputs['counts'])}")
    return histogram(inputs["edges"], inputs["counts"])


def _text(request: Mapping[str, Any], field: str, longest: int) -> str:
    value = request.get(field)
    if not isinstance(value, str) or not value.strip():
        raise FewbitError(f"{field} is a text, not {shown(value)}")
    if len(value) > longest:
        raise FewbitError(f"{field} is written in at most {longest} characters, not {len(value)}")
    return value


class SolverProcess:
    """The process, started at once and again whenever it was killed. Close it, or use it in a `with` statement."""

    def __init__(self, deadline: float = DEADLINE) -> None:
        self._deadline = deadline
        self._one_at_a_time = threading.Lock()
        self._start()

    def solve(self, request: Any) -> dict[str, Any]:
        """Return `answer(request)`, computed in the process.

        Raises:
            FewbitError: as `answer` does, or it took too long or too much memory.
            Busy: another request is being solved.
        """
        if not self._one_at_a_time.acquire(blocking=False):
            raise Busy
        try:
            if not self._ready:
                self._receive(_FIRST)
                self._ready = True
            self._connection.send(request)
            kind, value = self._receive(self._deadline)
        except (TimeoutError, EOFError, OSError) as error:
            self.close()
            self._start()
            why = f"takes more than {self._deadline:g} seconds" if isinstance(error, TimeoutError) else "is too much"
            raise FewbitError(f"this {why}; try a simpler expression, a narrower weight or fewer bits") from None
        finally:
            self._one_at_a_time.release()
        if kind == "error":
            raise FewbitError(value)
        return value

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()
        self._connection.close()

    def __enter__(self) -> "SolverProcess":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _start(self) -> None:
        spawning = multiprocessing.get_context("spawn")  # the server has threads, which a fork would break
        self._connection, theirs = spawning.Pipe()
        self._process = spawning.Process(target=_run, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self._ready = False

    def _receive(self, seconds: float) -> Any:
        if not self._connection.poll(seconds):
            raise TimeoutError
        return self._connection.recv()


def _run(connection: Connection) -> None:
    """Answer requests until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole terminal; the server ends this process
    with contextlib.suppress(ImportError, ValueError, OSError):  # Windows has no such limit, some systems refuse it
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_AS)
        allowed = math.inf if most == resource.RLIM_INFINITY else most
        resource.setrlimit(resource.RLIMIT_AS, (int(min(_MEMORY, allowed)), most))
    solve("gelu", bits=1, weight="uniform:-1,1")  # compiles, or loads, the solvers
    connection.send("ready")
    with contextlib.suppress(EOFError, OSError):
        while True:
            request = connection.recv()
            try:
                reply = ("table", answer(request))
            except FewbitError as error:
                reply = ("error", " ".join(str(error).split()))
            except (MemoryError, RecursionError, ArithmeticError):
                reply = ("error", "this is too much for the solver; try a simpler expression or fewer bits")
            connection.send(reply)
