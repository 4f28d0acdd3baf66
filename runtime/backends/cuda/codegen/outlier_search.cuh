// ---- outliers: the threshold, digit by digit ------------------------------------------------------------------------

namespace fewbit {

// Counts of a digit in a block. Digits 0 need no count: what no other digit holds is theirs. Where most numbers are counted
// lanes have `copies`, so that fewer of them wait for the same place.
template <int bits, int copies = 1> struct Histogram {
    u32 counts[copies][(1 << bits) + 32 / copies];
    __device__ void clear()
    {
        for (int i = threadIdx.x; i < copies << bits; i += threads)
            counts[i >> bits][i & ((1 << bits) - 1)] = 0;
        __syncthreads();
    }
    // Digits 0 go to places of the lanes' own, without a branch, which would be three instructions.
    __device__ void add(u32 digit)
    {
        const u32 place = digit ? digit : (1u << bits) + threadIdx.x % lanes / copies;
        atomicAdd(&counts[threadIdx.x % copies][place], 1u);
    }
    __device__ void flush(u64* to)
    {
        __syncthreads();
        for (int i = threadIdx.x; i < 1 << bits; i += threads) {
            u32 sum = 0;
#pragma unroll
            for (int copy = 0; copy < copies; ++copy)
                sum += counts[copy][i];
            if (sum)
                atomicAdd(&to[i], u64(sum));
        }
    }
};

// One more digit of the magnitude of that rank, from the counts of this digit among those that share the others.
template <int bits> __device__ inline Found next_digit(const u64* counts, Found known)
{
    constexpr int digits = 1 << bits, share = digits > threads ? digits / threads : 1;
    __shared__ Found found;
    const int lowest = (threads - 1 - int(threadIdx.x)) * share;  // the first thread has the largest digits
    u64 own = 0, total;
#pragma unroll
    for (int i = 0; i < share; ++i)
        own += lowest + i > 0 && lowest + i < digits ? counts[lowest + i] : 0;
    const u64 before = sum_before(own, total);
    if (before < known.rank && (known.rank <= before + own || lowest == 0)) {
        u64 rank = known.rank - before;
        int digit = lowest + share - 1;
        for (; digit > 0 && digit >= lowest && rank > counts[digit]; --digit)
            rank -= counts[digit];
        found = {rank, known.digits << bits | u32(digit)};
    }
    __syncthreads();
    const Found result = found;
    __syncthreads();
    return result;
}

// The last digit.
template <class T> __device__ inline Found threshold_of(const Selection* s)
{
    if constexpr (third_bits<T> == 0)
        return next_digit<second_bits<T>>(s->second, s->found[0]);
    else
        return next_digit<next_bits>(s->third, s->found[1]);
}

using FirstDigits = Histogram<first_bits, 4>;

// The highest digit of a magnitude; NaN and infinity have the same.
template <bool relu> __device__ inline u32 first_digit(float x)
{
    constexpr u32 most = infinite >> (31 - first_bits);
    const u32 pattern = __float_as_uint(x), digit = (pattern & 0x7fffffff) >> (31 - first_bits);
    if (relu && x < 0)
        return 0;
    return digit < most ? digit : most;
}

template <class T, bool relu> __device__ inline void add_first_digits(const T* x, FirstDigits& histogram, i64 n)
{
    const i64 whole = aligned(x) ? n / 8 : 0, stride = i64(gridDim.x) * threads;
    i64 eight = i64(blockIdx.x) * threads + threadIdx.x;
    for (; eight + (at_once<T> - 1) * stride < whole; eight += at_once<T> * stride) {
        Eight<T> eights[at_once<T>];
#pragma unroll
        for (int k = 0; k < at_once<T>; ++k)
            eights[k] = reinterpret_cast<const Eight<T>*>(x)[eight + k * stride];
#pragma unroll
        for (int k = 0; k < at_once<T>; ++k) {
            float h[8];
            eights[k].widen_to(h);
#pragma unroll
            for (int i = 0; i < 8; ++i)
                histogram.add(first_digit<relu>(h[i]));
        }
    }
    for (; eight * 8 < n; eight += stride) {
        float h[8];
        load_eight(x + eight * 8, n - eight * 8, h);
#pragma unroll
        for (int i = 0; i < 8; ++i)  // beyond the end are zeros
            histogram.add(first_digit<relu>(h[i]));
    }
}

template <class T> __device__ inline void count_first_digits(const T* x, Selection* s, i64 n, bool relu)
{
    __shared__ FirstDigits histogram;
    histogram.clear();
    if (relu)
        add_first_digits<T, true>(x, histogram, n);
    else
        add_first_digits<T, false>(x, histogram, n);
    histogram.flush(s->first);
}

// What a lane finds in one chunk after the other.
template <class T, bool relu> struct SurveyChunk {
    const T* x;
    i64 n;
    const Chunks& chunks;
    u64* list;    // the warp's
    u32* places;  // taken in it
    Histogram<second_bits<T>>& histogram;
    u32 beyond;  // all candidates
    AtLeast is_large;
    float low, high, smallest;  // of the rest, and of all sizes

    template <bool whole> __device__ void take(i64 chunk)
    {
        Place<T> here(x, chunk, n);
        here.whole = whole;
        constexpr int many = whole ? at_once<T> : 1;
        u32 large = 0;
#pragma unroll whole ? chunk_blocks : 1
        for (int b = 0; b < chunk_blocks; b += many) {
            Eight<T> eights[many];
            here.load(x, b, eights);
#pragma unroll
            for (int k = 0; k < many; ++k)
                large |= large_of(eights[k]) << (b + k) * 8;
        }
        const u32 above = sum_of_lanes(list_candidates(chunk, large & here.own()));
        if (here.lane == 0) {
            chunks.counts[chunk] = above;
            chunks.equals[chunk] = {0, 0};
        }
    }
    // Bits of those numbers that are no part of the rest.
    __device__ u32 large_of(const Eight<T>& eight)
    {
        float h[8];
        u32 bits = 0;
        eight.widen_to(h);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            smallest = fminf(smallest, fabsf(h[i]));
            if (is_large.template holds<relu>(h[i]))
                bits |= 1u << i;
            else
                low = lesser(low, h[i]), high = greater(high, h[i]);
        }
        return bits;
    }
    // Returns how many are outliers and no candidates. They are a few in a hundred, each read once more: a register is not
    // chosen by a number that the program computes. Those of all blocks together, so that lanes with none wait less often
    // for others.
    __device__ u32 list_candidates(i64 chunk, u32 large)
    {
        u32 above = 0;
        while (large) {
            const float number = widen(x[element_of(chunk, take_lowest(large))]);
            const u32 magnitude = magnitude_of<T>(number, relu);
            if (magnitude >= beyond) {
                ++above;
                continue;
            }
            histogram.add(magnitude >> third_bits<T> & ((1u << second_bits<T>) - 1));
            const u32 at = atomicAdd(places, 1u);
            if (at < chunks.room)
                list[at] = u64(chunk) << 32 | __float_as_uint(number);
        }
        return above;
    }
};

