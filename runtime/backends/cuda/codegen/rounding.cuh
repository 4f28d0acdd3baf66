// ---- codes of a table of kind stochastic: the arithmetic of runtime/tensors/levels.py, step by step ---------
// No product is merged with a sum (__fmul_rn, __fadd_rn) but by powers of two: every device then finds the same codes.

namespace fewbit {

struct alignas(8) Cell { float slope, base; };

constexpr int most_cells = 4096;  // of a table in shared memory, 32 KiB; others are read from the device's, 30 times slower

// The integer of a number from 0 to below 2^23, plus `raised`. A sum has its bits without a conversion, of which a
// multiprocessor does an eighth as many.
#ifdef __CUDACC__
constexpr u32 raised = 0x4b000000;
__device__ inline u32 raised_integer(float y) { return __float_as_uint(__fadd_rz(y, 8388608.0f)); }
#else
constexpr u32 raised = 0;
__device__ inline u32 raised_integer(float y) { return u32(int(y)); }
#endif

// The lines by which x becomes its position between levels.
struct Lines {
    float low, high, inverse;
    const float *slope, *base, *jumps;
    int last, jump_count;

    __device__ int count() const { return last + 1 + jump_count; }
    __device__ Cell cell(int i) const { return {slope[i], base[i]}; }
    // 65536 times the position, and one half; NaN is anywhere. A `plain` table has no jumps, and is in shared memory with
    // its last cell twice.
    template <bool plain> __device__ float scaled(float x, const Cell* cells) const
    {
        const float inside = fminf(fmaxf(x, low), high);
        const float t = __fmul_rn(__fsub_rn(inside, low), inverse);
        u32 i = raised_integer(plain ? t : fminf(t, float(last))) - raised;
        if (!plain)
#pragma unroll 1
            for (int j = 0; j < jump_count; ++j)
                i += x > jumps[j];
        const Cell here = plain || cells ? cells[i] : cell(int(i));
        return fmaf(__fadd_rn(__fmul_rn(here.slope, inside), here.base), 65536.0f, 0.5f);
    }
};

// The word of 8 codes. `cells` are those of the lines, or null.
template <class T, int bits, bool plain>
__device__ inline Word<bits> drawn_codes(
    const Eight<T>& eight, const Random& random, const Lines& lines, const Cell* cells, u32 top)
{
    const u32 greatest = (bits < 8 ? raised : 0) + (top << 16 | 0xffff);
    float h[8], nothing = 0;
    u32 sums[8];
    eight.widen_to(h);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float inside = fmaxf(lines.scaled<plain>(h[i], cells), 0.0f);  // what is above the greatest becomes it
        const u32 sum = (bits < 8 ? raised_integer(inside) : u32(int(inside))) + random.half(i);
        sums[i] = sum < greatest ? sum : greatest;
        nothing = fmaf(h[i], 0.0f, nothing);
    }
    if (nothing != nothing)  // NaN, or an infinity
#pragma unroll
        for (int i = 0; i < 8; ++i)
            sums[i] = h[i] == h[i] ? sums[i] : greatest;
    return gather<bits, 2>(sums);
}

template <class Function, class T> __device__ inline Eight<T> images(const Eight<T>& eight)
{
    float h[8];
    eight.widen_to(h);
#pragma unroll
    for (int i = 0; i < 8; ++i)
        h[i] = Function::of(h[i]);
    return Eight<T>::of(h);
}

// The codes of x, whose numbers lie one after the other, and y = Function(x): 8 a thread at once, of those in aligned
// memory that all lanes of a warp have several.
template <class T, int bits, class Function, bool plain>
__device__ inline void round_eights(
    const T* x, T* y, u8* packed, i64 n, const Lines& lines, const Cell* cells, u32 top, u64 seed)
{
    constexpr int many = plain ? 2 : 1;
    const bool all_aligned = aligned(x) && (!Function::writes || aligned(y));
    const i64 stride = i64(gridDim.x) * threads, whole = all_aligned ? n / (8 * lanes) * lanes : 0;
    const int lane = threadIdx.x % lanes;
    i64 eight = i64(blockIdx.x) * threads + threadIdx.x;
    for (; eight + (many - 1) * stride < whole; eight += many * stride) {
        Eight<T> eights[many];
#pragma unroll
        for (int k = 0; k < many; ++k)
            eights[k] = reinterpret_cast<const Eight<T>*>(x)[eight + k * stride];
#pragma unroll
        for (int k = 0; k < many; ++k) {
            const u64 at = eight + k * stride;
            store_group<bits>(packed, at, drawn_codes<T, bits, plain>(eights[k], philox(at, seed), lines, cells, top));
            if (Function::writes)
                store_in_pairs(images<Function>(eights[k]), y + (at - lane) * 8, lane, true, lane);
        }
    }
    for (; eight * 8 < n; eight += stride) {
        const i64 left = n - eight * 8;
        float h[8];
        load_eight(x + eight * 8, left, h);
        const Random random = philox(u64(eight), seed);
        const Word<bits> word = drawn_codes<T, bits, plain>(Eight<T>::of(h), random, lines, cells, top);
        store_group<bits>(packed, eight, left < 8 ? word & ((Word<bits>(1) << (left * bits)) - 1) : word);
        if (Function::writes)
            store_part(images<Function>(Eight<T>::of(h)), y + eight * 8, left);
    }
}

template <class T, int bits, class Function>
__device__ inline void round_at_random(const T* x, T* y, u8* packed, i64 n, const Lines& lines, u32 top, u64 seed)
{
    __shared__ Cell shared[most_cells + 1];
    const bool fits = lines.count() <= most_cells;
    if (fits)
        for (int i = threadIdx.x; i <= lines.count(); i += threads)
            shared[i] = lines.cell(i < lines.count() ? i : i - 1);
    __syncthreads();
    if (fits && lines.jump_count == 0)
        round_eights<T, bits, Function, true>(x, y, packed, n, lines, shared, top, seed);
    else
        round_eights<T, bits, Function, false>(x, y, packed, n, lines, fits ? shared : nullptr, top, seed);
}

}  // namespace fewbit
