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

// The same number, of which nothing is computed ahead and kept: 32 shifted ones would fill registers all the way.
__device__ inline u32 in_loop(u32 word)
{
#ifdef __CUDACC__
    asm volatile("" : "+r"(word));
#endif
    return word;
}

__device__ inline i64 in_loop(i64 word)
{
#ifdef __CUDACC__
    asm volatile("" : "+l"(word));
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

// Two sums side by side.
struct Two {
    float first, second;
};
__device__ inline float added(float a, float b) { return __fadd_rn(a, b); }
__device__ inline Two added(Two a, Two b) { return {__fadd_rn(a.first, b.first), __fadd_rn(a.second, b.second)}; }
__device__ inline float of_lane(float sum, int step) { return __shfl_xor_sync(0xffffffffu, sum, step); }
__device__ inline Two of_lane(Two sum, int step) { return {of_lane(sum.first, step), of_lane(sum.second, step)}; }

// The sum of a lane's numbers by halves: of both halves, of their halves and so on. Depth first, since 32 terms beside the
// numbers themselves would leave room for one block on a multiprocessor.
template <int n, class Term> __device__ inline auto halves_sum(const Term& term, int i = 0)
{
    if constexpr (n == held)
        return term(i);
    else {
        const auto first = halves_sum<2 * n>(term, i);
        return added(first, halves_sum<2 * n>(term, i + n));
    }
}

// The sum of `term(i)` over a group's numbers: a lane's by halves, then those of pairs of lanes and so on.
template <int size, class Term> __device__ inline auto group_sum(const Term& term)
{
    auto sum = halves_sum<1>(term);
#pragma unroll
    for (int step = 1; step < size / held; step *= 2)
        sum = added(sum, of_lane(sum, step));
    return sum;
}

// The levels of all codes in shared memory, of two neighbours together where they are few: half the loads.
template <int bits> struct LevelsOf {
    static constexpr int together = bits <= 2 ? 2 : 1, size = 1 << bits * together;
    struct alignas(4 * together) Entry { float at[together]; };
    Entry entries[size];
    __device__ void fill(const float* positive)
    {
        constexpr int half = 1 << (bits - 1);
        for (int i = threadIdx.x; i < size; i += threads)
            for (int j = 0; j < together; ++j) {
                const int code = i >> j * bits & ((1 << bits) - 1);
                entries[i].at[j] = code < half ? -positive[half - 1 - code] : positive[code - half];
            }
    }
};

// The codes of a lane's 32 numbers: element i at bit i * bits of `bits` words.
template <int bits> struct Codes32 {
    // What a lane loads and stores at once: the largest part of its bytes that they are a multiple of, up to 16.
    static constexpr int bytes = 4 * bits, unit = (bytes & -bytes) > 16 ? 16 : bytes & -bytes;
    u32 words[bits];
    __device__ void add(int i, u32 code)
    {
        const int at = i * bits, bit = at % 32;
        words[at / 32] = in_loop(words[at / 32] + (code << bit));
        if (bit + bits > 32)
            words[at / 32 + 1] += code >> (32 - bit);
    }
    // `width` bits from element i on.
    __device__ u32 get(int i, int width) const
    {
        const int at = i * bits, bit = at % 32;
        u32 found = words[at / 32] >> bit;
        if (bit + width > 32)
            found |= words[at / 32 + 1] << (32 - bit);
        return found & ((1u << width) - 1);
    }
    __device__ void store(u8* to, bool at_once) const
    {
        struct alignas(unit) Part { u32 at[unit / 4]; };
        if (at_once) {
#pragma unroll
            for (int i = 0; i < bits; i += unit / 4)
                *reinterpret_cast<Part*>(to + 4 * i) = *reinterpret_cast<const Part*>(words + i);
            return;
        }
#pragma unroll
        for (int i = 0; i < bytes; ++i)
            to[i] = u8(words[i / 4] >> i % 4 * 8);
    }
    __device__ void load(const u8* from, bool at_once)
    {
        struct alignas(unit) Part { u32 at[unit / 4]; };
        if (at_once) {
#pragma unroll
            for (int i = 0; i < bits; i += unit / 4) {
                const Part part = *reinterpret_cast<const Part*>(from + 4 * i);
#pragma unroll
                for (int j = 0; j < unit / 4; ++j)
                    words[i + j] = part.at[j];
            }
            return;
        }
#pragma unroll
        for (int i = 0; i < bits; ++i)
            words[i] = 0;
#pragma unroll
        for (int i = 0; i < bytes; ++i)
            words[i / 4] |= u32(from[i]) << i % 4 * 8;
    }
};

// The numbers of a warp's lanes between memory, where neighbours take 16 bytes that lie together, and the lanes, each of
// which holds 32 that do. Of 32 floats of its own a lane would load and store a quarter of a line at a time: 297 us for
// 2^26 of them on an H100, where a copy of as many bytes takes 94.
template <class T, int size> struct Exchange {
    static constexpr int elements = Chunk<T>::size, chunks = held / elements, of_group = size / elements;
    Chunk<T> at[lanes * chunks];
    // No two of eight neighbours, by lanes or in memory, are in the same banks.
    static __device__ int slot(int chunk) { return chunk ^ (chunk >> 3 & 7); }
    // Where the group begins that a chunk is of, from `element`, where the lane's own does.
    static __device__ i64 of_chunk(i64 element, int chunk)
    {
        return __shfl_sync(0xffffffffu, element, chunk / of_group * (size / held)) + chunk % of_group * elements;
    }

    // Args: element, where the lane's group begins; dense, whether all of the warp follow each other; aligned, whether
    // rows begin where 16 bytes are loaded at once.
    __device__ void load(const T* x, i64 element, bool dense, bool aligned, int lane, float (&r)[held])
    {
        __syncwarp();
        if (dense) {
            const i64 first = element - lane / (size / held) * size;
            const Chunk<T>* from = reinterpret_cast<const Chunk<T>*>(x + first) + lane;
            Chunk<T> parts[chunks];
#pragma unroll
            for (int i = 0; i < chunks; ++i)
                parts[i] = from[i * lanes];
#pragma unroll
            for (int i = 0; i < chunks; ++i)
                at[slot(i * lanes + lane)] = parts[i];
        }
        else {
#pragma unroll 1
            for (int chunk = lane; chunk < lanes * chunks; chunk += lanes) {
                const T* from = x + of_chunk(element, chunk);
                if (aligned)
                    at[slot(chunk)] = *reinterpret_cast<const Chunk<T>*>(from);
                else
                    at[slot(chunk)].load_part(from, elements);
            }
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < chunks; ++i) {
            const Chunk<T> own = at[slot(lane * chunks + i)];
#pragma unroll
            for (int j = 0; j < elements; j += 2)
                own.get(j, r[i * elements + j], r[i * elements + j + 1]);
        }
    }

    // The same of numbers to store; of the first `groups` alone.
    __device__ void store(T* out, i64 element, bool dense, bool aligned, i64 groups, int lane, const float (&r)[held])
    {
        __syncwarp();
#pragma unroll
        for (int i = 0; i < chunks; ++i) {
            Chunk<T> own;
#pragma unroll
            for (int j = 0; j < elements; j += 2)
                own.set(j, r[i * elements + j], r[i * elements + j + 1]);
            at[slot(lane * chunks + i)] = own;
        }
        __syncwarp();
        if (dense) {
            const i64 first = element - lane / (size / held) * size;
            Chunk<T>* to = reinterpret_cast<Chunk<T>*>(out + first) + lane;
#pragma unroll
            for (int i = 0; i < chunks; ++i)
                to[i * lanes] = at[slot(i * lanes + lane)];
            return;
        }
#pragma unroll 1
        for (int chunk = lane; chunk < lanes * chunks; chunk += lanes) {
            T* to = out + of_chunk(element, chunk);
            if (chunk / of_group >= groups)
                continue;
            if (aligned)
                *reinterpret_cast<Chunk<T>*>(to) = at[slot(chunk)];
            else
                at[slot(chunk)].store_part(to, elements);
        }
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
        if constexpr (bits == 1) {
            level = levels[0];
            return 0;
        }
        else if constexpr (bits == 2) {
            const bool far = from > edges[0];
            level = far ? levels[1] : levels[0];
            return far;
        }
        else if constexpr (bits == 3) {
            const bool far = from > edges[1], farther = from > (far ? edges[2] : edges[0]);
            const float near_level = farther ? levels[1] : levels[0], far_level = farther ? levels[3] : levels[2];
            level = far ? far_level : near_level;
            return u32(far) * 2 + farther;
        }
        else {
            const bool far = from > edges[1], farther = from > (far ? edges[2] : edges[0]);
            int found = (far ? half / 2 : 0) + (farther ? half / 4 : 0);
#pragma unroll
            for (int step = half / 8; step > 0; step /= 2)
                found += from > __fmul_rn(deviation, all_edges[found + step - 1]) ? step : 0;
            level = all_levels[found];
            return u32(found);
        }
    }
};

template <class T, int bits, int size>
__device__ inline void quantize_rotated(const T* x, u8* packed, u16* scales, Pieces pieces, int turns, bool unbiased,
    const float* levels, const float* edges, u64 seed)
{
    constexpr int team = size / held, half = 1 << (bits - 1);
    __shared__ float level_of[half], edge_of[half];
    __shared__ Exchange<T, size> exchanges[warps];
    for (int i = threadIdx.x; i < half; i += threads)
        edge_of[i] = edges[i], level_of[i] = levels[i];
    __syncthreads();
    const int in_warp = threadIdx.x % lanes, lane = in_warp % team;
    const u32 shared = sign_word(shared_signs + 2, seed, lane);
    const i64 stride = i64(gridDim.x) * threads / team;
    const i64 at_once = lanes / team, warp = (i64(blockIdx.x) * threads + threadIdx.x) / lanes;
    const bool whole = pieces.whole(size), in_line = aligned(x) && pieces.D * sizeof(T) % 16 == 0;
    const bool in_units = (u64(packed) | u64((pieces.D + 7) / 8 * bits)) % Codes32<bits>::unit == 0;
    const float unit = turns == 2 ? float(size) : 1.0f;
    for (i64 begin = warp * at_once; begin < pieces.total(); begin += stride) {
        // All lanes of a warp exchange numbers, so that those behind the last group take it once more.
        const i64 mine = begin + in_warp / team;
        const bool there = mine < pieces.total();
        const i64 group = there ? mine : pieces.total() - 1;
        float r[held];
        const Place here = place_of(group, size, pieces, whole);
        const bool dense = whole && in_line && begin + at_once <= pieces.total();
        exchanges[threadIdx.x / lanes].load(x, here.element, dense, in_line, in_warp, r);
        float most = 0;
#pragma unroll
        for (int i = 0; i < held; ++i)
            most = fmaxf(most, fabsf(r[i]));  // leaves out what is not a number
#pragma unroll
        for (int step = 1; step < team; step *= 2)
            most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, step));
        const Powers powers(most);
        const u32 own = sign_word(u64(here.k * pieces.counters), seed, lane);
        const float energy = group_sum<size>([&](int i) {
            const float v = __fmul_rn(r[i], powers.down);
            r[i] = flipped(v, own, i);
            return __fmul_rn(v, v);
        });
        const bool finite = most <= limit<float> && energy == energy;
        butterflies<size>(r, lane);
        if (turns == 2) {
            const u32 signs = in_loop(shared);
#pragma unroll
            for (int i = 0; i < held; ++i)
                r[i] = flipped(r[i], signs, i);
            butterflies<size>(r, lane);
        }
        const Nearest<bits> nearest(edge_of, level_of, __fsqrt_rn(__fmul_rn(energy, unit)));
        Codes32<bits> codes = {};
        const auto quantized = [&](int i, float& level) {
            const float from = fabsf(r[i]);
            const u32 above = nearest.above(from, level);
            codes.add(i, above ^ (r[i] > 0 ? half : half - 1));
            return __fmul_rn(from, level);
        };
        float scale;
        if (unbiased) {
            const float along = group_sum<size>([&](int i) {
                float level;
                return quantized(i, level);
            });
            scale = __fdiv_rn(energy, along);
        }
        else {
            const Two sums = group_sum<size>([&](int i) {
                float level;
                const float product = quantized(i, level);
                return Two{product, __fmul_rn(level, level)};
            });
            constexpr float once = 1.0f / size;
            const float turned = turns == 2 ? __fmul_rn(once, once) : once;
            scale = __fmul_rn(__fdiv_rn(sums.first, sums.second), turned);
        }
        const u32 kept = saved_scale(scale, powers.up, most, finite);
        if (!there)
            continue;
        const Place place = place_of(in_loop(group), size, pieces, whole);
        if (lane == 0)
            scales[place.k] = u16(kept);
#pragma unroll
        for (int i = 0; i < bits; ++i)
            codes.words[i] = kept && finite ? codes.words[i] : 0;
        codes.store(packed + (place.eight + lane * (held / 8)) * bits, in_units);
    }
}

