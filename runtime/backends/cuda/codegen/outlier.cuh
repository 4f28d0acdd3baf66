// ---- outliers: the arithmetic of runtime/backends/reference/outlier.py, step by step -------------------------------
// No product is merged with a sum: see per_group.cuh. A warp takes a block of 240 positions at once, 30 of its lanes 8
// elements each, and one chunk of four such blocks after the other. The threshold is found digit by digit:
//
//   first     counts the highest 11 bits of all magnitudes
//   survey    what is above that digit is an outlier, what is below is of the rest; elements of the digit, the
//             candidates, are listed, and their next 10 bits counted
//   refine    counts the last 10 bits of candidates; magnitudes of 16-bit numbers have none left
//   count     which candidates are outliers
//   add       the outliers of each part of the chunks
//   scan      where those of each chunk begin
//   quantize  the levels; codes of all, and outliers, by reading x a third time
//
// Each kernel begins with the digit that follows from the counts of the one before, found by every block for itself.

namespace fewbit {

constexpr int position_block = 240, chunk_blocks = 4, chunk_elements = position_block * chunk_blocks;
constexpr int holders = position_block / 8;  // lanes that hold elements
constexpr u32 infinite = 0x7f800000;
constexpr int first_bits = 11, next_bits = 10;

// Magnitudes are integers in their order, without the bits that are 0 in all numbers of the type.
template <class T> constexpr int zero_bits = 0;
template <> constexpr int zero_bits<half> = 13;
template <> constexpr int zero_bits<bfloat16> = 16;

// Bits of the digits after the first.
template <class T> constexpr int other_bits = 31 - first_bits - zero_bits<T>;
template <class T> constexpr int second_bits = other_bits<T> < next_bits ? other_bits<T> : next_bits;
template <class T> constexpr int third_bits = other_bits<T> - second_bits<T>;

// With `relu` that of max(0, x); every NaN is above all numbers.
template <class T> __device__ inline u32 magnitude_of(float x, bool relu)
{
    const u32 pattern = __float_as_uint(x), magnitude = pattern & 0x7fffffff;
    if (relu && pattern > 0x7fffffff && magnitude <= infinite)
        return 0;
    return (magnitude > infinite ? infinite + (1u << zero_bits<T>) : magnitude) >> zero_bits<T>;
}

// Least and greatest of some numbers, as integers that are 0 while there are none. NaN is below or above all.
struct Range {
    u32 low, high;
    __device__ void add(float x)
    {
        const u32 key = u32(ordered(int(__float_as_uint(x)))) ^ 0x80000000u;
        low = ~key > low ? ~key : low;
        high = key > high ? key : high;
    }
    __device__ void merge(Range other)
    {
        low = other.low > low ? other.low : low;
        high = other.high > high ? other.high : high;
    }
    __device__ void merge_into(Range* shared) const
    {
        if (low | high) {
            atomicMax(&shared->low, low);
            atomicMax(&shared->high, high);
        }
    }
    __device__ bool is_empty() const { return (low | high) == 0; }
    __device__ float least() const { return number(~low); }
    __device__ float greatest() const { return number(high); }
    static __device__ float number(u32 key) { return __uint_as_float(u32(ordered(int(key ^ 0x80000000u)))); }
};

// The digits that were found of a magnitude, and its rank among those that share them: 1 for the largest.
struct Found {
    u64 rank;
    u32 digits;
};

// What is known of the tensor as a whole; all 0 at first.
struct Selection {
    i64 outliers;
    Range rest;
    u64 has_zeros;
    Found found[3];  // the last: the threshold, and how many of its equals are outliers
    u64 first[1 << first_bits], second[1 << next_bits], third[1 << next_bits];
};
static_assert(sizeof(Selection) == 32840, "SELECTION_BYTES of codegen/outlier.py");

constexpr u32 above_all = 0xffffffffu;

// Of the chunks: the number of their outliers above the threshold, and of its equals in the upper 16 bits (after the
// scan: of its equals that are outliers); the range of these; and of warps: their candidates, and how many.
struct Chunks {
    u32* counts;
    Range* equals;
    u64* list;  // bits of the number, and its chunk in the upper 32
    u64* listed;
    i64 room;  // of each warp in the list; a warp with more candidates looks for them in x again
};

// ---- warps and blocks ----------------------------------------------------------------------------------------------

template <class V> __device__ inline V up_to_here(V value)
{
    const int lane = threadIdx.x % lanes;
#pragma unroll
    for (int other = 1; other < lanes; other *= 2) {
        const V before = __shfl_up_sync(0xffffffffu, value, other);
        value += lane >= other ? before : 0;
    }
    return value;
}

// One instruction where there is one.
__device__ inline u32 sum_of_lanes(u32 value)
{
#if defined(__CUDACC__) && __CUDA_ARCH__ >= 800
    return __reduce_add_sync(0xffffffffu, value);
#else
    return __shfl_sync(0xffffffffu, up_to_here(value), lanes - 1);
#endif
}

template <class V> __device__ inline V of_last_lane(V value) { return __shfl_sync(0xffffffffu, value, lanes - 1); }

// The sum over the threads before this one, and over all of the block.
__device__ inline u64 sum_before(u64 value, u64& total)
{
    __shared__ u64 of_warps[warps];
    const int warp = threadIdx.x / lanes;
    const u64 here = up_to_here(value);
    if (threadIdx.x % lanes == lanes - 1)
        of_warps[warp] = here;
    __syncthreads();
    u64 before = 0;
    total = 0;
#pragma unroll
    for (int i = 0; i < warps; ++i) {
        before += i < warp ? of_warps[i] : 0;
        total += of_warps[i];
    }
    __syncthreads();
    return before + here - value;
}

__device__ inline i64 warp_of_grid() { return i64(blockIdx.x) * warps + threadIdx.x / lanes; }
__device__ inline i64 warps_of_grid() { return i64(gridDim.x) * warps; }
__device__ inline i64 chunks_of(i64 n) { return (n + chunk_elements - 1) / chunk_elements; }

// The lane's place in a chunk: its first element in the first block. Lanes without elements have those of the last that
// has, which change no minimum and no maximum.
template <class T> struct Place {
    i64 begin, n;
    bool whole;  // the chunk is all there, in aligned memory
    int lane;
    __device__ Place(const T* x, i64 chunk, i64 n) : n(n), lane(threadIdx.x % lanes)
    {
        begin = chunk * chunk_elements + (lane < holders ? lane : holders - 1) * 8;
        whole = n - chunk * chunk_elements >= chunk_elements && aligned(x);
    }
    // 8 numbers of each of some blocks; beyond the end that at the end.
    template <int count> __device__ void load(const T* x, int block, Eight<T> (&to)[count]) const
    {
        if (whole) {
#pragma unroll
            for (int i = 0; i < count; ++i)
                to[i] = *reinterpret_cast<const Eight<T>*>(x + begin + (block + i) * position_block);
            return;
        }
#pragma unroll
        for (int i = 0; i < count; ++i) {
            float h[8];
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const i64 at = begin + (block + i) * position_block + j;
                h[j] = widen(x[at < n ? at : n - 1]);
            }
            to[i] = Eight<T>::of(h);
        }
    }
    // How many of the 8 of a block are the lane's own.
    __device__ int left(int block) const
    {
        const i64 here = lane < holders ? n - begin - block * position_block : 0;
        return here < 0 ? 0 : here < 8 ? int(here) : 8;
    }
    // Bits of the lane's own numbers, 8 a block.
    __device__ u32 own() const
    {
        if (whole)
            return lane < holders ? 0xffffffff : 0;
        u32 bits = 0;
#pragma unroll
        for (int block = 0; block < chunk_blocks; ++block)
            bits |= ((1u << left(block)) - 1) << block * 8;
        return bits;
    }
};

