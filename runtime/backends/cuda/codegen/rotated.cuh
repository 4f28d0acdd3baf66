// ---- rotated codes: the arithmetic of runtime/backends/reference/rotated.py, step by step -------------------------------
// A group of 64, 128 or 256 numbers is that of a lane, which holds them in registers, or of two. With 32 numbers a lane
// two more steps of a turn were shuffles, and what is done once a lane (random bits, square root, quotient) took 6
// instructions an element: 50 together at 2 bits on an H100, where it is 31 now. No product is merged with a sum but one
// with 1 or -1, which is exact.

namespace fewbit {

template <int size> constexpr int held_of = size < 128 ? size : 128;
constexpr u64 shared_signs = u64(1) << 62;

// Groups of one size: the `index`-th of a row begins at start + index * size, and is the row's group first + index.
struct Pieces {
    i64 rows, D, start, count, first, of_row, counters;
    __device__ i64 total() const { return rows * count; }
    // Whether rows are nothing but these, one after the other: nothing is divided then to find them.
    __device__ bool whole(int size) const { return count * size == D; }
};

// Where a group's elements begin, where its codes do, in eights of them, and its number among all of the tensor.
struct Place { i64 element, eight, k; };

__device__ inline Place place_of(i64 group, int size, const Pieces& pieces, bool whole)
{
    if (whole)
        return {group * size, group * size / 8, group};
    const i64 row = quotient(group, pieces.count), index = group - row * pieces.count;
    const i64 in_row = pieces.start + index * size;
    return {row * pieces.D + in_row, row * ((pieces.D + 7) / 8) + in_row / 8, row * pieces.of_row + pieces.first + index};
}

// With the sign changed where bit i of a word is 1. A selection is one instruction, a shift with an exclusive or two.
__device__ inline float flipped(float x, u32 word, int i) { return word >> i & 1 ? -x : x; }

// Powers of two by which the numbers of a group, `most` the greatest, are scaled and their scale is scaled back: no
// square leaves float then, and nothing is rounded.
struct Powers {
    float down, up;
    __device__ explicit Powers(float most)
    {
        const u32 biased = __float_as_uint(most) >> 23, exponent = biased < 2 ? 2 : biased > 253 ? 253 : biased;
        down = __uint_as_float((254 - exponent) << 23), up = __uint_as_float(exponent << 23);
    }
};

// The 16 bits of a scale that are saved, to nearest even: 0 for zeros, NaN for what is not finite.
__device__ inline u32 saved_scale(float scale, float up, float most, bool finite)
{
    const u32 pattern = __float_as_uint(__fmul_rn(scale, up));
    const u32 rounded = (pattern + 0x7fff + (pattern >> 16 & 1)) >> 16;
    return !finite ? 0x7fc0 : most == 0 ? 0 : rounded < 0x7f7f ? rounded : 0x7f7f;
}

// The bits of signs of a lane's numbers; those of 128 are a counter's.
template <int held> __device__ inline void draw_signs(u64 counter, u64 seed, int lane, u32 (&words)[held / 32])
{
    const Random random = philox(counter + lane, u64(in_loop(i64(seed))));
#pragma unroll
    for (int i = 0; i < held / 32; ++i)
        words[i] = random.words[i];
}

// Four signs, 1 or -1.
struct alignas(16) FourSigns { float of[4]; };

// Signs of the passes of a turn that all groups share, 1 or -1, in shared memory.
//
// The last turn of a quantizer is crossed: it finds q = -r, of which no element is -0, so that the sign of q alone says
// whether r > 0. Of each two numbers one then has the other sign, (-a, b) or (a, -b), and both results are x - y and x + y
// of them. At first element i has the sign of i's bits' parity, negated. x - y and x + y are -0 only if x is, and so only
// if element 0 was: 0 is added to that.
template <int size> struct SharedSigns {
    FourSigns entries[size / 4];
    // Args: drawn, whether they are random; parity, whether for a crossed turn.
    __device__ void fill(u64 seed, bool drawn, bool parity)
    {
        for (int i = threadIdx.x; i < size; i += threads) {
            const Random random = philox(shared_signs + 2 + i / 128, seed);
            const u32 low = i & 32 ? random.words[1] : random.words[0], high = i & 32 ? random.words[3] : random.words[2];
            u32 bit = drawn ? (i & 64 ? high : low) >> i % 32 : 0;
            for (int k = parity ? i * 2 + 1 : 0; k > 0; k /= 2)
                bit += k;
            entries[i / 4].of[i % 4] = bit & 1 ? -1.0f : 1.0f;
        }
    }
};

// Sums and differences of two numbers and two others: two at once from sm_100 on, where b times -1 is added.
__device__ inline void sums_and_differences(
    float a, float a_next, float b, float b_next, float& sum, float& sum_next, float& difference, float& difference_next)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
    asm("{.reg .b64 a, b, sum, difference, minus;\n"
        "mov.b64 a, {%4, %5}; mov.b64 b, {%6, %7}; mov.b64 minus, {%8, %8};\n"
        "add.rn.f32x2 sum, a, b; fma.rn.f32x2 difference, b, minus, a;\n"
        "mov.b64 {%0, %1}, sum; mov.b64 {%2, %3}, difference;}"
        : "=f"(sum), "=f"(sum_next), "=f"(difference), "=f"(difference_next)
        : "f"(a), "f"(a_next), "f"(b), "f"(b_next), "f"(-1.0f));
#else
    sum = __fadd_rn(a, b), sum_next = __fadd_rn(a_next, b_next);
    difference = __fsub_rn(a, b), difference_next = __fsub_rn(a_next, b_next);
#endif
}

