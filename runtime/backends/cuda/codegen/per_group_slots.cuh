// ---- per-group quantization: several groups of 32 to 256 numbers at once in a warp -----------------------------------
// The arithmetic of per_group.cuh. What a group needs once (minimum, range, a division) one lane finds for all others:
// in each of 32 lanes it would cost 9 instructions an element, a third of what the copy's bandwidth leaves at 4 bits.

namespace fewbit {

constexpr int most_knots = 4;  // of a line here; those of tables may have more

// Eights that a lane has under way: 64 bytes, 64 KiB on a multiprocessor of 32 warps.
template <class T> constexpr int chunks = sizeof(T) == 2 ? 4 : 2;

// Groups beside each other in a warp: each takes the lanes of a power of two, of which the last may be idle.
struct Slots {
    u32 total, last;  // groups of the tensor, and its last eight
    u32 eights;       // of a group
    int width;        // lanes of a slot
    int slot;         // of the lane
    u32 place;        // of the lane in its slot
    bool active;

    __device__ static Slots of(i64 n, i64 G, int lane)
    {
        const u32 eights = u32(G) / 8;
        int width = 4;
        while (u32(width) < eights)
            width *= 2;
        const u32 place = lane % width;
        return {u32(quotient(n, G)), u32(n / 8) - 1, eights, width, lane / width, place, place < eights};
    }
    __device__ u32 per_chunk() const { return lanes / width; }
    // Idle lanes read what the last active one reads, so that minimum and maximum stay what they are.
    __device__ u32 eight(u32 group) const { return group * eights + (active ? place : eights - 1); }
};

// Whether groups fit slots, their levels have few knots, and 32 bits count the eights. It is the same for all threads.
__device__ inline bool takes_slots(i64 N, i64 D, i64 G, const Levels& levels, bool in_chunks)
{
    return (levels.shape == 0 || levels.width <= 2 + 2 * most_knots) && in_chunks && G % 8 == 0 && G >= 32 && G <= span && D - quotient(D, G) * G == 0
        && N * D / 8 < i64(1) << 31;
}

// Runs over all groups, `chunks` rows of slots at once: `work(first)` with the first group of the warp.
template <class T, class Work> __device__ inline void each_row(const Slots& slots, const Work& work)
{
    const u32 step = chunks<T> * slots.per_chunk();
    const u32 stride = gridDim.x * warps * step;
    for (u32 first = (blockIdx.x * warps + threadIdx.x / lanes) * step; first < slots.total; first += stride)
        work(first);
}

// ---- the least and the greatest of a group, NaN where one of its numbers is ------------------------------------------

// Of 16-bit numbers both ends are one word, the greatest negated: one instruction then serves two comparisons.
template <class T> struct Ends {
    u32 both;
    static __device__ Ends of(const Eight<T>& h)
    {
        const u32 low = lesser(lesser(h.pairs[0], h.pairs[1], T{}), lesser(h.pairs[2], h.pairs[3], T{}), T{});
        const u32 high = greater(greater(h.pairs[0], h.pairs[1], T{}), greater(h.pairs[2], h.pairs[3], T{}), T{});
        const u32 first = (low & 0xffff) | high << 16, second = low >> 16 | (high & 0xffff0000u);
        return {lesser(first ^ 0x80000000u, second ^ 0x80000000u, T{})};
    }
    static __device__ Ends choose(bool first, Ends a, Ends b) { return {first ? a.both : b.both}; }
    __device__ Ends with(Ends other) const { return {lesser(both, other.both, T{})}; }
    __device__ Ends from(int other) const { return {__shfl_xor_sync(0xffffffffu, both, other)}; }
    __device__ float low() const { return first_of(both, T{}); }
    __device__ float high() const { return -second_of(both, T{}); }
};

template <> struct Ends<float> {
    float least, greatest;
    static __device__ Ends of(const Eight<float>& h)
    {
        Ends ends = {h.at[0], h.at[0]};
#pragma unroll
        for (int i = 1; i < 8; ++i)
            ends = ends.with({h.at[i], h.at[i]});
        return ends;
    }
    static __device__ Ends choose(bool first, Ends a, Ends b)
    {
        return {first ? a.least : b.least, first ? a.greatest : b.greatest};
    }
    __device__ Ends with(Ends other) const
    {
        return {lesser(least, other.least), greater(greatest, other.greatest)};
    }
    __device__ Ends from(int other) const
    {
        return {__shfl_xor_sync(0xffffffffu, least, other), __shfl_xor_sync(0xffffffffu, greatest, other)};
    }
    __device__ float low() const { return least; }
    __device__ float high() const { return greatest; }
};

// The chunk whose group a lane ends with, by the lane's last bits; and the lane of the same slot that has a chunk's.
template <class T> __device__ inline int chunk_of(int lane)
{
    return chunks<T> == 4 ? (lane & 1) * 2 + (lane >> 1 & 1) : lane & 1;
}
template <class T> __device__ inline int holder(int chunk, int lane)
{
    return (lane & ~(chunks<T> - 1)) | chunk_of<T>(chunk);
}

// Half of the chunks' ends, those of lanes without the bit `other` and those of lanes with it.
template <class T, int count> __device__ inline void halve(Ends<T>* ends, int lane, int other)
{
    const bool upper = lane & other;
#pragma unroll
    for (int i = 0; i < count; ++i) {
        const Ends<T> a = ends[i], b = ends[count + i];  // copies: a choice of places would put them into memory
        ends[i] = Ends<T>::choose(upper, b, a).with(Ends<T>::choose(upper, a, b).from(other));
    }
}

// The ends of the groups of all chunks in as many shuffles as one group takes, and one more: lanes first halve the
// chunks among them.
template <class T> __device__ inline Ends<T> ends_of_slots(Ends<T> (&ends)[chunks<T>], int lane, int width)
{
    halve<T, chunks<T> / 2>(ends, lane, 1);
    if (chunks<T> == 4)
        halve<T, 1>(ends, lane, 2);
#pragma unroll
    for (int other = chunks<T>; other < lanes; other *= 2)
        if (other < width)
            ends[0] = ends[0].with(ends[0].from(other));
    return ends[0];
}

// ---- kernels ---------------------------------------------------------------------------------------------------------

#ifdef __CUDACC__
__device__ inline u32 integer_of(float y) { return u32(int(y)); }
#else
__device__ inline u32 integer_of(float y) { return y == y ? u32(int(y)) : 0; }  // NaN is left open by C++
#endif

// How the numbers of a group become codes: (h - Z) * scale + offset. In a group that is not plain all codes are alike, the
// last bit of a constant number or 0: the scale is 0, and NaN and infinities become NaN, whose integer is 0.
struct Steps {
    float Z, scale, offset;
    static __device__ Steps of(GroupParameters kept, float low, int bits)
    {
        const float scale = __fdiv_rn(float(((1u << bits) - 1) << 16), __uint_as_float(kept.range << 16));
        const bool one = kept.is_constant() && (__float_as_uint(__fadd_rn(low, 0.0f)) >> 15 & 1);
        const bool plain = kept.is_plain();
        return {plain ? __uint_as_float(kept.minimum << 16) : 0.0f, plain ? scale : 0.0f, one ? 65536.5f : 0.5f};
    }
    __device__ Steps from(int lane) const
    {
        return {__shfl_sync(0xffffffffu, Z, lane), __shfl_sync(0xffffffffu, scale, lane),
                __shfl_sync(0xffffffffu, offset, lane)};
    }
};

template <class T, int bits>
__device__ inline Word<bits> codes_of(const Eight<T>& h, const Steps& steps, const Random& random)
{
    constexpr u32 most = ((1u << bits) << 16) - 1;
    float values[8];
    u32 sums[8];
    h.widen_to(values);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float d = __fmul_rn(__fsub_rn(values[i], steps.Z), steps.scale);
        const u32 sum = integer_of(__fadd_rn(d, steps.offset)) + random.half(i);
        sums[i] = sum < most ? sum : most;
    }
    return gather<bits, 2>(sums);
}

