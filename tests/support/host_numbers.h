/* The conversions of 16-bit numbers that the host supplies; after numbers.cuh, which declares the types. */
namespace fewbit {

inline float widen(half x)
{
    _Float16 y;
    std::memcpy(&y, &x, 2);
    return float(y);
}

inline void narrow(float x, half& to)
{
    const _Float16 y = _Float16(x);
    std::memcpy(&to, &y, 2);
}

inline float widen(bfloat16 x) { return __uint_as_float(u32(x.bits) << 16); }

inline void narrow(float x, bfloat16& to)
{
    const u32 bits = __float_as_uint(x);
    to.bits = x != x ? 0x7fff : u16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace fewbit