// Sums and differences of the group's numbers, of neighbours unless that is done; differences first if `crossed`.
template <bool done, int held, bool crossed = false> __device__ inline void butterflies(float (&r)[held])
{
    if constexpr (!done) {
#pragma unroll
        for (int i = 0; i < held; i += 2) {
            const float a = r[i], b = r[i + 1];
            r[i] = __fadd_rn(a, b), r[i + 1] = __fsub_rn(a, b);
        }
    }
#pragma unroll
    for (int step = 2; step < held; step *= 2) {
#pragma unroll
        for (int i = 0; i < held; i += 2) {
            if (i & step)
                continue;
            const int sum = crossed ? i + step : i, difference = crossed ? i : i + step;
            const float a = r[i], a_next = r[i + 1], b = r[i + step], b_next = r[i + step + 1];
            sums_and_differences(a, a_next, b, b_next, r[sum], r[sum + 1], r[difference], r[difference + 1]);
        }
    }
}

// The same with the numbers of another lane, if the group has two.
template <int size, int held, bool crossed = false> __device__ inline void butterflies_across(float (&r)[held], int lane)
{
    if constexpr (size > held) {
        const float sign = lane ? -1.0f : 1.0f;
#pragma unroll
        for (int i = 0; i < held; ++i) {
            const float other = __shfl_xor_sync(0xffffffffu, r[i], 1);
            r[i] = crossed ? __fmaf_rn(other, -sign, r[i]) : __fmaf_rn(r[i], sign, other);
        }
    }
}

// A turn of numbers with shared signs, which are products with the first sums and differences.
template <int size, int held, bool crossed>
__device__ inline void turn(float (&r)[held], const SharedSigns<size>& signs, int lane)
{
#pragma unroll
    for (int i = 0; i < held; i += 4) {
        const FourSigns sign = signs.entries[(lane * held + i) / 4];
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
            const bool first = crossed && i + j == 0;
            const float a = first ? __fmaf_rn(r[0], sign.of[0], 0.0f) : __fmul_rn(r[i + j], sign.of[j]), b = r[i + j + 1];
            r[i + j] = __fmaf_rn(b, crossed ? -sign.of[j + 1] : sign.of[j + 1], a);
            r[i + j + 1] = __fmaf_rn(b, crossed ? sign.of[j + 1] : -sign.of[j + 1], a);
        }
    }
    butterflies<true, held, crossed>(r);
    butterflies_across<size, held, crossed>(r, lane);
}

// The sum of 32 terms by halves: of both halves, of their halves and so on. Depth first: with 32 terms beside the numbers
// themselves registers would spill.
template <int n = 1, class Term> __device__ inline float halves_sum(const Term& term, int i = 0)
{
    if constexpr (n == 32)
        return term(i);
    else {
        const float first = halves_sum<2 * n>(term, i);
        return __fadd_rn(first, halves_sum<2 * n>(term, i + n));
    }
}

// The sum of a group's 32s: in pairs, pairs of pairs, and of the other lane.
template <int size, int held> __device__ inline float group_sum(float (&sums)[held / 32])
{
#pragma unroll
    for (int step = 1; step < held / 32; step *= 2)
#pragma unroll
        for (int i = 0; i < held / 32; i += 2 * step)
            sums[i] = __fadd_rn(sums[i], sums[i + step]);
    return size > held ? __fadd_rn(sums[0], __shfl_xor_sync(0xffffffffu, sums[0], 1)) : sums[0];
}

