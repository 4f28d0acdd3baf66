import pytest
import torch
from fewbit.runtime.tensors.packing import GROUP, pack, pack_mask, packed_size, unpack, unpack_mask
from hypothesis import given
from hypothesis import strategies as st

BITS = range(1, 9)
SIZES = [0, 1, 7, 8, 9, 511, 512, 513]


def by_specification(codes, bits):
    """Each 8 codes are one little-endian number of 8·bits bits, the first code lowest, missing codes 0."""
    packed = b""
    for start in range(0, len(codes), 8):
        number = sum(code << (bits * j) for j, code in enumerate(codes[start : start + 8]))
        packed += number.to_bytes(bits, "little")
    return list(packed)


def random_codes(n, bits):
    return torch.randint(0, 1 << bits, (n,), generator=torch.Generator().manual_seed(n)).to(torch.uint8)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("bits", BITS)
class TestEverySize:
    def test_pack_follows_the_specification(self, bits, n):
        codes = random_codes(n, bits)
        packed = pack(codes, bits)
        assert packed.dtype == torch.uint8
        assert packed.tolist() == by_specification(codes.tolist(), bits)

    def test_unpack_undoes_pack(self, bits, n):
        codes = random_codes(n, bits)
        assert torch.equal(unpack(pack(codes, bits), bits, n), codes)

    def test_packed_size_is_bits_bytes_for_each_group_of_eight(self, bits, n):
        assert packed_size(n, bits) == -(-n // 8) * bits == pack(random_codes(n, bits), bits).numel()


@given(st.data(), st.integers(1, 8))
def test_any_codes_follow_the_specification_and_come_back(data, bits):
    codes = data.draw(st.lists(st.integers(0, (1 << bits) - 1), max_size=70))
    packed = pack(torch.tensor(codes, dtype=torch.uint8), bits)
    assert packed.tolist() == by_specification(codes, bits)
    assert unpack(packed, bits, len(codes)).tolist() == codes


@given(st.integers(1, 8), st.lists(st.integers(0, 255), min_size=1, max_size=20))
def test_every_byte_string_is_some_codes(bits, content):
    """Whole groups have no spare bits: what is unpacked packs to the same bytes."""
    packed = torch.tensor((content * bits)[: len(content) * bits], dtype=torch.uint8)
    assert torch.equal(pack(unpack(packed, bits, len(content) * GROUP), bits), packed)


@pytest.mark.parametrize("bits", BITS)
def test_codes_of_any_shape_and_layout_are_read_in_row_major_order(bits):
    codes = random_codes(60, bits).view(3, 4, 5)
    assert torch.equal(pack(codes, bits), pack(codes.flatten(), bits))
    turned = codes.permute(2, 0, 1)
    assert torch.equal(pack(turned, bits), pack(turned.flatten(), bits))


def test_one_bit_is_the_order_of_numpy_packbits():
    codes = random_codes(1000, 1)
    import numpy as np

    assert pack(codes, 1).tolist() == np.packbits(codes.numpy(), bitorder="little").tolist()


@pytest.mark.parametrize("bits", BITS)
def test_the_largest_code_stays_in_its_own_bits(bits):
    top = (1 << bits) - 1
    for position in range(8):
        codes = [0] * 8
        codes[position] = top
        packed = pack(torch.tensor(codes, dtype=torch.uint8), bits)
        assert int.from_bytes(bytes(packed.tolist()), "little") == top << (position * bits)


@given(st.lists(st.booleans(), max_size=70))
def test_truth_values_are_packed_as_codes_of_one_bit(values):
    mask = torch.tensor(values, dtype=torch.bool)
    packed = pack_mask(mask)
    assert torch.equal(packed, pack(mask.to(torch.uint8), 1))
    assert torch.equal(unpack_mask(packed, len(values)), mask.to(torch.uint8))
