// ---- codes and levels of a table in memory: one kernel for all tables, of activations that exchange theirs ----------

namespace fewbit {

// The number of boundaries below x; of NaN all.
template <class T> __device__ inline int interval_of(float x, const T* boundaries, int count)
{
    int begin = 0;
    for (int end = count; begin < end;) {
        const int middle = (begin + end) / 2;
        if (x <= widen(boundaries[middle]))
            end = middle;
        else
            begin = middle + 1;
    }
    return begin;
}

template <class T, int bits>
__device__ inline void encode_eights(const T* x, u8* packed, i64 n, const T* boundaries, int count, const u8* codes)
{
    const i64 step = i64(gridDim.x) * threads;
    for (i64 group = i64(blockIdx.x) * threads + threadIdx.x; group * 8 < n; group += step) {
        const i64 left = n - group * 8;
        float values[8];
        load_eight(x + group * 8, left, values);
        Word<bits> word = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (i < left)
                word |= pack<bits>(codes[interval_of(values[i], boundaries, count)], i);
        store_group<bits>(packed, group, word);
    }
}

// gradient * level, 0 where the level is; codes without a level have 0.
template <class T, int bits>
__device__ inline void multiply_eights(const T* grad, const u8* packed, T* result, i64 n, const float* levels, u32 count)
{
    const i64 step = i64(gridDim.x) * threads;
    for (i64 group = i64(blockIdx.x) * threads + threadIdx.x; group * 8 < n; group += step) {
        const Word<bits> word = load_group<bits>(packed, group);
        float values[8];
        load_eight(grad + group * 8, n - group * 8, values);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const u32 code = unpack<bits>(word, i);
            const float level = code < count ? levels[code] : 0.0f;
            values[i] = level == 0.0f ? 0.0f : __fmul_rn(values[i], level);
        }
        store_eight(values, result + group * 8, n - group * 8);
    }
}

}  // namespace fewbit