// The greatest magnitude of a group: leaves out what is not a number.
template <int size, int held> __device__ inline float greatest(const float (&r)[held])
{
    float most = 0;
#pragma unroll
    for (int i = 0; i < held; ++i)
        most = fmaxf(most, fabsf(r[i]));
    return size > held ? fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1)) : most;
}

// The sum of squares of a group that is scaled by `down`; its numbers get the signs of the bits.
template <int size, int held>
__device__ inline float scale_and_flip(float (&r)[held], float down, const u32 (&signs)[held / 32])
{
    float sums[held / 32];
#pragma unroll
    for (int block = 0; block < held / 32; ++block) {
        sums[block] = halves_sum([&](int i) {
            float& x = r[block * 32 + i];
            const float v = __fmul_rn(x, down);
            x = flipped(v, signs[block], i);
            return __fmul_rn(v, v);
        });
    }
    return group_sum<size, held>(sums);
}

// Codes of r = -q, and the sum of |q| times their levels; in `of_levels`, if they count, that of the levels' squares.
template <int size, int bits, int held, bool squared>
__device__ inline float quantized(
    const float (&q)[held], const Nearest<bits>& nearest, Codes<bits, held>& codes, float& of_levels)
{
    float along[held / 32], squares_of[held / 32];
#pragma unroll
    for (int block = 0; block < held / 32; ++block) {
        float products[32], squares[32];
#pragma unroll
        for (int end = 32; end > 0; end -= at_once<bits>) {
            u32 word = 0;
#pragma unroll
            for (int i = end - 1; i >= end - at_once<bits>; --i) {
                float level;
                word = nearest.pushed(word, q[block * 32 + i], level);
                products[i] = fabsf(__fmul_rn(q[block * 32 + i], level));
                squares[i] = __fmul_rn(level, level);
            }
            codes.put(block * 32 + end - at_once<bits>, finished<bits>(word));
        }
        along[block] = halves_sum([&](int i) { return products[i]; });
        squares_of[block] = squared ? halves_sum([&](int i) { return squares[i]; }) : 0;
    }
    of_levels = squared ? group_sum<size, held>(squares_of) : 0;
    return group_sum<size, held>(along);
}

// Where a lane's numbers begin, and which of a kernel's loops over groups it takes part in.
template <int size, int bits> struct Team {
    static constexpr int held = held_of<size>, many = size / held, groups = lanes / many;
    const int in_warp = threadIdx.x % lanes, lane = in_warp % many;
    const i64 first = (i64(blockIdx.x) * threads + threadIdx.x) / lanes * groups, stride = i64(gridDim.x) * threads / many;
    const bool whole, in_line, in_units;
    template <class T>
    __device__ Team(const Pieces& pieces, const T* x, const u8* packed)
        : whole(pieces.whole(size)), in_line(aligned(x) && pieces.D * sizeof(T) % 16 == 0),
          in_units((u64(packed) | u64((pieces.D + 7) / 8 * bits)) % Codes<bits, held>::unit == 0)
    {
    }
    // All lanes of a warp exchange numbers, so that those behind the last group take it once more.
    __device__ i64 group(i64 begin, i64 total) const
    {
        const i64 mine = begin + in_warp / many;
        return mine < total ? mine : total - 1;
    }
    __device__ i64 own(const Place& place) const { return place.element + lane * held; }
    __device__ i64 codes(const Place& place) const { return (place.eight + lane * (held / 8)) * bits; }
};

template <class T, int bits, int size> struct Quantizing {
    static constexpr int half = 1 << (bits - 1), held = held_of<size>;
    float level_of[half], edge_of[half];
    SharedSigns<size> signs;
    Exchange<T, held> exchanges[warps];
};

