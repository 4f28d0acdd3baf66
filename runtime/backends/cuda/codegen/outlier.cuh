// ---- outliers: the arithmetic of runtime/backends/reference/outlier.py, step by step -------------------------------
// No product is merged with a sum: see per_group.cuh. A warp takes a block of 240 positions at once, 30 of its lanes 8
// elements each, and one chunk of four such blocks after the other. The threshold is found digit by digit:
//
//   first     counts the highest 11 bits of all magnitudes
//   survey    what is above that digit is an outlier, what is below is of the rest; elements of the digit, the
//             candidates, are listed, and their next 10 bits counted
//   refine    counts the last 10 bits of candidates; magnitudes of 16-bit numbers have none left
//   count     which candidates are outliers
//   scan      where the outliers of each chunk begin, and the levels
//   quantize  codes of all, and outliers, by reading x a third time
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

// Where the lane's 8 elements of a block of positions begin, and how many are left there: none for lanes without.
struct Portion {
    i64 begin, left;
    __device__ Portion(i64 block, i64 n) : begin(block * position_block + threadIdx.x % lanes * 8)
    {
        left = threadIdx.x % lanes < holders && begin < n ? n - begin : 0;
    }
};

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
template <class T>
__device__ inline void survey_chunks(
    const T* x, Selection* s, const Selection* sample, const Chunks& chunks, i64 n, u64 rank, bool relu)
{
    __shared__ Histogram<second_bits<T>> histogram;
    __shared__ Range of_block;
    if (threadIdx.x == 0)
        of_block = {0, 0};
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
    u64 listed = 0;
    Range rest = {0, 0};
    bool zeros = false;
    for (i64 chunk = warp; chunk < all; chunk += warps_of_grid()) {
        u32 above = 0;
#pragma unroll 1
        for (int b = 0; b < chunk_blocks; ++b) {
            const Portion here(chunk * chunk_blocks + b, n);
            float h[8];
            load_eight(x + here.begin, here.left, h);
            u32 candidates = 0;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                if (i >= here.left)
                    continue;
                const u32 magnitude = magnitude_of<T>(h[i], relu);
                zeros |= h[i] == 0;
                above += magnitude >= beyond;
                if (magnitude < least) {
                    rest.add(h[i]);
                } else if (magnitude < beyond) {
                    candidates |= 1u << i;
                    histogram.add(magnitude >> third_bits<T> & ((1u << second_bits<T>) - 1));
                }
            }
            const u32 many = __popc(candidates), upto = up_to_here(many);
            i64 at = i64(listed) + upto - many;
#pragma unroll
            for (int i = 0; i < 8; ++i)
                if (candidates >> i & 1 && at < chunks.room)
                    list[at++] = u64(chunk) << 32 | __float_as_uint(h[i]);
            listed += of_last_lane(upto);
        }
        above = of_last_lane(up_to_here(above));
        if (threadIdx.x % lanes == 0) {
            chunks.counts[chunk] = above;
            chunks.equals[chunk] = {0, 0};
        }
    }
    if (threadIdx.x % lanes == 0)
        chunks.listed[warp] = listed;
    rest.merge_into(&of_block);
    if (zeros)
        s->has_zeros = 1;
    histogram.flush(s->second);  // a barrier is before it
    if (threadIdx.x == 0)
        of_block.merge_into(&s->rest);
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
            const Portion here(chunk * chunk_blocks + b, n);
            float h[8];
            load_eight(x + here.begin, here.left, h);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const u32 magnitude = magnitude_of<T>(h[i], relu);
                if (i < here.left && magnitude >> other_bits<T> == digit)
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

// ---- the scan, by one block ----------------------------------------------------------------------------------------

constexpr int chunks_at_once = 16;  // of a thread

// Calls `work.visit(chunk, sum)` with the sum of `work.of(chunk)` over the chunks before each, without those for which
// `work.leave(sum)` was called.
template <class Work> __device__ inline void scan_chunks(i64 chunks, Work& work)
{
    for (i64 begin = 0; begin < chunks; begin += threads * chunks_at_once) {
        const i64 first = begin + threadIdx.x * chunks_at_once;
        u64 own = 0, total, values[chunks_at_once];
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
    }
}

// Outliers above the threshold, and in the upper 32 bits its equals, of which the first `quota` are outliers too: where
// the outliers of each chunk begin. The counts of the chunks become those of such equals.
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
        chunks.counts[chunk] = u32(outliers);
        if (outliers == 0)
            rest.merge(chunks.equals[chunk]);
        else if (outliers < here)
            divided = chunk;
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
__device__ inline void scan_outliers(
    const T* x, Selection* s, const Chunks& chunks, i64* starts, float* levels, i64 n, float steps, bool relu)
{
    __shared__ Range of_block;
    __shared__ i64 divided;
    if (threadIdx.x == 0) {
        of_block = {0, 0};
        divided = -1;
    }
    const Found threshold = s->found[2];
    Starts work = {chunks, starts, i64(threshold.rank), 0, 0, {0, 0}, -1};
    scan_chunks(chunks_of(n), work);
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
            if (i < left && magnitude_of<T>(h[i], relu) == threshold.digits && before++ >= chunks.counts[divided])
                rest.add(h[i]);
    }
    rest.merge_into(&of_block);
    __syncthreads();
    if (threadIdx.x == 0) {
        s->outliers = work.above + work.kept(work.equal);
        rest = s->rest;
        rest.merge(of_block);
        const float infinity = __uint_as_float(infinite), nan = __uint_as_float(0x7fc00000);
        float low = rest.is_empty() ? 0 : rest.least(), high = rest.is_empty() ? 0 : rest.greatest();
        if (!(low >= -infinity && high <= infinity))
            high = nan;
        levels_of(low, high, s->has_zeros != 0, steps, relu, levels);
    }
}

