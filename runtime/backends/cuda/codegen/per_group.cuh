// ---- per-group quantization: the arithmetic of runtime/quantizers/per_group.py, step by step -----------------------
// No product is merged with a sum (__fmul_rn, __fadd_rn): every device then finds the same codes.

namespace fewbit {

// What is kept of a group: 16 bits each.
struct GroupParameters {
    u32 minimum, range;
    __device__ bool is_constant() const { return range >= 0x8000; }
    __device__ bool is_plain() const { return range != 0 && range < 0x8000; }
};

// Of a group from `low` to `high`, NaN if one of its numbers is. Without branches: lanes have groups of their own.
__device__ inline GroupParameters group_parameters(float low, float high)
{
    low = __fadd_rn(low, 0.0f), high = __fadd_rn(high, 0.0f);  // -0 becomes 0
    const u32 pattern = __float_as_uint(low);
    const u32 minimum = (pattern >> 16) + (low < 0 && (pattern & 0xffff) != 0);
    const float Z = __uint_as_float(minimum << 16);
    const float difference = __fsub_rn(high, Z);
    // What the subtraction lost (Knuth's two-sum); if something, the range is the next number.
    const float back = __fsub_rn(difference, high);
    const float lost = __fadd_rn(__fsub_rn(high, __fsub_rn(difference, back)), __fsub_rn(-Z, back));
    const float least = __uint_as_float(0x1f800000);  // 2^-64
    const u32 range = (__float_as_uint(difference > least ? difference : least) + (lost > 0) + 0xffff) >> 16;
    const bool finite = low >= -limit<float> && high <= limit<float>;
    const bool constant = finite && low == high;
    const bool plain = finite && (minimum & 0x7f80) != 0x7f80 && range < 0x7f80;
    return {constant ? pattern >> 16 : plain ? minimum : 0x7fc0u,
            constant ? (pattern & 0x7fff) | 0x8000 : plain ? range : 0u};
}

// The same of the ends as integers in order.
__device__ inline GroupParameters group_parameters_of_keys(int low, int high)
{
    return group_parameters(__uint_as_float(u32(ordered(low))), __uint_as_float(u32(ordered(high))));
}

// Where the codes of the samples lie (runtime/tensors/packing.py).
struct Rows {
    i64 N, D, width;
    const u8* sample_bits;  // of each sample, or null
    const i64* starts;      // first byte of each sample, or null
    i64 size;               // bytes of all codes, where samples have bits of their own
    __device__ i64 start(i64 n, int bits) const { return starts ? starts[n] : n * width * bits; }
    // The bits come from the device's memory, where the host does not look at them.
    __device__ bool holds(i64 n, int bits) const
    {
        return !starts || (starts[n] >= 0 && starts[n] + width * bits <= size);
    }
};

const u64 NEAREST = ~u64(0);  // philox.py

// In place of random numbers: each half is 1/2.
constexpr Random to_nearest = {{0x80008000u, 0x80008000u, 0x80008000u, 0x80008000u}};

// ---- where the levels of a group lie (runtime/tensors/levels.py) ---------------------------------------------------

constexpr int chooses = -1;
constexpr int first_values = 64;  // that a group chooses by
constexpr u32 first_exponent = 108, exponents = 31;
constexpr u32 normal_lowered = (first_exponent - 1) << 7, skewed_lowered = (first_exponent - 1 - exponents) << 7;

// The number of knots, c_0, and c_j and K_j of each knot.
struct Line {
    const float* numbers;
    __device__ float at(float d) const
    {
        float y = __fmul_rn(numbers[1], d);
#pragma unroll 1
        for (int j = 0; j < int(numbers[0]); ++j) {
            const float beyond = __fsub_rn(d, numbers[3 + 2 * j]);
            y = __fadd_rn(y, __fmul_rn(numbers[2 + 2 * j], beyond > 0.0f ? beyond : 0.0f));
        }
        return y;
    }
};

// Levels equally far apart.
struct Straight {
    __device__ float at(float d) const { return d; }
};

// The lines of each number of bits, shape and direction (0: to a position, 1: to a level), `width` numbers each.
struct Levels {
    const float* lines;
    i64 width, shape;
    __device__ Line line(int bits, int shape, int direction) const
    {
        return {lines + ((bits * 3 + shape) * 2 + direction) * width};
    }
};

// The shape of a group by its saved range, which becomes the range itself.
__device__ inline int take_shape(GroupParameters& kept, i64 given)
{
    if (given != chooses)
        return int(given);
    const u32 exponent = kept.range >> 7;
    if (kept.range == 0 || exponent > 2 * exponents)
        return 0;
    kept.range += exponent <= exponents ? normal_lowered : skewed_lowered;
    return exponent <= exponents ? 1 : 2;
}

// Of the range, between which the first values are counted.
__device__ constexpr float shares[3] = {0.015625f, 0.25f, 0.75f};

// Lowers the range of a group by the shape that fits `beyond`: how many of its first values are not below 1/64, 1/4 and
// 3/4 of the range.
__device__ inline void tell_shape(GroupParameters& kept, const int (&beyond)[3])
{
    const int low = beyond[0] - beyond[1], middle = beyond[1] - beyond[2], high = beyond[2];
    if (middle > 3 * (low + high))
        kept.range -= normal_lowered;
    else if (2 * low > middle + 4 * high)
        kept.range -= skewed_lowered;
}

__device__ inline bool can_tell(GroupParameters kept)
{
    const u32 exponent = kept.range >> 7;
    return exponent >= first_exponent && exponent < first_exponent + exponents;
}

// The word of 8 codes.
template <int bits, class Curve>
__device__ inline Word<bits> codes_of(
    const float (&h)[8], i64 left, GroupParameters kept, Curve line, u64 counter, u64 seed)
{
    constexpr u32 top = (1u << bits) - 1;
    Word<bits> word = 0;
    if (kept.is_plain()) {
        const float Z = __uint_as_float(kept.minimum << 16);
        const float scale = __fdiv_rn(float(top << 16), __uint_as_float(kept.range << 16));
        Random random = to_nearest;
        if (seed != NEAREST)
            random = philox(counter, seed);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float d = __fmul_rn(__fsub_rn(h[i], Z), scale);
            const float y = __fadd_rn(line.at(d), 0.5f);
            const u32 code = (u32(int(y)) + random.half(i)) >> 16;
            if (i < left)
                word |= pack<bits>(code < top ? code : top, i);
        }
    } else if (kept.is_constant()) {
        const u32 bit = __float_as_uint(__fadd_rn(h[0], 0.0f)) >> 15 & 1;
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (i < left)
                word |= pack<bits>(bit, i);
    }
    return word;
}