template <class T, int bits, int size>
__device__ inline void dequantize_rotated(
    const u8* packed, const u16* scales, T* out, Pieces pieces, int turns, const float* levels, u64 seed)
{
    constexpr int team = size / held;
    __shared__ LevelsOf<bits> table;
    __shared__ Exchange<T, size> exchanges[warps];
    table.fill(levels);
    __syncthreads();
    const int in_warp = threadIdx.x % lanes, lane = in_warp % team;
    const u32 shared = sign_word(shared_signs + 2, seed, lane);
    const i64 stride = i64(gridDim.x) * threads / team;
    const i64 at_once = lanes / team, warp = (i64(blockIdx.x) * threads + threadIdx.x) / lanes;
    const bool whole = pieces.whole(size), in_line = aligned(out) && pieces.D * sizeof(T) % 16 == 0;
    const bool in_units = (u64(packed) | u64((pieces.D + 7) / 8 * bits)) % Codes32<bits>::unit == 0;
    // No sum of so many levels, the greatest of which is below 8, exceeds it.
    const float reach = turns == 2 ? 8.0f * size * size : 8.0f * size;
    for (i64 begin = warp * at_once; begin < pieces.total(); begin += stride) {
        const i64 mine = begin + in_warp / team;
        const i64 left = pieces.total() - begin;
        const Place place = place_of(mine < pieces.total() ? mine : pieces.total() - 1, size, pieces, whole);
        Codes32<bits> codes;
        codes.load(packed + (place.eight + lane * (held / 8)) * bits, in_units);
        const float factor = __uint_as_float(u32(scales[place.k]) << 16);
        float r[held];
#pragma unroll
        for (int i = 0; i < held; i += table.together) {
            const auto entry = table.entries[codes.get(i, bits * table.together)];
#pragma unroll
            for (int j = 0; j < table.together; ++j)
                r[i + j] = entry.at[j];
        }
        butterflies<size>(r, lane);
        if (turns == 2) {
            const u32 signs = in_loop(shared);
#pragma unroll
            for (int i = 0; i < held; ++i)
                r[i] = flipped(r[i], signs, i);
            butterflies<size>(r, lane);
        }
        const u32 own = sign_word(u64(place.k * pieces.counters), seed, lane);
#pragma unroll
        for (int i = 0; i < held; ++i)
            r[i] = flipped(__fmul_rn(r[i], factor), own, i);
        if (!(factor > 0 && __fmul_rn(factor, reach) <= limit<T>)) {
#pragma unroll
            for (int i = 0; i < held; ++i) {
                const float above = r[i] < -limit<T> ? -limit<T> : r[i];
                r[i] = factor == 0 ? 0 : above > limit<T> ? limit<T> : above;
            }
        }
        const bool dense = whole && in_line && left >= at_once;
        exchanges[threadIdx.x / lanes].store(out, place.element, dense, in_line, left, in_warp, r);
    }
}

}  // namespace fewbit