// The line of each shape to positions, which are lowered by 2^24 to below 1: what is beyond a knot, and not below 0, is
// then one instruction, a sum that saturates. No digit changes by powers of two.
struct alignas(16) Bend {
    float slope, knots[most_knots][2];  // c_0 lowered; c_j, and K_j lowered
    float unused[3];
};
constexpr float lowered = 5.9604644775390625e-8f, raised = 16777216.0f;  // 2^-24, 2^24

template <int bits> __device__ inline void fill_bends(const Levels& levels, Bend (&bends)[3])
{
    constexpr int numbers = 1 + 2 * most_knots;
    for (int i = threadIdx.x; i < 3 * numbers; i += threads) {
        const int shape = i / numbers, j = i % numbers;
        const float number = j + 1 < levels.width ? levels.line(bits, shape, 0).numbers[j + 1] : 0;
        reinterpret_cast<float*>(&bends[shape])[j] = j % 2 == 0 ? __fmul_rn(number, lowered) : number;
    }
    __syncthreads();
}

template <class T, int bits>
__device__ inline Word<bits> codes_of(const Eight<T>& h, const Steps& steps, const Bend& shared, const Random& random)
{
    constexpr u32 most = ((1u << bits) << 16) - 1;
    const Bend bend = shared;
    float values[8];
    u32 sums[8];
    h.widen_to(values);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float d = __fmul_rn(__fsub_rn(values[i], steps.Z), steps.scale);
        float y = __fmul_rn(bend.slope, d);
#pragma unroll
        for (int j = 0; j < most_knots; ++j) {  // products by powers of two are exact, and so those that are merged
            const float beyond = __saturatef(fmaf(d, lowered, -bend.knots[j][1]));
            y = __fadd_rn(y, __fmul_rn(bend.knots[j][0], beyond));
        }
        const u32 sum = integer_of(fmaf(y, raised, steps.offset)) + random.half(i);
        sums[i] = sum < most ? sum : most;
    }
    return gather<bits, 2>(sums);
}

