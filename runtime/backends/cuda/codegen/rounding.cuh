// ---- codes of a table of kind stochastic: the arithmetic of runtime/tensors/rounding_table.py, step by step ---------
// No product is merged with a sum (__fmul_rn, __fadd_rn): every device then finds the same codes.

namespace fewbit {

// The lines by which x becomes its position between levels.
struct Lines {
    float low, high, inverse;
    const float *slope, *base, *jumps;
    int last, jump_count;

    __device__ float position(float x) const
    {
        float inside = x == x ? x : 0.0f;
        inside = inside < low ? low : inside > high ? high : inside;
        int cell = int(__fmul_rn(__fsub_rn(inside, low), inverse));
        cell = cell < last ? cell : last;
        for (int i = 0; i < jump_count; ++i)
            cell += x > jumps[i];
        return __fadd_rn(__fmul_rn(slope[cell], inside), base[cell]);
    }
};

// The codes of x, whose numbers lie one after the other: 8 a thread at once.
template <class T, int bits>
__device__ inline void round_at_random(const T* x, u8* packed, i64 n, const Lines& lines, u32 top, u64 seed)
{
    const float most = float(top << 16);
    const i64 step = i64(gridDim.x) * threads;
    for (i64 group = i64(blockIdx.x) * threads + threadIdx.x; group * 8 < n; group += step) {
        const i64 left = n - group * 8;
        float values[8];
        load_eight(x + group * 8, left, values);
        const Random random = philox(u64(group), seed);
        Word<bits> word = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float scaled = __fadd_rn(__fmul_rn(lines.position(values[i]), 65536.0f), 0.5f);
            const u32 inside = u32(int(scaled < 0.0f ? 0.0f : scaled > most ? most : scaled));
            const u32 drawn = (inside + random.half(i)) >> 16;
            const u32 code = values[i] == values[i] && drawn < top ? drawn : top;
            if (i < left)
                word |= pack<bits>(code, i);
        }
        store_group<bits>(packed, group, word);
    }
}

}  // namespace fewbit