// ---- codes and outliers --------------------------------------------------------------------------------------------

template <int bits> __device__ inline u32 code_by_level(float x, float lowest, float inverse, bool relu)
{
    constexpr float top = (1 << bits) - 1;
    const float bottom = relu ? 1 : 0;
    float y = __fadd_rn(__fmul_rn(__fsub_rn(x, lowest), inverse), relu ? 1.5f : 0.5f);
    y = y > bottom ? y : bottom;  // NaN too
    y = y < top ? y : top;
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

// Which dtype the outliers have: tensors/dtypes.py.
enum { kind_single, kind_half, kind_brain };

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

// `counts`, of each block of positions, `offsets` and `values` are written, `of_chunks` and `starts` are of the scan.
// Not more than `outliers` are written, which there may be if another stream changes x meanwhile.
template <class T, int bits>
__device__ inline void quantize_chunks(const T* x, u8* packed, u8* counts, u8* offsets, void* values,
    const float* levels, const Selection* s, const u32* of_chunks, const i64* starts, i64 n, i64 outliers, bool relu,
    int kind)
{
    const u32 threshold = s->found[2].digits;
    const float lowest = levels[0], inverse = __fdiv_rn(1, levels[1]);
    const i64 all = chunks_of(n);
    const int lane = threadIdx.x % lanes;
    for (i64 chunk = warp_of_grid(); chunk < all; chunk += warps_of_grid()) {
        i64 start = starts[chunk];
        u32 quota = of_chunks[chunk];  // of equals of the threshold that are outliers
#pragma unroll 1
        for (int b = 0; b < chunk_blocks; ++b) {
            const i64 block = chunk * chunk_blocks + b;
            if (block * position_block >= n)
                break;
            const Portion here(block, n);
            float h[8];
            load_eight(x + here.begin, here.left, h);
            Word<bits> word = 0;
            u32 above = 0, equal = 0;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                if (i >= here.left)
                    continue;
                const u32 magnitude = magnitude_of<T>(h[i], relu);
                word |= pack<bits>(code_by_level<bits>(h[i], lowest, inverse, relu), i);
                above |= u32(magnitude > threshold) << i;
                equal |= u32(magnitude == threshold) << i;
            }
            if (here.left > 0)
                store_group<bits>(packed, here.begin / 8, word);
            const u32 own = __popc(above) | __popc(equal) << 16, upto = up_to_here(own), all_of = of_last_lane(upto);
            u32 equals_before = (upto - own) >> 16;
            const u32 equals_kept = equals_before < quota ? equals_before : quota;
            i64 at = start + ((upto - own) & 0xffff) + equals_kept;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const bool is_equal = equal >> i & 1, is_first = is_equal && equals_before < quota;
                equals_before += is_equal;
                if ((above >> i & 1 || is_first) && at < outliers) {
                    offsets[at] = u8(lane * 8 + i);
                    keep_value(h[i], values, at, kind);
                    ++at;
                }
            }
            const u32 equals_here = all_of >> 16, kept_here = equals_here < quota ? equals_here : quota;
            if (lane == 0)
                counts[block] = u8((all_of & 0xffff) + kept_here);
            start += (all_of & 0xffff) + kept_here;
            quota -= kept_here;
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
        u64 here = 0;
#pragma unroll
        for (int b = 0; b < chunk_blocks; ++b)
            here += chunk * chunk_blocks + b < blocks ? counts[chunk * chunk_blocks + b] : 0;
        return here;
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
template <class T> __device__ inline float value_of_code(u32 code, float lowest, float step, bool relu)
{
    if (relu && code == 0)
        return __fmul_rn(0, step);
    const float value = relu ? __fmul_rn(float(code - 1), step) : __fadd_rn(lowest, __fmul_rn(float(code), step));
    const float low = relu ? least<T> : -limit<T>;
    return value > limit<T> ? limit<T> : value < low ? low : value;
}

// In bounds whatever the parts hold: they may have changed since they were checked.
template <class T, int bits>
__device__ inline void dequantize_chunks(const u8* packed, const u8* counts, const u8* offsets, const void* values,
    const float* levels, const i64* starts, T* out, i64 n, i64 outliers, bool relu, int kind)
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
            const Portion here(block, n);
            if (here.left > 0) {
                const Word<bits> word = load_group<bits>(packed, here.begin / 8);
                float h[8];
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    h[i] = value_of_code<T>(unpack<bits>(word, i), lowest, step, relu);
                store_eight(h, out + here.begin, here.left);
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