// Lowers the range of the lane's own group by the shape that it chooses. The lanes that have the same group share out
// the numbers by which it does.
template <class T>
__device__ inline void choose_shape(const T* x, const Slots& slots, u32 group, GroupParameters& kept)
{
    const u32 eights = slots.eights < first_values / 8 ? slots.eights : first_values / 8;
    const u32 begin = (group < slots.total ? group : slots.total - 1) * slots.eights;
    const float Z = __uint_as_float(kept.minimum << 16), R = __uint_as_float(kept.range << 16);
    u32 counts = 0;  // a byte each
    for (u32 i = slots.place / chunks<T>; i < eights; i += slots.width / chunks<T>) {
        const Eight<T> eight = reinterpret_cast<const Eight<T>*>(x)[begin + i];
        float h[8];
        eight.widen_to(h);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            counts += h[j] >= __fadd_rn(Z, __fmul_rn(R, shares[0])) ? 1 : 0;
            counts += h[j] >= __fadd_rn(Z, __fmul_rn(R, shares[1])) ? 1 << 8 : 0;
            counts += h[j] >= __fadd_rn(Z, __fmul_rn(R, shares[2])) ? 1 << 16 : 0;
        }
    }
#pragma unroll
    for (int other = chunks<T>; other < lanes; other *= 2)
        if (other < slots.width)
            counts += __shfl_xor_sync(0xffffffffu, counts, other);
    const int beyond[3] = {int(counts & 0xff), int(counts >> 8 & 0xff), int(counts >> 16)};
    if (can_tell(kept))
        tell_shape(kept, beyond);
}

// Quantize x, whose groups of G lie one after the other. Without random numbers a code takes a third less, and half by
// levels that are straight.
template <class T, int bits, bool at_random, bool bent>
__device__ inline void quantize_slots(
    const T* x, u8* packed, u16* minima, u16* ranges, i64 n, i64 G, u64 seed, const Levels& levels)
{
    __shared__ Bend bends[3];
    if (bent)
        fill_bends<bits>(levels, bends);
    const int lane = threadIdx.x % lanes;
    const Slots slots = Slots::of(n, G, lane);
    const u32 per_chunk = slots.per_chunk(), to_next = per_chunk * slots.eights;
    each_row<T>(slots, [&](u32 first) {
        const u32 begin = slots.eight(first + slots.slot);
        Eight<T> h[chunks<T>];
        Ends<T> ends[chunks<T>];
#pragma unroll
        for (int c = 0; c < chunks<T>; ++c) {
            const u32 eight = begin + c * to_next;
            h[c] = reinterpret_cast<const Eight<T>*>(x)[eight < slots.last ? eight : slots.last];
        }
#pragma unroll
        for (int c = 0; c < chunks<T>; ++c)
            ends[c] = Ends<T>::of(h[c]);
        const Ends<T> mine = ends_of_slots<T>(ends, lane, slots.width);
        GroupParameters kept = group_parameters(mine.low(), mine.high());
        const u32 group = first + chunk_of<T>(lane) * per_chunk + slots.slot;
        if (bent && levels.shape == chooses)
            choose_shape(x, slots, group, kept);
        if (slots.place < chunks<T> && group < slots.total) {
            minima[group] = u16(kept.minimum);
            ranges[group] = u16(kept.range);
        }
        const int shape = bent ? take_shape(kept, levels.shape) : 0;
        const Steps own = Steps::of(kept, mine.low(), bits);
#pragma unroll
        for (int c = 0; c < chunks<T>; ++c) {
            const u32 eight = begin + c * to_next;
            const int from = holder<T>(c, lane);
            const Steps steps = own.from(from);
            const Random random = at_random ? philox(eight, seed) : to_nearest;
            const Word<bits> word = bent
                ? codes_of<T, bits>(h[c], steps, bends[__shfl_sync(0xffffffffu, shape, from)], random)
                : codes_of<T, bits>(h[c], steps, random);
            if (slots.active && eight <= slots.last)
                store_group<bits>(packed, eight, word);
        }
    });
}