// Numbers r of a group, scaled by `powers`, to codes and the scale. A loop for each kind of scale: of a branch within one
// the compiler puts off what both of its ways have in common, and keeps all levels until then.
template <class T, int bits, int size, bool unbiased>
__device__ inline void quantize_groups(
    const T* x, u8* packed, u16* scales, const Pieces& pieces, int turns, u64 seed, Quantizing<T, bits, size>& shared)
{
    constexpr int held = held_of<size>;
    const Team<size, bits> team(pieces, x, packed);
    const int lane = team.lane;
    const float unit = turns == 2 ? float(size) : 1.0f;
    for (i64 begin = team.first; begin < pieces.total(); begin += team.stride) {
        const i64 group = team.group(begin, pieces.total());
        float r[held];
        const Place here = place_of(group, size, pieces, team.whole);
        const bool dense = team.whole && team.in_line && begin + team.groups <= pieces.total();
        shared.exchanges[threadIdx.x / lanes].load(x, team.own(here), dense, team.in_line, team.in_warp, r);
        const float most = greatest<size>(r);
        const Powers powers(most);
        u32 own[held / 32];
        draw_signs<held>(u64(here.k * pieces.counters), seed, lane, own);
        const float energy = scale_and_flip<size>(r, powers.down, own);
        const bool finite = most <= limit<float> && energy == energy;
        if (turns == 2) {
            butterflies<false>(r);
            butterflies_across<size>(r, lane);
        }
        turn<size, held, true>(r, shared.signs, lane);
        const Nearest<bits> nearest(shared.edge_of, shared.level_of, __fsqrt_rn(__fmul_rn(energy, unit)));
        Codes<bits, held> codes = {};
        float squares;
        const float along = quantized<size, bits, held, !unbiased>(r, nearest, codes, squares);
        constexpr float once = 1.0f / size;
        const float least = __fmul_rn(__fdiv_rn(along, squares), turns == 2 ? __fmul_rn(once, once) : once);
        const u32 kept = saved_scale(unbiased ? __fdiv_rn(energy, along) : least, powers.up, most, finite);
        if (begin + team.in_warp / team.many >= pieces.total())
            continue;
        const Place place = place_of(in_loop(group), size, pieces, team.whole);
        if (lane == 0)
            scales[place.k] = u16(kept);
#pragma unroll
        for (int i = 0; i < codes.many; ++i)
            codes.words[i] = kept && finite ? codes.words[i] : 0;
        codes.store(packed + team.codes(place), team.in_units, shared.exchanges[threadIdx.x / lanes].words(team.in_warp));
    }
}

template <class T, int bits, int size>
__device__ inline void quantize_rotated(const T* x, u8* packed, u16* scales, Pieces pieces, int turns, bool unbiased,
    const float* levels, const float* edges, u64 seed)
{
    __shared__ Quantizing<T, bits, size> shared;
    for (int i = threadIdx.x; i < shared.half; i += threads)
        shared.edge_of[i] = edges[i], shared.level_of[i] = levels[i];
    shared.signs.fill(seed, turns == 2, true);
    __syncthreads();
    if (unbiased)
        quantize_groups<T, bits, size, true>(x, packed, scales, pieces, turns, seed, shared);
    else
        quantize_groups<T, bits, size, false>(x, packed, scales, pieces, turns, seed, shared);
}

template <class T, int bits, int size>
__device__ inline void dequantize_rotated(
    const u8* packed, const u16* scales, T* out, Pieces pieces, int turns, const float* levels, u64 seed)
{
    constexpr int held = held_of<size>;
    __shared__ LevelsOf<bits> table;
    __shared__ SharedSigns<size> shared;
    __shared__ Exchange<T, held> exchanges[warps];
    table.fill(levels);
    shared.fill(seed, true, false);
    __syncthreads();
    const Team<size, bits> team(pieces, out, packed);
    const int lane = team.lane;
    // No sum of so many levels, the greatest of which is below 8, exceeds it.
    const float reach = turns == 2 ? 8.0f * size * size : 8.0f * size;
    for (i64 begin = team.first; begin < pieces.total(); begin += team.stride) {
        const Place place = place_of(team.group(begin, pieces.total()), size, pieces, team.whole);
        Codes<bits, held> codes;
        codes.load(packed + team.codes(place), team.in_units, exchanges[threadIdx.x / lanes].words(team.in_warp));
        const float factor = __uint_as_float(u32(scales[place.k]) << 16);
        float r[held];
#pragma unroll
        for (int i = 0; i < held; i += table.together) {
            const auto entry = table.of(codes.get(i, bits * table.together, table.scale));
#pragma unroll
            for (int j = 0; j < table.together; ++j)
                r[i + j] = entry.at[j];
        }
        butterflies<table.pairs>(r);
        butterflies_across<size>(r, lane);
        if (turns == 2)
            turn<size, held, false>(r, shared, lane);
        u32 own[held / 32];
        draw_signs<held>(u64(place.k * pieces.counters), seed, lane, own);
#pragma unroll
        for (int i = 0; i < held; ++i)
            r[i] = flipped(__fmul_rn(r[i], factor), own[i / 32], i % 32);
        const bool rare = !(factor > 0 && __fmul_rn(factor, reach) <= limit<T>);
        const i64 left = (pieces.total() - begin) * team.many;
        const bool dense = team.whole && team.in_line && left >= lanes;
        exchanges[threadIdx.x / lanes].store(out, team.own(place), dense, team.in_line, left, rare, factor, team.in_warp, r);
    }
}

}  // namespace fewbit
