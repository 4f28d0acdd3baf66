"""The ops of layers: torch's own checks, plain torch's results, and hostile arguments."""

import pytest
import torch
from fewbit import FewbitError
from fewbit.runtime import ops
from fewbit.runtime.backends.reference import pooling, preact, rotated

WINDOW = ([2, 3], [1, 2], [1, 1], [2, 1])


def numbers(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def vectors(count, channels=5):
    return torch.randn(count, channels, generator=torch.Generator().manual_seed(9)).unbind()


def preact_codes(gamma, beta):
    A, (mean, r) = numbers(3, 5, 6, 7), vectors(2)
    return ops.preact_encode(A, A, gamma, beta, mean, r, 3, 0.1)[0]


def cases():
    """(name, op, its arguments)."""
    x, (gamma, beta, mean, r) = numbers(3, 5, 6, 7), vectors(4)
    q, k, v = numbers(3, 2, 4, 6, 8).unbind()
    packed = preact_codes(gamma, beta)
    y, places = ops.max_pool(x, *WINDOW, False)
    options = (0.0, True, 0.4, False)
    state = ops.attention(q, k, v, None, *options)[1]
    return {
        "another": (ops.another, (x, places)),
        "separate": (ops.separate, (gamma,)),
        "max_pool": (ops.max_pool, (x, *WINDOW, True)),
        "max_pool, one image": (ops.max_pool, (x[0], *WINDOW, False)),
        "max_pool_backward": (ops.max_pool_backward, (y, places, list(x.shape), *WINDOW)),
        "preact_encode": (ops.preact_encode, (x, x + 1, gamma, beta, mean, r, 3, 0.1)),
        "preact_decode": (ops.preact_decode, (packed, gamma, beta, 3, 0.1, x.shape, x.stride(), torch.float32)),
        "preact_backward": (ops.preact_backward, (packed, gamma, beta, 3, 0.1, x, r, True, True)),
        "preact_backward, parameters": (ops.preact_backward, (packed, gamma, beta, 3, 0.0, x, r, False, False)),
        "attention": (ops.attention, (q, k, v, None, *options)),
        "attention_backward": (ops.attention_backward, (v, q, k, v, None, state, [True, False, True], *options)),
    }


NAMES = (
    *("another", "separate", "max_pool", "max_pool, one image", "max_pool_backward", "preact_encode"),
    *("preact_decode", "preact_backward", "preact_backward, parameters", "attention", "attention_backward"),
)  # apart from `cases`, which runs kernels: not while tests are collected


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name):
    assert (*cases(),) == NAMES
    torch.library.opcheck(*cases()[name])


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("flat", [False, True])
def test_preactivation_is_plain_torchs(channels_last, flat):
    form = torch.channels_last if channels_last else torch.contiguous_format
    A, gradient = (numbers(3, 5, 6, 7).to(memory_format=form) * s for s in (1, -0.3))
    gamma, beta, mean, r = vectors(4)
    if flat:
        gamma[2] = 0
    packed, activated = ops.preact_encode(A, A, gamma, beta, mean, r, 3, 0.1)
    plain = A.clone()
    assert torch.equal(packed, preact.encode(plain, A, gamma, beta, mean, r, 3, 0.1))
    assert torch.equal(activated, plain)
    out = ops.preact_decode(packed, gamma, beta, 3, 0.1, A.shape, A.stride(), A.dtype)
    assert torch.equal(out, preact.decode(packed, gamma, beta, 3, 0.1, torch.empty_like(A)))
    ours = ops.preact_backward(packed, gamma, beta, 3, 0.1, gradient, r, True, True)
    expected = preact.through_normalization(packed, gamma, beta, 3, 0.1, gradient, r, True, True)
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b.to(a.dtype), rtol=1e-4, atol=1e-5)


def test_the_default_dtype_changes_no_result():
    """Sums of a layer's gradients were written to memory of that dtype: of a 16-bit one beyond its end."""
    A, (gamma, beta, mean, r) = numbers(3, 5, 6, 7), vectors(4)

    def through():
        packed, _ = ops.preact_encode(A, A, gamma, beta, mean, r, 3, 0.1)
        gradients = ops.preact_backward(packed, gamma, beta, 3, 0.1, A, r, True, True)
        return [*gradients, *rotated.quantize(A.view(6, 105), 2, 128, 2, True, 5)]

    expected = through()
    torch.set_default_dtype(torch.float64)
    try:
        found = through()
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("ceil_mode", [False, True])
def test_pooling_is_plain_torchs(ceil_mode):
    x = numbers(3, 5, 6, 7)
    y, places = ops.max_pool(x, *WINDOW, ceil_mode)
    assert all(map(torch.equal, (y, places), pooling.max_pool(x, *WINDOW, ceil_mode)))
    assert torch.equal(y, torch.nn.functional.max_pool2d(x, *WINDOW, ceil_mode=ceil_mode))
    gradient = ops.max_pool_backward(y, places, x.shape, *WINDOW)
    torch.testing.assert_close(gradient, pooling.max_pool_backward(y, places, x.shape, *WINDOW))


def test_a_second_copy_has_memory_of_its_own():
    x = numbers(3, 4)
    copy = ops.another(x, x)
    assert torch.equal(copy, x)
    assert copy.data_ptr() != x.data_ptr()


class TestRefused:
    """What would read or write out of bounds, on any path."""

    @pytest.mark.parametrize(
        "change",
        [
            *({"places": lambda p: p[:-1]}, {"places": lambda p: p.int()}, {"shape": lambda s: [3, 5, 6, 2]}),
            *({"shape": lambda s: [2, 5, 6, 7]}, {"shape": lambda s: [5, 6, 7]}),
            *({"window": lambda w: ([2], [1], [1], [2])}, {"window": lambda w: ([200, 3], *w[1:])}),
            {"window": lambda w: (w[0], [0, 0], *w[2:])},
        ],
    )
    def test_pooling(self, change):
        x = numbers(3, 5, 6, 7)
        y, places = ops.max_pool(x, *WINDOW, False)
        given = {"places": places, "shape": list(x.shape), "window": WINDOW}
        given |= {name: made(given[name]) for name, made in change.items()}
        with pytest.raises((FewbitError, RuntimeError)):
            ops.max_pool_backward(y, given["places"], given["shape"], *given["window"])

    @pytest.mark.parametrize(
        "change",
        [
            *({"packed": lambda p: p[:-1]}, {"packed": lambda p: p.int()}, {"gamma": lambda g: g[:-1]}),
            *({"beta": lambda b: b.int()}, {"bits": lambda b: 4}, {"bits": lambda b: 9}),
            *({"shape": lambda s: (3, 4, 6, 7)}, {"stride": lambda s: (1000, 42, 7, 1)}),
        ],
    )
    def test_preactivation(self, change):
        x, (gamma, beta) = numbers(3, 5, 6, 7), vectors(2)
        given = {"packed": preact_codes(gamma, beta), "gamma": gamma, "beta": beta, "bits": 3}
        given |= {"slope": 0.1, "shape": x.shape, "stride": x.stride()}
        given |= {name: made(given[name]) for name, made in change.items()}
        with pytest.raises(FewbitError):
            ops.preact_decode(*given.values(), torch.float32)
