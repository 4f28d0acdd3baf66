"""CUDA C++ source of the stream of keys that lies in a GPU's memory."""

from .source import pieces


def keys_source() -> str:
    """Return the source of two kernels with C names in the namespace `keys`, in which one thread works:

    draw(i64* seeds, i64 count)
    move(i64 seed, i64 drawn, i64 begins)      to a place of the stream of a seed, or so many keys on
    """
    return pieces("numbers", "keys")
