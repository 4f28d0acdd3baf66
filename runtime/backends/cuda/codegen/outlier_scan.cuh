// ---- outliers: the scan. Parts of the chunks, one a thread, are added up; then each block adds up those before its own -

namespace fewbit {

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

}  // namespace fewbit
