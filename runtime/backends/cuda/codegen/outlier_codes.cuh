// ---- outliers: codes, and what is kept of outliers; and back ---------------------------------------------------------

namespace fewbit {

template <int bits, bool relu> __device__ inline u32 code_by_level(float x, float lowest, float inverse)
{
    constexpr float top = (1 << bits) - 1, bottom = relu ? 1 : 0;
    float y = __fadd_rn(__fmul_rn(__fsub_rn(x, lowest), inverse), relu ? 1.5f : 0.5f);
    y = fminf(fmaxf(y, bottom), top);  // NaN is the bottom
    return truncated(relu && x <= 0 ? 0 : y);  // in the lowest byte
}

// An outlier as it is saved: what is finite stays finite, and what is positive, positive.
template <class V> __device__ inline void keep_value(float x, V* to)
{
    if (fabs(x) < __uint_as_float(infinite)) {
        x = x > limit<V> ? limit<V> : x < -limit<V> ? -limit<V> : x;
        x = x > 0 && rounded<V>(x) == 0 ? least<V> : x;
    }
    narrow(x, *to);
}

__device__ inline void keep_value(float x, void* values, i64 at, int kind)
{
    if (kind == kind_single)
        keep_value(x, static_cast<float*>(values) + at);
    else if (kind == kind_half)
        keep_value(x, static_cast<half*>(values) + at);
    else
        keep_value(x, static_cast<bfloat16*>(values) + at);
}

template <class V> __device__ inline float kept_value(const void* values, i64 at)
{
    return widen(static_cast<const V*>(values)[at]);
}

__device__ inline float kept_value(const void* values, i64 at, int kind)
{
    if (kind == kind_single)
        return kept_value<float>(values, at);
    return kind == kind_half ? kept_value<half>(values, at) : kept_value<bfloat16>(values, at);
}

// How many bits of the lanes stand before one: blocks of the chunk one after the other, in each the lanes, 8 bits a lane.
struct InOrder {
    u32 own;     // bits of the lane, 8 a block
    u32 lanes_before, totals;  // of each block, 8 bits each: at most 240
    u64 blocks_before;         // of each block, 16 bits each
    __device__ explicit InOrder(u32 bits) : own(bits)
    {
        u32 counts = bits - (bits >> 1 & 0x55555555);  // of each byte
        counts = (counts & 0x33333333) + (counts >> 2 & 0x33333333);
        counts = (counts + (counts >> 4)) & 0x0f0f0f0f;
        const u32 upto = up_to_here(counts);
        lanes_before = upto - counts;
        totals = of_last_lane(upto);
        const u32 first = totals & 0xff, second = first + (totals >> 8 & 0xff), third = second + (totals >> 16 & 0xff);
        blocks_before = u64(third) << 48 | u64(second) << 32 | first << 16;
    }
    __device__ u32 of_block(int block) const { return totals >> block * 8 & 0xff; }
    __device__ u32 before_block(int block) const { return u32(blocks_before >> block * 16) & 0xffff; }
    __device__ u32 before(int bit) const
    {
        const int block = bit / 8;
        const u32 own_before = (own & ((1u << bit) - 1)) >> block * 8;
        return before_block(block) + (lanes_before >> block * 8 & 0xff) + __popc(own_before);
    }
};

// Bits of those large numbers of a chunk that equal the threshold but for the first `quota`.
template <class T>
__device__ inline u32 equals_beyond(const T* x, i64 chunk, u32 large, u32 threshold, u32 quota, bool relu)
{
    u32 equal = 0, beyond = 0;
    while (large) {
        const int bit = take_lowest(large);
        if (magnitude_of<T>(widen(x[element_of(chunk, bit)]), relu) == threshold)
            equal |= 1u << bit;
    }
    if (!__any_sync(0xffffffffu, int(equal)))
        return 0;
    const InOrder order(equal);
    while (equal) {
        const int bit = take_lowest(equal);
        beyond |= u32(order.before(bit) >= quota) << bit;
    }
    return beyond;
}

// Writes the codes of a chunk, those that are there, from where the warp has brought them together.
template <int bits> __device__ inline void write_stage(const u8* stage, u8* packed, i64 chunk, i64 elements)
{
    constexpr int bytes = chunk_elements / 8 * bits;  // a multiple of 8
    const i64 left = (elements + 7) / 8 * bits;
    const int lane = threadIdx.x % lanes;
    u8* to = packed + chunk * bytes;
    __syncwarp();
    if (left >= bytes)
#pragma unroll
        for (int i = 0; i < bytes / 8; i += lanes) {
            if (i + lane < bytes / 8)
                reinterpret_cast<u64*>(to)[i + lane] = reinterpret_cast<const u64*>(stage)[i + lane];
        }
    else
        warp_copy_part(stage, to, left, lane);
    __syncwarp();
}

// One chunk after the other, of which the warp has memory for the codes.
template <class T, int bits, bool relu> struct QuantizeChunk {
    const T* x;
    u8 *packed, *counts, *offsets;
    void* values;
    const Range* equals;
    const i64* starts;
    i64 n, outliers;
    int kind;
    float lowest, inverse;
    u32 threshold;
    AtLeast is_large;
    u8* stage;

    template <bool whole> __device__ void take(i64 chunk) const
    {
        Place<T> here(x, chunk, n);
        here.whole = whole;
        const i64 start = starts[chunk];
        const u32 quota = equals[chunk].low;  // of equals of the threshold that are outliers
        constexpr int many = whole ? at_once<T> : 1;
        u32 large = 0;
#pragma unroll whole ? chunk_blocks : 1
        for (int b = 0; b < chunk_blocks; b += many) {
            Eight<T> eights[many];
            here.load(x, b, eights);
#pragma unroll
            for (int k = 0; k < many; ++k)
                large |= codes_of_block(eights[k], b + k, here) << (b + k) * 8;
        }
        write_stage<bits>(stage, packed, chunk, whole ? chunk_elements : n - chunk * chunk_elements);
        large &= here.own();
        large &= ~equals_beyond<T>(x, chunk, large, threshold, quota, relu);
        const InOrder order(large);
        if (here.lane < chunk_blocks && (whole || (chunk * chunk_blocks + here.lane) * position_block < n))
            counts[chunk * chunk_blocks + here.lane] = u8(order.of_block(here.lane));
        while (large) {
            const int bit = take_lowest(large);
            const i64 at = start + order.before(bit);
            if (at < outliers) {
                offsets[at] = u8(here.lane * 8 + bit % 8);
                keep_value(widen(x[element_of(chunk, bit)]), values, at, kind);
            }
        }
    }
    // Brings the codes of a block to the stage, and returns bits of those numbers that are large.
    __device__ u32 codes_of_block(const Eight<T>& eight, int block, const Place<T>& here) const
    {
        float h[8];
        u32 codes[8], large = 0;
        eight.widen_to(h);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            codes[i] = code_by_level<bits, relu>(h[i], lowest, inverse);
            if (is_large.template holds<relu>(h[i]))
                large |= 1u << i;
        }
        Word<bits> word = gather<bits, 0>(codes);
        if (!here.whole && here.left(block) < 8)
            word &= (Word<bits>(1) << (here.left(block) * bits)) - 1;
        if (here.lane < holders)
            store_group<bits>(stage, block * holders + here.lane, word);
        return large;
    }
};