// Candidates are those that share the first digit with the one of that `rank`. With rank 0 there are none: outliers are
// above the threshold of a `sample`; without a sample nothing is.
template <class T, bool relu>
__device__ inline void survey_chunks(
    const T* x, Selection* s, const Selection* sample, const Chunks& chunks, i64 n, u64 rank)
{
    __shared__ Histogram<second_bits<T>> histogram;
    __shared__ Range of_block;
    __shared__ u32 listed[warps], has_zeros;
    if (threadIdx.x == 0)
        of_block = {0, 0}, has_zeros = 0;
    if (threadIdx.x < warps)
        listed[threadIdx.x] = 0;
    histogram.clear();
    u32 least = above_all, beyond = above_all;  // candidates: least <= magnitude < beyond
    if (rank) {
        const Found found = next_digit<first_bits>(s->first, {rank, 0});
        least = found.digits << other_bits<T>, beyond = (found.digits + 1) << other_bits<T>;
        if (blockIdx.x == 0 && threadIdx.x == 0)
            s->found[0] = found;
    } else {
        if (sample)
            least = beyond = threshold_of<T>(sample).digits + 1;
        if (blockIdx.x == 0 && threadIdx.x == 0)
            s->found[2] = {0, beyond - 1};
    }
    const i64 warp = warp_of_grid();
    u32* places = &listed[threadIdx.x / lanes];
    const float infinity = __uint_as_float(infinite);
    SurveyChunk<T, relu> work = {
        x, n, chunks, chunks.list + warp * chunks.room, places, histogram, beyond, AtLeast::of<T>(least),
        infinity, -infinity, infinity};
    each_chunk(x, n, work);
    __syncwarp();
    if (threadIdx.x % lanes == 0)
        chunks.listed[warp] = *places;
    Range rest = {0, 0};
    if (!(work.low > work.high)) {  // NaN where one is
        rest.add(work.low);
        rest.add(work.high);
    }
    rest.merge_into(&of_block);
    if (work.smallest == 0)
        atomicMax(&has_zeros, 1u);
    histogram.flush(s->second);  // a barrier is before it
    if (threadIdx.x == 0) {
        of_block.merge_into(&s->rest);
        if (has_zeros)
            atomicMax(&s->has_zeros, u64(1));
    }
}

