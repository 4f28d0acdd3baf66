// ---- rotated codes in registers: how they are found, packed and unpacked ---------------------------------------------

namespace fewbit {

// A word shifted by one bit, and below it the sign of x: one instruction, a funnel shift.
__device__ inline u32 with_sign(u32 word, float x) { return word << 1 | __float_as_uint(x) >> 31; }

// Codes that are pushed into a word of their own, the last first: a power of two.
template <int bits> constexpr int at_once = bits > 4 ? 4 : bits > 2 ? 8 : 32 / bits;

// The codes of a lane's numbers: element i at bit i * bits.
template <int bits, int held> struct Codes {
    // What a lane loads and stores at once: the largest part of 32 codes that they are a multiple of, up to 16 bytes.
    static constexpr int unit = (4 * bits & -4 * bits) > 16 ? 16 : 4 * bits & -4 * bits, many = held / 32 * bits;
    u32 words[many];
    __device__ void put(int i, u32 found)
    {
        const int at = i * bits, bit = at % 32;
        words[at / 32] |= found << bit;
        if (bit + at_once<bits> * bits > 32)
            words[at / 32 + 1] |= found >> (32 - bit);
    }
    // `width` bits from element i on, times 2^scale.
    __device__ u32 get(int i, int width, int scale) const
    {
        const int at = i * bits, bit = at % 32;
        const u32 mask = ((1u << width) - 1) << scale;
        if (bit + width > 32)
            return (words[at / 32] >> bit | words[at / 32 + 1] << (32 - bit)) << scale & mask;
        return (bit > scale ? words[at / 32] >> (bit - scale) : words[at / 32] << (scale - bit)) & mask;
    }
    // By words from a room for them in shared memory: byte by byte, in a loop, where they do not lie in units.
    __device__ void store(u8* to, bool in_units, u32* room) const
    {
        struct alignas(unit) Part { u32 at[unit / 4]; };
        if (in_units) {
#pragma unroll
            for (int i = 0; i < many; i += unit / 4)
                *reinterpret_cast<Part*>(to + 4 * i) = *reinterpret_cast<const Part*>(words + i);
            return;
        }
#pragma unroll
        for (int i = 0; i < many; ++i)
            room[i] = words[i];
#pragma unroll 1
        for (int i = 0; i < 4 * many; ++i)
            to[i] = u8(room[i / 4] >> i % 4 * 8);
    }
    __device__ void load(const u8* from, bool in_units, u32* room)
    {
        struct alignas(unit) Part { u32 at[unit / 4]; };
        if (in_units) {
#pragma unroll
            for (int i = 0; i < many; i += unit / 4) {
                const Part part = *reinterpret_cast<const Part*>(from + 4 * i);
#pragma unroll
                for (int j = 0; j < unit / 4; ++j)
                    words[i + j] = part.at[j];
            }
            return;
        }
        __syncwarp();
#pragma unroll 1
        for (int i = 0; i < many; ++i)
            room[i] = from[4 * i] | u32(from[4 * i + 1]) << 8 | u32(from[4 * i + 2]) << 16 | u32(from[4 * i + 3]) << 24;
#pragma unroll
        for (int i = 0; i < many; ++i)
            words[i] = room[i];
    }
};

// The levels of all codes in shared memory; where they are few, of two neighbours the sum and the difference: half the
// loads, and the first of the butterflies.
template <int bits> struct LevelsOf {
    static constexpr bool pairs = bits <= 4;
    static constexpr int together = pairs ? 2 : 1, size = 1 << bits * together, scale = pairs ? 3 : 2;  // 2^scale bytes
    struct alignas(4 * together) Entry { float at[together]; };
    Entry entries[size];
    static __device__ float level(const float* positive, int code)
    {
        constexpr int half = 1 << (bits - 1);
        return code < half ? -positive[half - 1 - code] : positive[code - half];
    }
    __device__ void fill(const float* positive)
    {
        for (int i = threadIdx.x; i < size; i += threads) {
            const float first = level(positive, i & ((1 << bits) - 1));
            if constexpr (pairs) {
                const float second = level(positive, i >> bits);
                entries[i] = {__fadd_rn(first, second), __fsub_rn(first, second)};
            }
            else
                entries[i] = {first};
        }
    }
    // Of the code, or two, at so many bytes.
    __device__ Entry of(u32 bytes) const
    {
        return *reinterpret_cast<const Entry*>(reinterpret_cast<const u8*>(entries) + bytes);
    }
};

// How many of the edges, times the deviation, a magnitude is above, and the level there.
template <int bits> struct Nearest {
    static constexpr int half = 1 << (bits - 1);
    static constexpr bool few = bits <= 3;  // edges and levels are in registers
    static constexpr int hoisted = few ? half : 3;  // else the products of the first two comparisons
    float edges[hoisted], levels[few ? half : 1], deviation;
    const float *all_edges, *all_levels;
    __device__ Nearest(const float* edge_of, const float* level_of, float deviation)
        : deviation(deviation), all_edges(edge_of), all_levels(level_of)
    {
        if constexpr (few) {
#pragma unroll
            for (int i = 0; i < half; ++i)
                edges[i] = __fmul_rn(deviation, edge_of[i]), levels[i] = level_of[i];
        }
        else {
#pragma unroll
            for (int i = 0; i < 3; ++i)
                edges[i] = __fmul_rn(deviation, edge_of[(i + 1) * half / 4 - 1]);
        }
    }
    __device__ u32 above(float from, float& level) const
    {
        const bool far = from > edges[1], farther = from > (far ? edges[2] : edges[0]);
        int found = (far ? half / 2 : 0) + (farther ? half / 4 : 0);
#pragma unroll
        for (int step = half / 8; step > 0; step /= 2)
            found += from > __fmul_rn(deviation, all_edges[found + step - 1]) ? step : 0;
        level = all_levels[found];
        return u32(found);
    }
    // The word with the sign of q and what it is above behind it: what `finished` makes codes of. A bit is the sign of the
    // edge or level that it chooses, where these are in registers; so levels may be negative.
    __device__ u32 pushed(u32 word, float q, float& level) const
    {
        const float from = fabsf(q);
        word = with_sign(word, q);
        if constexpr (bits == 1) {
            level = levels[0];
            return word;
        }
        else if constexpr (bits == 2) {
            level = from > edges[0] ? -levels[1] : levels[0];
            return with_sign(word, level);
        }
        else if constexpr (bits == 3) {
            const bool far = from > edges[1];
            const float edge = far ? -edges[2] : edges[0];
            const bool farther = from > fabsf(edge);
            const float near_level = farther ? -levels[1] : levels[0], far_level = farther ? -levels[3] : levels[2];
            level = far ? far_level : near_level;
            return with_sign(with_sign(word, edge), level);
        }
        else
            return word << (bits - 1) | above(from, level);
    }
};

// The codes of a word of pushed ones: the lower bits count from the other end where the sign is 0.
template <int bits> __device__ inline u32 finished(u32 word)
{
    constexpr u32 signs = [] {
        u32 found = 0;
        for (int i = 0; i < at_once<bits>; ++i)
            found |= 1u << (i * bits + bits - 1);
        return found;
    }();
    const u32 other = ~word & signs;
    return bits == 1 ? word : word ^ (bits == 2 ? other >> 1 : (other >> (bits - 1)) * ((1u << (bits - 1)) - 1));
}

}  // namespace fewbit