// Calls `work.take<whole>(chunk)` for the warp's chunks; `whole` ones are all there, in aligned memory.
template <class T, class Work> __device__ inline void each_chunk(const T* x, i64 n, const Work& work)
{
    const i64 all = chunks_of(n), whole = aligned(x) ? n / chunk_elements : 0;
    for (i64 chunk = warp_of_grid(); chunk < all; chunk += warps_of_grid())
        if (chunk < whole)
            work.template take<true>(chunk);
        else
            work.template take<false>(chunk);
}

// Blocks of a chunk that a lane loads at once: 64 bytes.
template <class T> constexpr int at_once = sizeof(T) == 2 ? 4 : 2;

// Tells numbers of at least a magnitude by one comparison, NaN too: their size is not below or at the number before it.
struct AtLeast {
    float before;
    bool none;
    template <class T> static __device__ AtLeast of(u32 magnitude)
    {
        const u32 before = magnitude ? (magnitude - 1) << zero_bits<T> : 0x7fc00000;  // all are not below or at NaN
        return {__uint_as_float(before), magnitude > (infinite >> zero_bits<T>) + 1};
    }
    template <bool relu> __device__ bool holds(float x) const { return !none && !((relu ? x : fabsf(x)) <= before); }
};

// Takes the place of the lowest bit out of `bits`.
__device__ inline int take_lowest(u32& bits)
{
    const int place = __popc((bits & (0u - bits)) - 1);
    bits &= bits - 1;
    return place;
}