constexpr int span = lanes * 8;  // elements a warp takes at once

// The codes of a group, `span` of them after the other; h holds those of the first `span`.
template <class T, int bits>
__device__ inline void write_codes(
    const T* sample, float (&h)[8], i64 begin, i64 end, GroupParameters kept, Line line, u8* row, u64 first, u64 seed,
    int lane)
{
    for (i64 at = begin + lane * 8; at < end; at += span) {
        if (at >= begin + span)
            load_eight(sample + at, end - at, h);
        store_group<bits>(row, at / 8, codes_of<bits>(h, end - at, kept, line, first + at / 8, seed));
    }
}

// Calls `work` with the number of bits as a constant: `fixed`, or if that is 0 the given one.
template <int fixed, class Work> __device__ inline void with_bits(int bits, const Work& work)
{
    if (fixed)
        return work.template run<fixed ? fixed : 1>();
    switch (bits) {
    case 1: return work.template run<1>();
    case 2: return work.template run<2>();
    case 3: return work.template run<3>();
    case 4: return work.template run<4>();
    case 5: return work.template run<5>();
    case 6: return work.template run<6>();
    case 7: return work.template run<7>();
    default: return work.template run<8>();
    }
}

template <class T> struct WriteCodes {
    const T* sample;
    float (&h)[8];
    i64 begin, end;
    GroupParameters kept;
    const Levels& levels;
    int shape;
    u8* packed;
    const Rows& rows;
    i64 n;
    u64 seed;
    int lane;
    template <int bits> __device__ void run() const
    {
        if (!rows.holds(n, bits))
            return;
        u8* row = packed + rows.start(n, bits);
        const Line line = levels.line(bits, shape, 0);
        write_codes<T, bits>(sample, h, begin, end, kept, line, row, u64(n * rows.width), seed, lane);
    }
};