// Calls `work.take(number, magnitude)` for the warp's candidates, and `work.leave(chunk)` when it goes on to others.
template <class T, class Work>
__device__ inline void each_candidate(
    const T* x, const Selection* s, const Chunks& chunks, i64 n, bool relu, Work& work)
{
    const i64 warp = warp_of_grid(), listed = i64(chunks.listed[warp]);
    if (listed <= chunks.room) {
        const u64* list = chunks.list + warp * chunks.room;
        for (i64 i = threadIdx.x % lanes; i < listed; i += lanes) {
            const float number = __uint_as_float(u32(list[i]));
            work.take(number, magnitude_of<T>(number, relu));
            work.leave(i64(list[i] >> 32));
        }
        return;
    }
    const u32 digit = s->found[0].digits;
    for (i64 chunk = warp, all = chunks_of(n); chunk < all; chunk += warps_of_grid()) {
        const Place<T> here(x, chunk, n);
#pragma unroll 1
        for (int b = 0; b < chunk_blocks; ++b) {
            Eight<T> eights[1];
            float h[8];
            here.load(x, b, eights);
            eights[0].widen_to(h);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const u32 magnitude = magnitude_of<T>(h[i], relu);
                if (i < here.left(b) && magnitude >> other_bits<T> == digit)
                    work.take(h[i], magnitude);
            }
        }
        work.leave(chunk);
    }
}

template <class T> struct CountThird {
    Histogram<next_bits>& histogram;
    u32 digits;
    __device__ void take(float, u32 magnitude)
    {
        if (magnitude >> next_bits == digits)
            histogram.add(magnitude & ((1u << next_bits) - 1));
    }
    __device__ void leave(i64) const {}
};

// For types with a third digit.
template <class T>
__device__ inline void refine_candidates(const T* x, Selection* s, const Chunks& chunks, i64 n, bool relu)
{
    __shared__ Histogram<next_bits> histogram;
    histogram.clear();
    const Found found = next_digit<second_bits<T>>(s->second, s->found[0]);
    if (blockIdx.x == 0 && threadIdx.x == 0)
        s->found[1] = found;
    CountThird<T> work = {histogram, found.digits};
    each_candidate(x, s, chunks, n, relu, work);
    histogram.flush(s->third);
}

struct CountOutliers {
    const Chunks& chunks;
    u32 threshold, above, equal;
    Range equals, rest;
    __device__ void take(float number, u32 magnitude)
    {
        if (magnitude < threshold)
            rest.add(number);
        above += magnitude > threshold;
        equal += magnitude == threshold;
        if (magnitude == threshold)
            equals.add(number);
    }
    __device__ void leave(i64 chunk)
    {
        if (above | equal)
            atomicAdd(&chunks.counts[chunk], equal << 16 | above);
        equals.merge_into(&chunks.equals[chunk]);
        above = equal = 0;
        equals = {0, 0};
    }
};

template <class T>
__device__ inline void count_candidates(const T* x, Selection* s, const Chunks& chunks, i64 n, bool relu)
{
    __shared__ Range of_block;
    if (threadIdx.x == 0)
        of_block = {0, 0};
    const Found found = threshold_of<T>(s);  // there are barriers within
    if (blockIdx.x == 0 && threadIdx.x == 0)
        s->found[2] = found;
    CountOutliers work = {chunks, found.digits, 0, 0, {0, 0}, {0, 0}};
    each_candidate(x, s, chunks, n, relu, work);
    work.rest.merge_into(&of_block);
    __syncthreads();
    if (threadIdx.x == 0)
        of_block.merge_into(&s->rest);
}

}  // namespace fewbit