// What the codes of a group become: Z + level * step, or in a constant group its number.
struct Values {
    u32 kept;  // minimum, and range in a constant group, else the shape
    float step;
    template <int bits> static __device__ Values of(GroupParameters kept, i64 given)
    {
        const int shape = given ? take_shape(kept, given) : 0;
        return {kept.minimum << 16 | (kept.is_constant() ? kept.range : u32(shape)),
                __fdiv_rn(__uint_as_float(kept.range << 16), float((1u << bits) - 1))};
    }
    __device__ Values from(int lane) const
    {
        return {__shfl_sync(0xffffffffu, kept, lane), __shfl_sync(0xffffffffu, step, lane)};
    }
    // Whether the values are to be clamped: in a constant group they are not. `bent` are the levels of each shape, or null.
    template <int bits> __device__ bool decode(Word<bits> word, float (&to)[8], const float (*bent)[1 << bits]) const
    {
        if (kept & 0x8000) {
#pragma unroll
            for (int i = 0; i < 8; ++i)
                to[i] = __uint_as_float((kept & 0xffff7fffu) | unpack<bits>(word, i) << 15);
            return false;
        }
        const float Z = __uint_as_float(kept & 0xffff0000u);
        if (bent) {
            const float* levels = bent[kept & 3];
#pragma unroll
            for (int i = 0; i < 8; ++i)
                to[i] = levels[unpack<bits>(word, i)];
        } else {
            spread<bits>(word, to);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i)
            to[i] = __fadd_rn(Z, __fmul_rn(to[i], step));
        return true;
    }
};

template <int bits> __device__ inline void fill_levels(const Levels& levels, float (&to)[3][1 << bits])
{
    for (int i = threadIdx.x; i < 3 << bits; i += threads)
        to[i >> bits][i & ((1 << bits) - 1)] = levels.line(bits, i >> bits, 1).at(float(i & ((1 << bits) - 1)));
    __syncthreads();
}

// Write the values of the codes of groups of G that lie one after the other.
template <class T, int bits, bool bent>
__device__ inline void dequantize_slots(
    const u8* packed, const u16* minima, const u16* ranges, T* out, i64 n, i64 G, const Levels& levels)
{
    __shared__ float table[3][1 << bits];
    if (bent)
        fill_levels<bits>(levels, table);
    const int lane = threadIdx.x % lanes;
    const Slots slots = Slots::of(n, G, lane);
    const u32 per_chunk = slots.per_chunk(), to_next = per_chunk * slots.eights;
    each_row<T>(slots, [&](u32 first) {
        const u32 begin = slots.eight(first + slots.slot);
        Word<bits> words[chunks<T>];
#pragma unroll
        for (int c = 0; c < chunks<T>; ++c) {
            const u32 eight = begin + c * to_next;
            words[c] = load_group<bits>(packed, eight < slots.last ? eight : slots.last);
        }
        const u32 group = first + lane < slots.total ? first + lane : slots.total - 1;
        const Values own = Values::of<bits>({minima[group], ranges[group]}, bent ? levels.shape : 0);
#pragma unroll
        for (int c = 0; c < chunks<T>; ++c) {
            const u32 eight = begin + c * to_next;
            float values[8];
            const bool clamped = own.from(c * per_chunk + slots.slot).decode<bits>(words[c], values, bent ? table : nullptr);
            Eight<T> h = Eight<T>::of(values);
            if (clamped)
                clamp(h);
            store_in_warp(h, out, eight, slots.active && eight <= slots.last, lane);
        }
    });
}

// ---- whichever way serves --------------------------------------------------------------------------------------------

// `bent`: levels may have knots. Kernels without have fewer registers to find.
template <class T, int fixed, bool bent>
__device__ inline void quantize_groups(
    const T* x, u8* packed, u16* minima, u16* ranges, const Rows& rows, i64 G, u64 seed, const Levels& levels)
{
    constexpr int bits = fixed ? fixed : 1;
    const i64 n = rows.N * rows.D;
    if (!fixed || !takes_slots(rows.N, rows.D, G, levels, aligned(x)))
        quantize_any_groups<T, fixed>(x, packed, minima, ranges, rows, G, seed, levels);
    else if (seed == NEAREST)
        quantize_slots<T, bits, false, bent>(x, packed, minima, ranges, n, G, seed, levels);
    else
        quantize_slots<T, bits, true, bent>(x, packed, minima, ranges, n, G, seed, levels);
}

template <class T, int fixed, bool bent>
__device__ inline void dequantize_groups(
    const u8* packed, const u16* minima, const u16* ranges, T* out, const Rows& rows, i64 G, const Levels& levels)
{
    if (!fixed || !takes_slots(rows.N, rows.D, G, levels, aligned(out)))
        dequantize_any_groups<T, fixed>(packed, minima, ranges, out, rows, G, levels);
    else
        dequantize_slots<T, fixed ? fixed : 1, bent>(packed, minima, ranges, out, rows.N * rows.D, G, levels);
}

}  // namespace fewbit
