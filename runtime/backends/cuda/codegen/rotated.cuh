// ---- rotated codes: the arithmetic of runtime/backends/reference/rotated.py, step by step -------------------------------
// A group of 64, 128 or 256 numbers is that of 2, 4 or 8 lanes, each with 32 in registers: five of the six to eight steps of
// a turn are additions in registers, the others exchange all with another lane. No product is merged with a sum but one
// with 1 or -1, which is exact.

namespace fewbit {

constexpr int held = 32;
constexpr u64 shared_signs = u64(1) << 62;

// Groups of one size: the `index`-th of a row begins at start + index * size, and is the row's group first + index.
struct Pieces {
    i64 rows, D, start, count, first, of_row, counters;
    __device__ i64 total() const { return rows * count; }
};

__device__ inline float flipped(float x, u32 sign) { return __uint_as_float(__float_as_uint(x) ^ (sign & 0x80000000u)); }
__device__ inline float magnitude(float x) { return __uint_as_float(__float_as_uint(x) & 0x7fffffffu); }

// The same number, of which nothing is computed ahead of a loop: 32 shifted ones would fill registers all the way.
__device__ inline u32 in_loop(u32 word)
{
#ifdef __CUDACC__
    asm volatile("" : "+r"(word));
#endif
    return word;
}

// The bits of a lane's 32 numbers: lane i mod 4 has word i of the counter's four.
__device__ inline u32 sign_word(u64 counter, u64 seed, int lane)
{
    const Random random = philox(counter + lane / 4, seed);
    const u32 low = lane & 1 ? random.words[1] : random.words[0], high = lane & 1 ? random.words[3] : random.words[2];
    return lane & 2 ? high : low;
}

// Sums and differences of the group's numbers, of neighbours first.
template <int size> __device__ inline void butterflies(float (&r)[held], int lane)
{
#pragma unroll
    for (int step = 1; step < held; step *= 2) {
#pragma unroll
        for (int i = 0; i < held; ++i) {
            if (!(i & step)) {
                const float a = r[i], b = r[i + step];
                r[i] = __fadd_rn(a, b);
                r[i + step] = __fsub_rn(a, b);
            }
        }
    }
#pragma unroll
    for (int step = 1; step < size / held; step *= 2) {
        const float sign = lane & step ? -1.0f : 1.0f;
#pragma unroll
        for (int i = 0; i < held; ++i)
            r[i] = __fmaf_rn(r[i], sign, __shfl_xor_sync(0xffffffffu, r[i], step));
    }
}

// The sum of a lane's numbers by halves: of both halves, of their halves and so on. Depth first, since 32 terms beside the
// numbers themselves would leave room for one block on a multiprocessor.
template <int n, class Term> __device__ inline float halves_sum(const Term& term, int i = 0)
{
    if constexpr (n == held)
        return term(i);
    else {
        const float first = halves_sum<2 * n>(term, i);
        return __fadd_rn(first, halves_sum<2 * n>(term, i + n));
    }
}

// The sum of `term(i)` over a group's numbers: a lane's by halves, then those of pairs of lanes and so on.
template <int size, class Term> __device__ inline float group_sum(const Term& term)
{
    float sum = halves_sum<1>(term);
#pragma unroll
    for (int step = 1; step < size / held; step *= 2)
        sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, step));
    return sum;
}

// The levels of all codes in shared memory.
template <int bits> __device__ inline void fill_levels(float (&to)[1 << bits], const float* levels)
{
    constexpr int half = 1 << (bits - 1);
    for (int i = threadIdx.x; i < 1 << bits; i += threads)
        to[i] = i < half ? -levels[half - 1 - i] : levels[i - half];
    __syncthreads();
}

