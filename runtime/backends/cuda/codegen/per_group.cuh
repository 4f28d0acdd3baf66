// ---- per-group quantization: the arithmetic of runtime/quantizers/per_group.py, step by step -----------------------
// No product is merged with a sum (__fmul_rn, __fadd_rn): every device then finds the same codes.

namespace fewbit {

// What is kept of a group: 16 bits each.
struct GroupParameters {
    u32 minimum, range;
    __device__ bool is_constant() const { return range >= 0x8000; }
    __device__ bool is_plain() const { return range != 0 && range < 0x8000; }
};

__device__ inline GroupParameters group_parameters(int low_key, int high_key)
{
    constexpr int largest = 0x7f7fffff;
    const GroupParameters not_finite = {0x7fc0, 0};
    if (low_key < ~largest || high_key > largest)
        return not_finite;
    const float low = __fadd_rn(__uint_as_float(u32(ordered(low_key))), 0.0f);  // -0 becomes 0
    const float high = __fadd_rn(__uint_as_float(u32(ordered(high_key))), 0.0f);
    const u32 pattern = __float_as_uint(low);
    if (low == high)
        return {pattern >> 16, (pattern & 0x7fff) | 0x8000};
    const u32 minimum = (pattern >> 16) + (low < 0 && (pattern & 0xffff) != 0);
    const float Z = __uint_as_float(minimum << 16);
    const float difference = __fsub_rn(high, Z);
    // What the subtraction lost (Knuth's two-sum); if something, the range is the next number.
    const float back = __fsub_rn(difference, high);
    const float lost = __fadd_rn(__fsub_rn(high, __fsub_rn(difference, back)), __fsub_rn(-Z, back));
    const float least = __uint_as_float(0x0d800000);  // 2^-100
    const u32 range = (__float_as_uint(difference > least ? difference : least) + (lost > 0) + 0xffff) >> 16;
    if ((minimum & 0x7f80) == 0x7f80 || range >= 0x7f80)
        return not_finite;
    return {minimum, range};
}

// Where the codes of the samples lie (runtime/tensors/rows.py).
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

// The word of 8 codes.
template <int bits>
__device__ inline Word<bits> codes_of(const float (&h)[8], i64 left, GroupParameters kept, u64 counter, u64 seed)
{
    constexpr u32 top = (1u << bits) - 1;
    Word<bits> word = 0;
    if (kept.is_plain()) {
        const float Z = __uint_as_float(kept.minimum << 16);
        const float scale = __fdiv_rn(float(top << 16), __uint_as_float(kept.range << 16));
        const Random random = philox(counter, seed);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float y = __fadd_rn(__fmul_rn(__fsub_rn(h[i], Z), scale), 0.5f);
            const u32 chance = seed == NEAREST ? 0x8000u : random.half(i);
            const u32 code = (u32(int(y)) + chance) >> 16;
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
    const T* sample, float (&h)[8], i64 begin, i64 end, GroupParameters kept, u8* row, u64 first, u64 seed, int lane)
{
    for (i64 at = begin + lane * 8; at < end; at += span) {
        if (at >= begin + span)
            load_eight(sample + at, end - at, h);
        store_group<bits>(row, at / 8, codes_of<bits>(h, end - at, kept, first + at / 8, seed));
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
        write_codes<T, bits>(sample, h, begin, end, kept, row, u64(n * rows.width), seed, lane);
    }
};

// Quantize x (N, D) in groups of G, a warp each. G is a multiple of 8, or at least D.
template <class T, int fixed>
__device__ inline void quantize_groups(
    const T* x, u8* packed, u16* minima, u16* ranges, const Rows& rows, i64 G, u64 seed)
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
        const GroupParameters kept = group_parameters(low, high);
        if (lane == 0) {
            minima[item] = u16(kept.minimum);
            ranges[item] = u16(kept.range);
        }
        const int bits = rows.sample_bits ? rows.sample_bits[n] : fixed;
        with_bits<fixed>(bits, WriteCodes<T>{sample, h, begin, end, kept, packed, rows, n, seed, lane});
    }
}

template <class T> struct ReadCodes {
    const u8* packed;
    const u16 *minima, *ranges;
    T* out;
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
        float values[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (at + i >= (g + 1) * G && at + i < rows.D)
                kept = parameters(++g);
            const u32 code = unpack<bits>(word, i);
            if (kept.is_constant()) {
                values[i] = __uint_as_float(kept.minimum << 16 | code << 15 | (kept.range & 0x7fff));
            } else {
                const float step = __fdiv_rn(__uint_as_float(kept.range << 16), float((1u << bits) - 1));
                const float value = __fadd_rn(__uint_as_float(kept.minimum << 16), __fmul_rn(float(code), step));
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
__device__ inline void dequantize_groups(
    const u8* packed, const u16* minima, const u16* ranges, T* out, const Rows& rows, i64 G)
{
    const i64 groups = (rows.D + G - 1) / G;
    const i64 stride = i64(gridDim.x) * threads;
    for (i64 i = i64(blockIdx.x) * threads + threadIdx.x; i < rows.N * rows.width; i += stride) {
        const i64 n = quotient(i, rows.width);
        const int bits = rows.sample_bits ? rows.sample_bits[n] : fixed;
        with_bits<fixed>(bits, ReadCodes<T>{packed, minima, ranges, out, rows, G, groups, n, i - n * rows.width});
    }
}

}  // namespace fewbit