// `counts`, of each block of positions, `offsets`, `values` and `levels` are written, `equals` and `starts` are of the
// scan. Not more than `outliers` are written, which there may be if another stream changes x meanwhile.
template <class T, int bits, bool relu>
__device__ inline void quantize_chunks(const T* x, u8* packed, u8* counts, u8* offsets, void* values,
    float* levels, const Selection* s, const Range* equals, const i64* starts, i64 n, i64 outliers, int kind)
{
    __shared__ float of_block[2];
    alignas(8) __shared__ u8 stages[warps][chunk_elements / 8 * bits];
    if (threadIdx.x == 0) {
        levels_of(s, float((1 << bits) - (relu ? 2 : 1)), relu, of_block);
        if (blockIdx.x == 0)
            levels[0] = of_block[0], levels[1] = of_block[1];
    }
    __syncthreads();
    const float lowest = of_block[0], inverse = __fdiv_rn(1, of_block[1]);
    const u32 threshold = s->found[2].digits;
    const QuantizeChunk<T, bits, relu> work = {
        x, packed, counts, offsets, values, equals, starts, n, outliers, kind, lowest, inverse, threshold,
        AtLeast::of<T>(threshold), stages[threadIdx.x / lanes]};
    each_chunk(x, n, work);
}

// The outliers of each chunk, by the number in each of its blocks.
struct OfBlocks {
    const u8* counts;
    i64* starts;
    i64 blocks, sum;
    __device__ u64 of(i64 chunk) const
    {
        const i64 block = chunk * chunk_blocks;
        if (blocks - block < chunk_blocks) {
            u64 here = 0;
            for (int b = 0; b < blocks - block; ++b)
                here += counts[block + b];
            return here;
        }
        const u32 here = reinterpret_cast<const u32*>(counts)[chunk];  // four bytes, which are aligned
        const u32 pairs = (here & 0x00ff00ff) + (here >> 8 & 0x00ff00ff);
        return (pairs & 0xffff) + (pairs >> 16);
    }
    __device__ void visit(i64 chunk, u64 before) const { starts[chunk] = sum + i64(before); }
    __device__ void leave(u64 total) { sum += i64(total); }
};

__device__ inline void add_blocks(const u8* counts, u64* totals, i64 n)
{
    add_parts(chunks_of(n), totals, OfBlocks{counts, nullptr, (n + position_block - 1) / position_block, 0});
}

__device__ inline void locate_outliers(const u8* counts, const u64* totals, i64* starts, i64 n)
{
    OfBlocks work = {counts, starts, (n + position_block - 1) / position_block, 0};
    scan_chunks(chunks_of(n), totals, work);
}

