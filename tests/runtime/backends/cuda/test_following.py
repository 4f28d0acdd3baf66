"""The kernels whose table lies in memory, built by g++: the codes and products of plain torch."""

import fewbit
import pytest
import torch
from fewbit.runtime.backends.cuda import following as cuda
from fewbit.runtime.backends.reference import activation as reference
from host_kernels import needs_gxx, start_following
from runtime_cases import all_halves, assert_same_bits, key_of, table_of_bits

TABLES = [table_of_bits(1), table_of_bits(3, "interval"), fewbit.load_table("gelu", 4), table_of_bits(8)]


@needs_gxx
@pytest.mark.parametrize("table", TABLES, ids=lambda table: f"{table.kind}-{table.bits}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_codes_and_products_are_those_of_plain_torch(monkeypatch, table, dtype):
    monkeypatch.setattr(cuda, "available", lambda device: True)
    monkeypatch.setattr(
        cuda,
        "_launch",
        lambda name, x, bits, *arguments: start_following(str(x.dtype).removeprefix("torch."), bits, name, *arguments),
    )
    key = key_of(table)
    numbers = all_halves(torch.bfloat16).to(dtype)
    boundaries = torch.tensor(table.boundaries).to(dtype)
    x = torch.cat([numbers, boundaries, boundaries.nextafter(torch.tensor(torch.inf, dtype=dtype))])[:-1]
    y, packed = cuda.activation(x.view(1, -1), "gelu", [], key)
    expected, expected_packed = reference.activation(x.view(1, -1), "gelu", [], key)
    assert_same_bits(y, expected)
    assert torch.equal(packed, expected_packed)
    shifted = torch.cat([packed[:1], packed])[1:]  # at an odd address
    assert_same_bits(cuda.multiply(x, shifted, key), reference.multiply(x, packed, key))