// The element of a chunk that a bit of the lane stands for, 8 bits a block.
__device__ inline i64 element_of(i64 chunk, int bit)
{
    return chunk * chunk_elements + bit / 8 * position_block + threadIdx.x % lanes * 8 + bit % 8;
}

// ---- selection by digits -------------------------------------------------------------------------------------------

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
    const i64 warp = warp_of_grid(), all = chunks_of(n);
    u64* list = chunks.list + warp * chunks.room;
    u32* places = &listed[threadIdx.x / lanes];
    const AtLeast is_large = AtLeast::of<T>(least);
    const float infinity = __uint_as_float(infinite);
    float low = infinity, high = -infinity, smallest = infinity;  // of the rest, and of all sizes
    for (i64 chunk = warp; chunk < all; chunk += warps_of_grid()) {
        const Place<T> here(x, chunk, n);
        u32 above = 0, large = 0;
#pragma unroll
        for (int b = 0; b < chunk_blocks; b += at_once<T>) {
            Eight<T> eights[at_once<T>];
            here.load(x, b, eights);
#pragma unroll
            for (int k = 0; k < at_once<T>; ++k) {
                float h[8];
                eights[k].widen_to(h);
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    smallest = fminf(smallest, fabsf(h[i]));
                    if (is_large.holds<relu>(h[i]))
                        large |= 1u << ((b + k) * 8 + i);
                    else
                        low = lesser(low, h[i]), high = greater(high, h[i]);
                }
            }
        }
        large &= here.own();
        // A few in a hundred, each read once more: a register is not chosen by a number that the program computes. Those
        // of all blocks together, so that lanes with none wait less often for others.
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
        above = sum_of_lanes(above);
        if (threadIdx.x % lanes == 0) {
            chunks.counts[chunk] = above;
            chunks.equals[chunk] = {0, 0};
        }
    }
    __syncwarp();
    if (threadIdx.x % lanes == 0)
        chunks.listed[warp] = *places;
    Range rest = {0, 0};
    if (!(low > high)) {  // NaN where one is
        rest.add(low);
        rest.add(high);
    }
    rest.merge_into(&of_block);
    if (smallest == 0)
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

// ---- the scan: parts of the chunks, one a thread, are added up; then each block adds up the parts before its own ------

constexpr int part = threads;

template <class Work> __device__ inline void add_parts(i64 chunks, u64* totals, const Work& work)
{
    const i64 parts = (chunks + part - 1) / part;
    for (i64 i = blockIdx.x; i < parts; i += gridDim.x) {
        const i64 chunk = i * part + threadIdx.x;
        u64 total;
        sum_before(chunk < chunks ? work.of(chunk) : 0, total);
        if (threadIdx.x == 0)
            totals[i] = total;
    }
}

// Calls `work.visit(chunk, sum)` for each chunk of the block's parts with the sum of `work.of(chunk)` over the chunks
// before it, without those for whose sum `work.leave(sum)` was called. Returns whether the last chunk was the block's.
template <class Work> __device__ inline bool scan_chunks(i64 chunks, const u64* totals, Work& work)
{
    const i64 parts = (chunks + part - 1) / part;
    i64 done = 0;
    for (i64 i = blockIdx.x; i < parts; i += gridDim.x) {
        const i64 chunk = i * part + threadIdx.x;
        const u64 own = chunk < chunks ? work.of(chunk) : 0;
        u64 before = 0, total;
#pragma unroll 4
        for (i64 other = done + threadIdx.x; other < i; other += threads)
            before += totals[other];
        sum_before(before, total);
        work.leave(total);
        before = sum_before(own, total);
        if (chunk < chunks)
            work.visit(chunk, before);
        work.leave(total);
        done = i + 1;
    }
    return done == parts;
}

// Outliers above the threshold, and in the upper 32 bits its equals, of which the first `quota` are outliers too: where
// the outliers of each chunk begin. In the place of its equals' range is then the number of such equals: the counts are
// read by other blocks.
struct Starts {
    const Chunks& chunks;
    i64* starts;
    i64 quota, above, equal;
    Range rest;
    i64 divided;  // the chunk in which the outliers among the equals end, or -1

    __device__ u64 of(i64 chunk) const
    {
        const u32 both = chunks.counts[chunk];
        return u64(both >> 16) << 32 | (both & 0xffff);
    }
    __device__ i64 kept(i64 equals) const { return equals < quota ? equals : quota; }
    __device__ void visit(i64 chunk, u64 before)
    {
        const i64 first = equal + i64(before >> 32), here = i64(of(chunk) >> 32);
        const i64 outliers = kept(first + here) - kept(first);
        starts[chunk] = above + i64(u32(before)) + kept(first);
        if (outliers == 0)
            rest.merge(chunks.equals[chunk]);
        else if (outliers < here)
            divided = chunk;
        chunks.equals[chunk].low = u32(outliers);
    }
    __device__ void leave(u64 sum)
    {
        above += i64(u32(sum));
        equal += i64(sum >> 32);
    }
};

