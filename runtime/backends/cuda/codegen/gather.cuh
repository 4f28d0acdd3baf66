// ---- eight codes in a word, and back -------------------------------------------------------------------------------

namespace fewbit {

#ifdef __CUDACC__
__device__ inline u32 permute(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }
#else
__device__ inline u32 permute(u32 a, u32 b, u32 selector)
{
    u32 y = 0;
    for (int i = 0; i < 4; ++i)
        y |= u32((u64(b) << 32 | a) >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    return y;
}
#endif

// The integer of a number from 0 to 255, in the lowest byte. The sum has its bits without a conversion, of which a
// multiprocessor does an eighth as many.
__device__ inline u32 truncated(float y)
{
#ifdef __CUDACC__
    return __float_as_uint(__fadd_rz(y, 8388608.0f));
#else
    return u32(int(y));
#endif
}

// The word of 8 codes, each that byte of a number which has nothing above. Bytes are gathered by permutations, one for
// two codes, where shifts would be two for one.
template <int bits, int byte> __device__ inline Word<bits> gather(const u32 (&numbers)[8])
{
    constexpr u32 two = byte | (4 + byte) << 4;
    u32 quads[2];
#pragma unroll
    for (int i = 0; i < 2; ++i)
        quads[i] = permute(permute(numbers[4 * i], numbers[4 * i + 1], two),
                           permute(numbers[4 * i + 2], numbers[4 * i + 3], two), 0x5410);
    if (bits == 8)
        return Word<bits>(u64(quads[1]) << 32 | quads[0]);
    if (bits == 4 || bits == 2) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            quads[i] += quads[i] >> (8 - bits);  // pairs, in bytes 0 and 2
            if (bits == 2)
                quads[i] += quads[i] >> 12;  // and all four, in byte 0
        }
        return bits == 4 ? permute(quads[0], quads[1], 0x6420) : permute(quads[0], quads[1], 0x40) & 0xffff;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        if (bits < 4) {  // pairs, then four, whose bits do not meet those that stand above them
            quads[i] = (quads[i] + (quads[i] >> (8 - bits))) & 0x10001 * ((1u << 2 * bits) - 1);
            quads[i] = (quads[i] + (quads[i] >> (16 - 2 * bits))) & ((1u << 4 * bits) - 1);
        } else {
            quads[i] = (quads[i] & 0x00ff00ff) + ((quads[i] >> 8 & 0x00ff00ff) << bits);
            quads[i] = (quads[i] & 0xffff) + (quads[i] >> 16 << 2 * bits);
        }
    }
    return quads[0] + (Word<bits>(quads[1]) << 4 * bits);
}

constexpr float spread_from = 32768;  // a float whose middle bits are those of small integers, and halves have room

// The codes of a word as floats above `spread_from`. A byte is put among the bits of the float, where a conversion would
// take two instructions more, one of them of those of which a multiprocessor does an eighth as many.
template <int bits> __device__ inline void spread_above(Word<bits> word, float (&to)[8])
{
    constexpr u32 from = 0x47000000;
    if (bits == 8 || bits == 4) {
        const u32 first = bits == 8 ? u32(word) : u32(word) & 0x0f0f0f0f;
        const u32 second = bits == 8 ? u32(u64(word) >> 32) : u32(word) >> 4 & 0x0f0f0f0f;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 a = permute(first, from, 0x7404 | i << 4), b = permute(second, from, 0x7404 | i << 4);
            to[bits == 8 ? i : 2 * i] = __uint_as_float(a);
            to[bits == 8 ? 4 + i : 2 * i + 1] = __uint_as_float(b);
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int shift = i * bits - 8;  // to the second byte
        const u32 at = shift < 0 ? u32(word) << -shift : u32(word >> (shift < 0 ? 0 : shift));
        to[i] = __uint_as_float((at & ((1u << bits) - 1) << 8) | from);
    }
}

// The codes of a word as floats.
template <int bits> __device__ inline void spread(Word<bits> word, float (&to)[8])
{
    if (bits == 8) {
#pragma unroll
        for (int i = 0; i < 8; ++i)
            to[i] = float(u8(u32(word >> i / 4 * 32) >> i % 4 * 8));
    } else if (bits == 4) {
        const u32 even = u32(word) & 0x0f0f0f0f, odd = u32(word) >> 4 & 0x0f0f0f0f;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            to[2 * i] = float(u8(even >> i * 8)), to[2 * i + 1] = float(u8(odd >> i * 8));
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i)
            to[i] = float(unpack<bits>(word, i));
    }
}

}  // namespace fewbit
