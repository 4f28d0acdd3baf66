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
template <class T, class Work> __device__ inline void each_chunk(const T* x, i64 n, Work& work)
{
    const i64 all = chunks_of(n), whole = aligned(x) ? n / chunk_elements : 0;
    i64 chunk = warp_of_grid();
    for (; chunk < whole; chunk += warps_of_grid())
        work.template take<true>(chunk);
    for (; chunk < all; chunk += warps_of_grid())
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

}  // namespace fewbit