// The value of a code; code 0 with `relu` is 0, and NaN in a rest that is.
template <class T, bool relu> __device__ inline float value_of_code(float code, float lowest, float step)
{
    if (relu && code == 0)
        return __fmul_rn(0, step);
    if (!relu)
        return __fadd_rn(lowest, __fmul_rn(code, step));  // and clamped, once it is rounded
    return greater(lesser(__fmul_rn(__fsub_rn(code, 1), step), limit<T>), least<T>);
}

// The outliers of a chunk, in bounds whatever the parts hold: they may have changed since they were checked.
struct OutliersOfChunk {
    const u8* offsets;  // of the chunk's first
    int ends[chunk_blocks];  // of each block, counted from that
    int elements;  // of the chunk
    __device__ OutliersOfChunk(const u8* offsets, const int (&many)[chunk_blocks], i64 left, int elements)
        : offsets(offsets), elements(elements)
    {
        const int room = left < 0 ? 0 : left < chunk_elements ? int(left) : chunk_elements;
        int sum = 0;
#pragma unroll
        for (int b = 0; b < chunk_blocks; ++b) {
            const int there = elements - b * position_block, most = there < 0 ? 0 : there;
            const int here = many[b] < position_block ? many[b] : position_block;
            sum += here < most ? here : most;
            sum = sum < room ? sum : room;
            ends[b] = sum;
        }
    }
    __device__ int count() const { return ends[chunk_blocks - 1]; }
    __device__ int place(int i) const
    {
        int first = 0;
#pragma unroll
        for (int b = 0; b < chunk_blocks - 1; ++b)
            first += i >= ends[b] ? position_block : 0;
        const int there = elements - first, last = (there < position_block ? there : position_block) - 1, at = offsets[i];
        return first + (at < last ? at : last);
    }
};

template <class T, int bits, bool relu> struct DequantizeChunk {
    const u8 *packed, *counts, *offsets;
    const void* values;
    const i64* starts;
    T* out;
    i64 n, outliers;
    int kind;
    float lowest, step;

    template <bool whole> __device__ void take(i64 chunk) const
    {
        Place<T> here(out, chunk, n);
        here.whole = whole;
        T* to = out + chunk * chunk_elements;
        const i64 start = starts[chunk], left = n - chunk * chunk_elements;
        Word<bits> words[chunk_blocks];
        int many[chunk_blocks];
#pragma unroll
        for (int b = 0; b < chunk_blocks; ++b)
            words[b] = whole || here.left(b) ? load_group<bits>(packed, here.begin / 8 + b * holders) : 0;
        count_outliers<whole>(chunk, many);
        const OutliersOfChunk of(offsets + start, many, outliers - start,
            whole || left > chunk_elements ? chunk_elements : int(left));
        // The first of the outliers are on their way while codes are decoded.
        const int first_place = here.lane < of.count() ? of.place(here.lane) : 0;
        const float first = here.lane < of.count() ? kept_value(values, start + here.lane, kind) : 0;
#pragma unroll
        for (int b = 0; b < chunk_blocks; ++b) {
            const Eight<T> h = values_of(words[b]);
            if (whole)
                store_in_pairs(h, to + b * position_block, here.lane, here.lane < holders, here.lane);
            else
                store_part(h, out + here.begin + b * position_block, here.left(b));
        }
        __syncwarp();  // outliers come after what their codes stand for
        if (here.lane < of.count())
            narrow(first, to[first_place]);
        for (int i = here.lane + lanes; i < of.count(); i += lanes)
            narrow(kept_value(values, start + i, kind), to[of.place(i)]);
    }
    template <bool whole> __device__ void count_outliers(i64 chunk, int (&many)[chunk_blocks]) const
    {
        if (whole) {
            const u32 all = reinterpret_cast<const u32*>(counts)[chunk];
#pragma unroll
            for (int b = 0; b < chunk_blocks; ++b)
                many[b] = all >> b * 8 & 0xff;
            return;
        }
#pragma unroll
        for (int b = 0; b < chunk_blocks; ++b)
            many[b] = (chunk * chunk_blocks + b) * position_block < n ? counts[chunk * chunk_blocks + b] : 0;
    }
    __device__ Eight<T> values_of(Word<bits> word) const
    {
        float h[8];
        spread_above<bits>(word, h);
#pragma unroll
        for (int i = 0; i < 8; ++i)
            h[i] = value_of_code<T, relu>(__fsub_rn(h[i], spread_from), lowest, step);
        Eight<T> eight = Eight<T>::of(h);
        if (!relu)
            clamp(eight);
        return eight;
    }
};

template <class T, int bits, bool relu>
__device__ inline void dequantize_chunks(const u8* packed, const u8* counts, const u8* offsets, const void* values,
    const float* levels, const i64* starts, T* out, i64 n, i64 outliers, int kind)
{
    const DequantizeChunk<T, bits, relu> work = {
        packed, counts, offsets, values, starts, out, n, outliers, kind, levels[0], levels[1]};
    each_chunk(out, n, work);
}

}  // namespace fewbit
