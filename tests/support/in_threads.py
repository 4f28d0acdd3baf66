"""Calls in threads of their own."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier


def in_threads(function, arguments):
    """Call `function` with each of the arguments, all at once; return the results, or raise what a call raises."""
    begin = Barrier(len(arguments))

    def call(argument):
        begin.wait(60)
        return function(argument)

    with ThreadPoolExecutor(len(arguments)) as pool:
        return [*pool.map(call, arguments)]