// The least step that reaches `low` and `high` with `below` levels below 0.
__device__ inline float step_with(float low, float high, float below, float steps)
{
    const float down = __fdiv_rn(-low, below), up = below < steps ? __fdiv_rn(high, __fsub_rn(steps, below)) : 0;
    return down > up ? down : up;
}

// The lowest level and the step for a rest from `low` to `high`; with `has_zeros` 0 is one of the levels.
__device__ inline void levels_of(float low, float high, bool has_zeros, float steps, bool relu, float* levels)
{
    const float least_span = __uint_as_float(0x0d800000), infinity = __uint_as_float(infinite);  // 2^-100
    low = relu ? 0 : __fadd_rn(low, 0);
    const float span = __fsub_rn(high, low), least_step = __fdiv_rn(least_span, steps);
    float step = __fdiv_rn(span > least_span ? span : least_span, steps);
    if (has_zeros && low < 0 && high >= 0) {
        const float most = high > 0 ? __fsub_rn(steps, 1) : steps;
        float below;
        if (most == 0) {  // one bit: of two levels only one is not 0
            below = high < -low;
            step = high > -low ? high : -low;
        } else {
            below = floor(__fmul_rn(__fdiv_rn(-low, span), steps));
            below = below < 1 ? 1 : below;
            below = below > most ? most : below;
            const float next = __fadd_rn(below, 1), second = next > most ? most : next;
            const float other = step_with(low, high, second, steps);
            step = step_with(low, high, below, steps);
            if (other < step)
                below = second, step = other;
        }
        step = step > least_step ? step : least_step;
        low = __fsub_rn(0, __fmul_rn(below, step));
    }
    const bool finite = fabs(span) < infinity;
    levels[0] = finite ? low : __uint_as_float(0x7fc00000);
    levels[1] = finite ? step : __uint_as_float(0x7fc00000);
}

__device__ inline void add_outliers(const Chunks& chunks, u64* totals, i64 n)
{
    add_parts(chunks_of(n), totals, Starts{chunks, nullptr, 0, 0, 0, {0, 0}, -1});
}

template <class T>
__device__ inline void scan_outliers(
    const T* x, Selection* s, const Chunks& chunks, const u64* totals, i64* starts, i64 n, bool relu)
{
    __shared__ Range of_block;
    __shared__ i64 divided;
    if (threadIdx.x == 0) {
        of_block = {0, 0};
        divided = -1;
    }
    const Found threshold = s->found[2];
    Starts work = {chunks, starts, i64(threshold.rank), 0, 0, {0, 0}, -1};
    const bool is_last = scan_chunks(chunks_of(n), totals, work);
    __syncthreads();
    if (work.divided >= 0)
        divided = work.divided;
    __syncthreads();
    Range rest = work.rest;
    if (divided >= 0) {
        const i64 begin = threadIdx.x * 8, element = divided * chunk_elements + begin;
        const i64 here = begin < chunk_elements && element < n ? n - element : 0;
        const i64 left = here < chunk_elements - begin ? here : chunk_elements - begin;
        float h[8];
        load_eight(x + element, left, h);
        u64 own = 0, total;
#pragma unroll
        for (int i = 0; i < 8; ++i)
            own += i < left && magnitude_of<T>(h[i], relu) == threshold.digits;
        u64 before = sum_before(own, total);
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (i < left && magnitude_of<T>(h[i], relu) == threshold.digits && before++ >= chunks.equals[divided].low)
                rest.add(h[i]);
    }
    rest.merge_into(&of_block);
    __syncthreads();
    if (threadIdx.x == 0) {
        of_block.merge_into(&s->rest);
        if (is_last)
            s->outliers = work.above + work.kept(work.equal);
    }
}

// The lowest level and the step of the rest that was found.
__device__ inline void levels_of(const Selection* s, float steps, bool relu, float* levels)
{
    const Range rest = s->rest;
    const float infinity = __uint_as_float(infinite), nan = __uint_as_float(0x7fc00000);
    const float low = rest.is_empty() ? 0 : rest.least(), high = rest.is_empty() ? 0 : rest.greatest();
    levels_of(low, low >= -infinity && high <= infinity ? high : nan, s->has_zeros != 0, steps, relu, levels);
}

// ---- codes and outliers --------------------------------------------------------------------------------------------

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
        u32 large = 0;
#pragma unroll
        for (int b = 0; b < chunk_blocks; b += at_once<T>) {
            Eight<T> eights[at_once<T>];
            here.load(x, b, eights);
#pragma unroll
            for (int k = 0; k < at_once<T>; ++k)
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
