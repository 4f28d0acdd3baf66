// ---- outliers: the arithmetic of runtime/backends/reference/outlier.py, step by step -------------------------------
// No product is merged with a sum: see per_group.cuh. A warp takes a block of 240 positions at once, 30 of its lanes 8
// elements each, and one chunk of four such blocks after the other. The threshold is found digit by digit:
//
//   first     counts the highest 11 bits of all magnitudes
//   survey    what is above that digit is an outlier, what is below is of the rest; elements of the digit, the
//             candidates, are listed, and their next 10 bits counted
//   refine    counts the last 10 bits of candidates; magnitudes of 16-bit numbers have none left
//   count     which candidates are outliers
//   scan      where the outliers of each chunk begin
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

// The same as a pattern of 32 bits, where NaN are any above infinity: what most numbers are compared by.
template <bool relu> __device__ inline u32 pattern_of(float x)
{
    const u32 pattern = __float_as_uint(x), magnitude = pattern & 0x7fffffff;
    return relu && pattern > 0x7fffffff && magnitude <= infinite ? 0 : magnitude;
}

// The least pattern of that magnitude.
template <class T> __device__ inline u32 least_pattern(u32 magnitude)
{
    return magnitude > (infinite >> zero_bits<T>) + 1 ? 0xffffffff : magnitude << zero_bits<T>;
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

// The lane's 8 numbers of a block of positions that begins below n, and how many of them are its own: none in lanes
// without. Beyond the end and in those lanes are numbers of others, which change no minimum and no maximum.
template <class T> struct Portion {
    i64 begin;
    int left;  // 8 at most
    float h[8];
    __device__ Portion(const T* x, i64 block, i64 n)
    {
        const int lane = threadIdx.x % lanes, place = lane < holders ? lane : holders - 1;
        begin = block * position_block + place * 8;
        const bool there = lane < holders && begin < n;
        left = !there ? 0 : n - begin < 8 ? int(n - begin) : 8;
        if (n - begin >= 8 && aligned(x + begin)) {
            const Eight<T> whole = *reinterpret_cast<const Eight<T>*>(x + begin);
            whole.widen_to(h);
        } else {
#pragma unroll
            for (int i = 0; i < 8; ++i)
                h[i] = widen(x[begin + i < n ? begin + i : n - 1]);
        }
    }
    // Those of 8 bits that are of the lane's own numbers.
    __device__ u32 own(u32 bits) const { return bits & ((1u << left) - 1); }
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

// Counts of a digit in a block. Digits 0 need no count: what no other digit holds is theirs.
template <int bits> struct Histogram {
    u32 counts[1 << bits];
    __device__ void clear()
    {
        for (int i = threadIdx.x; i < 1 << bits; i += threads)
            counts[i] = 0;
        __syncthreads();
    }
    __device__ void add(u32 digit)
    {
        if (digit)
            atomicAdd(&counts[digit], 1u);
    }
    __device__ void flush(u64* to)
    {
        __syncthreads();
        for (int i = threadIdx.x; i < 1 << bits; i += threads)
            if (counts[i])
                atomicAdd(&to[i], u64(counts[i]));
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

template <class T> __device__ inline void count_first_digits(const T* x, Selection* s, i64 n, bool relu)
{
    __shared__ Histogram<first_bits> histogram;
    histogram.clear();
    const i64 stride = i64(gridDim.x) * threads;
    for (i64 group = i64(blockIdx.x) * threads + threadIdx.x; group * 8 < n; group += stride) {
        float h[8];
        load_eight(x + group * 8, n - group * 8, h);
#pragma unroll
        for (int i = 0; i < 8; ++i)  // beyond the end are zeros
            histogram.add(magnitude_of<T>(h[i], relu) >> other_bits<T>);
    }
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
    const u32 least_large = least_pattern<T>(least);
    const float infinity = __uint_as_float(infinite);
    float low = infinity, high = -infinity;  // of the rest
    u32 smallest = above_all;
    for (i64 chunk = warp; chunk < all; chunk += warps_of_grid()) {
        u32 above = 0, large = 0;
#pragma unroll 1
        for (int b = 0; b < chunk_blocks; ++b) {
            const i64 block = chunk * chunk_blocks + b;
            if (block * position_block >= n)
                break;
            const Portion<T> here(x, block, n);
            u32 bits = 0;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const float number = here.h[i];
                const u32 pattern = __float_as_uint(number) & 0x7fffffff;
                smallest = pattern < smallest ? pattern : smallest;
                if (pattern_of<relu>(number) >= least_large)
                    bits |= 1u << i;
                else
                    low = lesser(low, number), high = greater(high, number);
            }
            large |= here.own(bits) << b * 8;
        }
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
        above = of_last_lane(up_to_here(above));
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
#pragma unroll 1
        for (int b = 0; b < chunk_blocks; ++b) {
            if ((chunk * chunk_blocks + b) * position_block >= n)
                break;
            const Portion<T> here(x, chunk * chunk_blocks + b, n);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const u32 magnitude = magnitude_of<T>(here.h[i], relu);
                if (i < here.left && magnitude >> other_bits<T> == digit)
                    work.take(here.h[i], magnitude);
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

// ---- the scan: each block adds up what is before its part, which takes the last one as long as its own part ---------

constexpr int chunks_at_once = 16;  // of a thread
constexpr int part = threads * chunks_at_once;  // of a block

// Calls `work.visit(chunk, sum)` for each chunk of the block's parts with the sum of `work.of(chunk)` over the chunks
// before it, without those for whose sum `work.leave(sum)` was called; `work.of_whole(chunk)` is that of chunks which
// are not the last. Returns whether the last chunk was the block's.
template <class Work> __device__ inline bool scan_chunks(i64 chunks, Work& work)
{
    i64 done = 0;
    for (i64 begin = i64(blockIdx.x) * part; begin < chunks; begin += i64(gridDim.x) * part) {
        const i64 first = begin + threadIdx.x * chunks_at_once;
        u64 own = 0, total, values[chunks_at_once];
#pragma unroll 16
        for (i64 chunk = done + threadIdx.x; chunk < begin; chunk += threads)
            own += work.of_whole(chunk);  // without a branch: many loads are under way
        sum_before(own, total);
        work.leave(total);
        own = 0;
#pragma unroll
        for (int i = 0; i < chunks_at_once; ++i) {
            values[i] = first + i < chunks ? work.of(first + i) : 0;
            own += values[i];
        }
        u64 before = sum_before(own, total);
#pragma unroll
        for (int i = 0; i < chunks_at_once; ++i) {
            if (first + i < chunks)
                work.visit(first + i, before);
            before += values[i];
        }
        work.leave(total);
        done = begin + part;
    }
    return done >= chunks;
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
    __device__ u64 of_whole(i64 chunk) const { return of(chunk); }
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

template <class T>
__device__ inline void scan_outliers(const T* x, Selection* s, const Chunks& chunks, i64* starts, i64 n, bool relu)
{
    __shared__ Range of_block;
    __shared__ i64 divided;
    if (threadIdx.x == 0) {
        of_block = {0, 0};
        divided = -1;
    }
    const Found threshold = s->found[2];
    Starts work = {chunks, starts, i64(threshold.rank), 0, 0, {0, 0}, -1};
    const bool is_last = scan_chunks(chunks_of(n), work);
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
    return relu && x <= 0 ? 0 : u32(int(y));
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

// `counts`, of each block of positions, `offsets`, `values` and `levels` are written, `equals` and `starts` are of the
// scan. Not more than `outliers` are written, which there may be if another stream changes x meanwhile.
template <class T, int bits, bool relu>
__device__ inline void quantize_chunks(const T* x, u8* packed, u8* counts, u8* offsets, void* values,
    float* levels, const Selection* s, const Range* equals, const i64* starts, i64 n, i64 outliers, int kind)
{
    __shared__ float of_block[2];
    if (threadIdx.x == 0) {
        levels_of(s, float((1 << bits) - (relu ? 2 : 1)), relu, of_block);
        if (blockIdx.x == 0)
            levels[0] = of_block[0], levels[1] = of_block[1];
    }
    __syncthreads();
    const float lowest = of_block[0], inverse = __fdiv_rn(1, of_block[1]);
    const u32 threshold = s->found[2].digits;
    const u32 least_equal = least_pattern<T>(threshold), least_above = least_pattern<T>(threshold + 1);
    const i64 all = chunks_of(n);
    const int lane = threadIdx.x % lanes;
    for (i64 chunk = warp_of_grid(); chunk < all; chunk += warps_of_grid()) {
        u32 above = 0, equal = 0;
#pragma unroll 1
        for (int b = 0; b < chunk_blocks; ++b) {
            const i64 block = chunk * chunk_blocks + b;
            if (block * position_block >= n)
                break;
            const Portion<T> here(x, block, n);
            u32 codes[8], above_here = 0, large = 0;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const u32 pattern = pattern_of<relu>(here.h[i]);
                codes[i] = code_by_level<bits, relu>(here.h[i], lowest, inverse);
                if (pattern >= least_equal)
                    large |= 1u << i;
                if (pattern >= least_above)
                    above_here |= 1u << i;
            }
            Word<bits> word = gather<bits, 0>(codes);
            if (here.left < 8)
                word &= (Word<bits>(1) << (here.left * bits)) - 1;
            if (here.left > 0)
                store_group<bits>(packed, here.begin / 8, word);
            above |= here.own(above_here) << b * 8;
            equal |= here.own(large & ~above_here) << b * 8;
        }
        const InOrder above_all_of(above), equal_all_of(equal);
        const u32 quota = equals[chunk].low;  // of equals of the threshold that are outliers
        const i64 start = starts[chunk];
        if (lane < chunk_blocks && (chunk * chunk_blocks + lane) * position_block < n) {
            const u32 first = equal_all_of.before_block(lane), behind = first + equal_all_of.of_block(lane);
            const u32 kept = (behind < quota ? behind : quota) - (first < quota ? first : quota);
            counts[chunk * chunk_blocks + lane] = u8(above_all_of.of_block(lane) + kept);
        }
        for (u32 large = above | equal; large;) {
            const int bit = take_lowest(large);
            const u32 equals_before = equal_all_of.before(bit), kept = equals_before < quota ? equals_before : quota;
            const i64 at = start + above_all_of.before(bit) + kept;
            if ((above >> bit & 1 || equals_before < quota) && at < outliers) {
                offsets[at] = u8(lane * 8 + bit % 8);
                keep_value(widen(x[element_of(chunk, bit)]), values, at, kind);
            }
        }
    }
}

// The outliers of each chunk, by the number in each of its blocks.
struct OfBlocks {
    const u8* counts;
    i64* starts;
    i64 blocks, sum;
    __device__ u64 of(i64 chunk) const
    {
        const i64 block = chunk * chunk_blocks;
        if (blocks - block >= chunk_blocks)
            return of_whole(chunk);
        u64 here = 0;
        for (int b = 0; b < blocks - block; ++b)
            here += counts[block + b];
        return here;
    }
    __device__ u64 of_whole(i64 chunk) const
    {
        const u32 here = reinterpret_cast<const u32*>(counts)[chunk];  // four bytes, which are aligned
        const u32 pairs = (here & 0x00ff00ff) + (here >> 8 & 0x00ff00ff);
        return (pairs & 0xffff) + (pairs >> 16);
    }
    __device__ void visit(i64 chunk, u64 before) const { starts[chunk] = sum + i64(before); }
    __device__ void leave(u64 total) { sum += i64(total); }
};

__device__ inline void locate_outliers(const u8* counts, i64* starts, i64 n)
{
    OfBlocks work = {counts, starts, (n + position_block - 1) / position_block, 0};
    scan_chunks(chunks_of(n), work);
}

// The value of a code; code 0 with `relu` is 0, and NaN in a rest that is.
template <class T, bool relu> __device__ inline float value_of_code(u32 code, float lowest, float step)
{
    if (relu && code == 0)
        return __fmul_rn(0, step);
    const float value = relu ? __fmul_rn(float(code - 1), step) : __fadd_rn(lowest, __fmul_rn(float(code), step));
    return greater(lesser(value, limit<T>), relu ? least<T> : -limit<T>);
}

// In bounds whatever the parts hold: they may have changed since they were checked.
template <class T, int bits, bool relu>
__device__ inline void dequantize_chunks(const u8* packed, const u8* counts, const u8* offsets, const void* values,
    const float* levels, const i64* starts, T* out, i64 n, i64 outliers, int kind)
{
    const float lowest = levels[0], step = levels[1];
    const i64 all = chunks_of(n);
    for (i64 chunk = warp_of_grid(); chunk < all; chunk += warps_of_grid()) {
        i64 start = starts[chunk];
#pragma unroll 1
        for (int b = 0; b < chunk_blocks; ++b) {
            const i64 block = chunk * chunk_blocks + b, begin = block * position_block;
            if (begin >= n)
                break;
            const i64 first = begin + threadIdx.x % lanes * 8;
            if (threadIdx.x % lanes < holders && first < n) {
                const Word<bits> word = load_group<bits>(packed, first / 8);
                float h[8];
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    h[i] = value_of_code<T, relu>(unpack<bits>(word, i), lowest, step);
                store_eight(h, out + first, n - first);
            }
            __syncwarp();  // outliers come after what their codes stand for
            const i64 most = n - begin < position_block ? n - begin : position_block;
            i64 many = counts[block] < most ? counts[block] : most;
            many = many < outliers - start ? many : outliers - start;
            for (i64 i = threadIdx.x % lanes; i < many; i += lanes) {
                const i64 offset = offsets[start + i];
                narrow(kept_value(values, start + i, kind), out[begin + (offset < most ? offset : most - 1)]);
            }
            start += many > 0 ? many : 0;
        }
    }
}

}  // namespace fewbit
