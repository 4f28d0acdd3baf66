// ---- per-group quantization by straight levels: several groups of 32 to 256 numbers at once in a warp ----------------
// The arithmetic of per_group.cuh. What a group needs once (minimum, range, a division) one lane finds for all others:
// in each of 32 lanes it would cost 9 instructions an element, a third of what the copy's bandwidth leaves at 4 bits.

namespace fewbit {

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

// Whether groups fit slots, their levels are straight, and 32 bits count the eights. It is the same for all threads.
__device__ inline bool takes_slots(i64 N, i64 D, i64 G, i64 shape, bool in_chunks)
{
    return shape == 0 && in_chunks && G % 8 == 0 && G >= 32 && G <= span && D - quotient(D, G) * G == 0
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

// Quantize x, whose groups of G lie one after the other. Without random numbers a code takes a third less.
template <class T, int bits, bool at_random>
__device__ inline void quantize_slots(const T* x, u8* packed, u16* minima, u16* ranges, i64 n, i64 G, u64 seed)
{
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
        const GroupParameters kept = group_parameters(mine.low(), mine.high());
        const u32 group = first + chunk_of<T>(lane) * per_chunk + slots.slot;
        if (slots.place < chunks<T> && group < slots.total) {
            minima[group] = u16(kept.minimum);
            ranges[group] = u16(kept.range);
        }
        const Steps own = Steps::of(kept, mine.low(), bits);
#pragma unroll
        for (int c = 0; c < chunks<T>; ++c) {
            const u32 eight = begin + c * to_next;
            const Random random = at_random ? philox(eight, seed) : to_nearest;
            const Word<bits> word = codes_of<T, bits>(h[c], own.from(holder<T>(c, lane)), random);
            if (slots.active && eight <= slots.last)
                store_group<bits>(packed, eight, word);
        }
    });
}

// What the codes of a group become: Z + code * step, or in a constant group its number.
struct Values {
    u32 kept;  // minimum and range
    float step;
    template <int bits> static __device__ Values of(u32 minimum, u32 range)
    {
        return {minimum << 16 | range, __fdiv_rn(__uint_as_float(range << 16), float((1u << bits) - 1))};
    }
    __device__ Values from(int lane) const
    {
        return {__shfl_sync(0xffffffffu, kept, lane), __shfl_sync(0xffffffffu, step, lane)};
    }
    // Whether the values are to be clamped: in a constant group they are not.
    template <int bits> __device__ bool decode(Word<bits> word, float (&to)[8]) const
    {
        if (kept & 0x8000) {
#pragma unroll
            for (int i = 0; i < 8; ++i)
                to[i] = __uint_as_float((kept & 0xffff7fffu) | unpack<bits>(word, i) << 15);
            return false;
        }
        const float Z = __uint_as_float(kept & 0xffff0000u);
        spread<bits>(word, to);
#pragma unroll
        for (int i = 0; i < 8; ++i)
            to[i] = __fadd_rn(Z, __fmul_rn(to[i], step));
        return true;
    }
};

// The numbers within the type, outside which the last level of a group may lie.
template <class T> __device__ inline void clamp(Eight<T>& h)
{
    const u32 most = pair_of(limit<T>, limit<T>, T{});
#pragma unroll
    for (int i = 0; i < 4; ++i)
        h.pairs[i] = greater(lesser(h.pairs[i], most, T{}), most ^ 0x80008000u, T{});
}

__device__ inline void clamp(Eight<float>& h)
{
#pragma unroll
    for (int i = 0; i < 8; ++i)
        h.at[i] = greater(lesser(h.at[i], limit<float>), -limit<float>);
}

// Write the values of the codes of groups of G that lie one after the other.
template <class T, int bits>
__device__ inline void dequantize_slots(const u8* packed, const u16* minima, const u16* ranges, T* out, i64 n, i64 G)
{
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
        const Values own = Values::of<bits>(minima[group], ranges[group]);
#pragma unroll
        for (int c = 0; c < chunks<T>; ++c) {
            const u32 eight = begin + c * to_next;
            float values[8];
            const bool clamped = own.from(c * per_chunk + slots.slot).decode<bits>(words[c], values);
            Eight<T> h = Eight<T>::of(values);
            if (clamped)
                clamp(h);
            store_in_warp(h, out, eight, slots.active && eight <= slots.last, lane);
        }
    });
}

// ---- whichever way serves --------------------------------------------------------------------------------------------

template <class T, int fixed>
__device__ inline void quantize_groups(
    const T* x, u8* packed, u16* minima, u16* ranges, const Rows& rows, i64 G, u64 seed, const Levels& levels)
{
    if (fixed && takes_slots(rows.N, rows.D, G, levels.shape, aligned(x)))
        if (seed == NEAREST)
            quantize_slots<T, fixed ? fixed : 1, false>(x, packed, minima, ranges, rows.N * rows.D, G, seed);
        else
            quantize_slots<T, fixed ? fixed : 1, true>(x, packed, minima, ranges, rows.N * rows.D, G, seed);
    else
        quantize_any_groups<T, fixed>(x, packed, minima, ranges, rows, G, seed, levels);
}

template <class T, int fixed>
__device__ inline void dequantize_groups(
    const u8* packed, const u16* minima, const u16* ranges, T* out, const Rows& rows, i64 G, const Levels& levels)
{
    if (fixed && takes_slots(rows.N, rows.D, G, levels.shape, aligned(out)))
        return dequantize_slots<T, fixed ? fixed : 1>(packed, minima, ranges, out, rows.N * rows.D, G);
    dequantize_any_groups<T, fixed>(packed, minima, ranges, out, rows, G, levels);
}

}  // namespace fewbit
