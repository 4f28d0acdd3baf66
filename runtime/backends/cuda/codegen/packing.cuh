// ---- the packed code: 8 codes of b bits make b bytes, little-endian, element 0 in the lowest bits ----------------

namespace fewbit {

// Holds the 8 codes of a group.
template <int bits> struct word_of { using type = u64; };
template <> struct word_of<1> { using type = u32; };
template <> struct word_of<2> { using type = u32; };
template <> struct word_of<3> { using type = u32; };
template <> struct word_of<4> { using type = u32; };
template <int bits> using Word = typename word_of<bits>::type;

// The largest unit that a group's bytes are a multiple of, and so aligned to where groups follow each other.
template <int size> struct unit_of { using type = u8; };
template <> struct unit_of<2> { using type = u16; };
template <> struct unit_of<4> { using type = u32; };
template <> struct unit_of<8> { using type = u64; };
template <int bits> using Unit = typename unit_of<(bits & -bits)>::type;

// Element `index` of a group has this code.
template <int bits> __device__ inline u32 unpack(Word<bits> word, int index)
{
    return u32(word >> (index * bits)) & ((1u << bits) - 1);
}

// A group's word with `code` at element `index`, the others 0.
template <int bits> __device__ inline Word<bits> pack(u32 code, int index)
{
    return Word<bits>(code) << (index * bits);
}

// Write the bytes of a group, the first `group` of which stand before it.
template <int bits> __device__ inline void store_group(u8* packed, i64 group, Word<bits> word)
{
    Unit<bits>* to = reinterpret_cast<Unit<bits>*>(packed + group * bits);
#pragma unroll
    for (int i = 0; i < bits / int(sizeof(Unit<bits>)); ++i)
        to[i] = Unit<bits>(word >> (i * 8 * int(sizeof(Unit<bits>))));
}

template <int bits> __device__ inline Word<bits> load_group(const u8* packed, i64 group)
{
    const Unit<bits>* from = reinterpret_cast<const Unit<bits>*>(packed + group * bits);
    Word<bits> word = 0;
#pragma unroll
    for (int i = 0; i < bits / int(sizeof(Unit<bits>)); ++i)
        word |= Word<bits>(from[i]) << (i * 8 * int(sizeof(Unit<bits>)));
    return word;
}

// A warp copies bytes between shared memory and the packed code, 16 a lane. Both addresses are multiples of 16.
template <int bytes> __device__ inline void warp_copy(const u8* from, u8* to, int lane)
{
    struct alignas(16) Line { u64 low, high; };
#pragma unroll
    for (int line = 0; line < bytes / 16; line += 32)
        if (line + lane < bytes / 16)
            reinterpret_cast<Line*>(to)[line + lane] = reinterpret_cast<const Line*>(from)[line + lane];
}

// The same of a number of bytes that is not known, one a lane.
__device__ inline void warp_copy_part(const u8* from, u8* to, i64 bytes, int lane)
{
#pragma unroll 1
    for (int i = lane; i < bytes; i += 32)
        to[i] = from[i];
}

}  // namespace fewbit
