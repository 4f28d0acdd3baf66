"""The largest number that fits, by trial.

largest_by_trial(fits, guess=100, tolerance=0.02)      the largest n for which fits(n), near 100 or not
"""

from collections.abc import Callable


def largest_by_trial(fits: Callable[[int], bool], guess: int = 1, tolerance: float = 0.0) -> int:
    """Return the largest number for which `fits` is true, or 0; it is true up to some number and false beyond.

    Strides from the guess double until the number is between two trials, which are then bisected.

    Args:
        fits: of a number of 1 or more.
        guess: the first number to try.
        tolerance: share of the number by which the result may be too small; the first stride is twice as long.
    """
    stride = max(1, round(2 * tolerance * guess))
    if fits(guess):
        low, high = guess, guess + stride
        while fits(high):
            stride *= 2
            low, high = high, high + stride
    else:
        low, high = max(0, guess - stride), guess
        while low and not fits(low):
            stride *= 2
            low, high = max(0, low - stride), low
    while high - low > max(1, tolerance * low):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