// Quantize x (N, D) in groups of G, a warp each. G is a multiple of 8, or at least D.
template <class T, int fixed>
__device__ inline void quantize_any_groups(
    const T* x, u8* packed, u16* minima, u16* ranges, const Rows& rows, i64 G, u64 seed, const Levels& levels)
{
    const i64 groups = (rows.D + G - 1) / G;
    const int lane = threadIdx.x % lanes;
    for (i64 item = i64(blockIdx.x) * warps + threadIdx.x / lanes; item < rows.N * groups; item += i64(gridDim.x) * warps) {
        const i64 n = quotient(item, groups), begin = (item - n * groups) * G;
        const i64 end = begin + G < rows.D ? begin + G : rows.D;
        const T* sample = x + n * rows.D;
        int low = 0x7fffffff, high = ~0x7fffffff;
        float h[8] = {};
        for (i64 at = begin + lane * 8; at < end; at += span) {
            load_eight(sample + at, end - at, h);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int key = ordered(int(__float_as_uint(h[i])));
                if (at + i < end) {
                    low = key < low ? key : low;
                    high = key > high ? key : high;
                }
            }
        }
        if (end - begin > span && begin + lane * 8 < end)  // h holds later ones
            load_eight(sample + begin + lane * 8, end - begin - lane * 8, h);
#pragma unroll
        for (int other = 1; other < lanes; other *= 2) {
            const int their_low = __shfl_xor_sync(0xffffffffu, low, other);
            const int their_high = __shfl_xor_sync(0xffffffffu, high, other);
            low = their_low < low ? their_low : low;
            high = their_high > high ? their_high : high;
        }
        GroupParameters kept = group_parameters_of_keys(low, high);
        if (levels.shape == chooses && can_tell(kept)) {
            const float Z = __uint_as_float(kept.minimum << 16), R = __uint_as_float(kept.range << 16);
            int beyond[3];
#pragma unroll
            for (int k = 0; k < 3; ++k) {
                const float from = __fadd_rn(Z, __fmul_rn(R, shares[k]));
                int count = 0;
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    count += lane * 8 < first_values && begin + lane * 8 + i < end && h[i] >= from;
#pragma unroll
                for (int other = 1; other < lanes; other *= 2)
                    count += __shfl_xor_sync(0xffffffffu, count, other);
                beyond[k] = count;
            }
            tell_shape(kept, beyond);
        }
        if (lane == 0) {
            minima[item] = u16(kept.minimum);
            ranges[item] = u16(kept.range);
        }
        const int shape = take_shape(kept, levels.shape);
        const int bits = rows.sample_bits ? rows.sample_bits[n] : fixed;
        with_bits<fixed>(bits, WriteCodes<T>{sample, h, begin, end, kept, levels, shape, packed, rows, n, seed, lane});
    }
}

template <class T> struct ReadCodes {
    const u8* packed;
    const u16 *minima, *ranges;
    T* out;
    const Levels& levels;
    const Rows& rows;
    i64 G, groups, n, group;  // of 8 codes within the sample
    template <int bits> __device__ void run() const
    {
        const i64 at = group * 8;
        if (!rows.holds(n, bits)) {
            const float nan = __uint_as_float(0x7fc00000);
            const float nothing[8] = {nan, nan, nan, nan, nan, nan, nan, nan};
            return store_eight(nothing, out + n * rows.D + at, rows.D - at);
        }
        const Word<bits> word = load_group<bits>(packed + rows.start(n, bits), group);
        i64 g = quotient(at, G);
        GroupParameters kept = parameters(g);
        Line line = levels.line(bits, take_shape(kept, levels.shape), 1);
        float values[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (at + i >= (g + 1) * G && at + i < rows.D) {
                kept = parameters(++g);
                line = levels.line(bits, take_shape(kept, levels.shape), 1);
            }
            const u32 code = unpack<bits>(word, i);
            if (kept.is_constant()) {
                values[i] = __uint_as_float(kept.minimum << 16 | code << 15 | (kept.range & 0x7fff));
            } else {
                const float step = __fdiv_rn(__uint_as_float(kept.range << 16), float((1u << bits) - 1));
                const float above = __fmul_rn(line.at(float(code)), step);
                const float value = __fadd_rn(__uint_as_float(kept.minimum << 16), above);
                const float below = value > limit<T> ? limit<T> : value;
                values[i] = below < -limit<T> ? -limit<T> : below;
            }
        }
        store_eight(values, out + n * rows.D + at, rows.D - at);
    }
    __device__ GroupParameters parameters(i64 g) const
    {
        return {minima[n * groups + g], ranges[n * groups + g]};
    }
};

// Write the values of the codes of x (N, D) to `out`, 8 a thread. G is any number.
template <class T, int fixed>
__device__ inline void dequantize_any_groups(
    const u8* packed, const u16* minima, const u16* ranges, T* out, const Rows& rows, i64 G, const Levels& levels)
{
    const i64 groups = (rows.D + G - 1) / G;
    const i64 stride = i64(gridDim.x) * threads;
    for (i64 i = i64(blockIdx.x) * threads + threadIdx.x; i < rows.N * rows.width; i += stride) {
        const i64 n = quotient(i, rows.width);
        const int bits = rows.sample_bits ? rows.sample_bits[n] : fixed;
        with_bits<fixed>(bits, ReadCodes<T>{packed, minima, ranges, out, levels, rows, G, groups, n, i - n * rows.width});
    }
}

}  // namespace fewbit