template <class T, int bits, int size>
__device__ inline void quantize_rotated(const T* x, u8* packed, u16* scales, Pieces pieces, int turns, bool unbiased,
    const float* levels, const float* edges, u64 seed)
{
    constexpr int team = size / held, half = 1 << (bits - 1);
    __shared__ float level_of[1 << bits], edge_of[half];
    for (int i = threadIdx.x; i < half; i += threads)
        edge_of[i] = edges[i];
    fill_levels<bits>(level_of, levels);
    const int lane = threadIdx.x % team;
    const u32 shared = sign_word(shared_signs + 2, seed, lane);
    const i64 width = (pieces.D + 7) / 8, stride = i64(gridDim.x) * threads / team;
    const i64 at_once = lanes / team, warp = (i64(blockIdx.x) * threads + threadIdx.x) / lanes;
    const float unit = turns == 2 ? float(size) : 1.0f;
    for (i64 begin = warp * at_once; begin < pieces.total(); begin += stride) {
        // All lanes of a warp exchange numbers, so that those behind the last group take it once more.
        const i64 mine = begin + threadIdx.x % lanes / team;
        const bool there = mine < pieces.total();
        const i64 group = there ? mine : pieces.total() - 1, row = quotient(group, pieces.count);
        const i64 index = group - row * pieces.count, k = row * pieces.of_row + pieces.first + index;
        const i64 element = pieces.start + index * size + lane * held;
        float r[held];
        u32 most = 0;
#pragma unroll
        for (int i = 0; i < held; i += 8) {
            float eight[8];
            load_eight(x + row * pieces.D + element + i, 8, eight);
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                r[i + j] = eight[j];
                const u32 bits_of = __float_as_uint(magnitude(eight[j]));
                most = bits_of > most ? bits_of : most;
            }
        }
#pragma unroll
        for (int step = 1; step < team; step *= 2) {
            const u32 other = __shfl_xor_sync(0xffffffffu, most, step);
            most = other > most ? other : most;
        }
        const bool finite = most < 0x7f800000u;
        const u32 biased = most >> 23, exponent = biased < 2 ? 2 : biased > 253 ? 253 : biased;
        const float down = __uint_as_float((254 - exponent) << 23), up = __uint_as_float(exponent << 23);
        const u32 own = sign_word(u64(k * pieces.counters), seed, lane);
        const float energy = group_sum<size>([&](int i) {
            const float v = __fmul_rn(r[i], down);
            r[i] = flipped(v, own << (31 - i));
            return __fmul_rn(v, v);
        });
        butterflies<size>(r, lane);
        if (turns == 2) {
            const u32 signs = in_loop(shared);
#pragma unroll
            for (int i = 0; i < held; ++i)
                r[i] = flipped(r[i], signs << (31 - i));
            butterflies<size>(r, lane);
        }
        const float deviation = __fsqrt_rn(__fmul_rn(energy, unit));
        Word<bits> words[held / 8] = {};
        const float along = group_sum<size>([&](int i) {
            const float from = magnitude(r[i]);
            int above = 0;
#pragma unroll
            for (int step = half / 2; step > 0; step /= 2)
                above += from > __fmul_rn(deviation, edge_of[above + step - 1]) ? step : 0;
            words[i / 8] |= pack<bits>(u32(r[i] > 0 ? half + above : half - 1 - above), i % 8);
            return __fmul_rn(from, level_of[half + above]);
        });
        float scale = __fdiv_rn(energy, along);
        if (!unbiased) {
            const float of_levels = group_sum<size>([&](int i) {
                const float level = level_of[unpack<bits>(words[i / 8], i % 8)];
                return __fmul_rn(level, level);
            });
            constexpr float once = 1.0f / size;
            const float turned = turns == 2 ? __fmul_rn(once, once) : once;
            scale = __fmul_rn(__fdiv_rn(along, of_levels), turned);
        }
        const u32 pattern = __float_as_uint(__fmul_rn(scale, up));
        const u32 nearest = (pattern + 0x7fff + (pattern >> 16 & 1)) >> 16;
        const u32 kept = most == 0 ? 0 : !finite ? 0x7fc0 : nearest < 0x7f7f ? nearest : 0x7f7f;
        if (!there)
            continue;
        if (lane == 0)
            scales[k] = u16(kept);
#pragma unroll
        for (int i = 0; i < held / 8; ++i)
            store_group<bits>(packed, row * width + element / 8 + i, kept && finite ? words[i] : Word<bits>(0));
    }
}

template <class T, int bits, int size>
__device__ inline void dequantize_rotated(
    const u8* packed, const u16* scales, T* out, Pieces pieces, int turns, const float* levels, u64 seed)
{
    constexpr int team = size / held;
    __shared__ float level_of[1 << bits];
    fill_levels<bits>(level_of, levels);
    const int lane = threadIdx.x % team;
    const u32 shared = sign_word(shared_signs + 2, seed, lane);
    const i64 width = (pieces.D + 7) / 8, stride = i64(gridDim.x) * threads / team;
    const i64 at_once = lanes / team, warp = (i64(blockIdx.x) * threads + threadIdx.x) / lanes;
    for (i64 begin = warp * at_once; begin < pieces.total(); begin += stride) {
        const i64 mine = begin + threadIdx.x % lanes / team;
        const bool there = mine < pieces.total();
        const i64 group = there ? mine : pieces.total() - 1, row = quotient(group, pieces.count);
        const i64 index = group - row * pieces.count, k = row * pieces.of_row + pieces.first + index;
        const i64 element = pieces.start + index * size + lane * held;
        float r[held];
#pragma unroll
        for (int i = 0; i < held; i += 8) {
            const Word<bits> word = load_group<bits>(packed, row * width + (element + i) / 8);
#pragma unroll
            for (int j = 0; j < 8; ++j)
                r[i + j] = level_of[unpack<bits>(word, j)];
        }
        butterflies<size>(r, lane);
        if (turns == 2) {
            const u32 signs = in_loop(shared);
#pragma unroll
            for (int i = 0; i < held; ++i)
                r[i] = flipped(r[i], signs << (31 - i));
            butterflies<size>(r, lane);
        }
        const u32 own = sign_word(u64(k * pieces.counters), seed, lane);
        const float factor = __uint_as_float(u32(scales[k]) << 16);
#pragma unroll
        for (int i = 0; i < held; ++i) {
            const float v = __fmul_rn(flipped(r[i], own << (31 - i)), factor);
            const float above = v < -limit<T> ? -limit<T> : v;
            r[i] = factor == 0 ? 0 : above > limit<T> ? limit<T> : above;
        }
        if (!there)
            continue;
#pragma unroll
        for (int i = 0; i < held; i += 8) {
            float eight[8];
#pragma unroll
            for (int j = 0; j < 8; ++j)
                eight[j] = r[i + j];
            store_eight(eight, out + row * pieces.D + element + i, 8);
        }
    }
}

}  // namespace fewbit
