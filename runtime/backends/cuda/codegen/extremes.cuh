// ---- the lesser and the greater of two numbers or pairs, NaN if one of them is -------------------------------------

namespace fewbit {

#if defined(__CUDACC__) && __CUDA_ARCH__ >= 800
__device__ inline float lesser(float a, float b)
{
    float y;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}

__device__ inline float greater(float a, float b)
{
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}

#define FEWBIT_OF_PAIRS(name, instruction, T)                       \
    __device__ inline u32 name(u32 a, u32 b, T)                     \
    {                                                               \
        u32 y;                                                      \
        asm(instruction " %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b)); \
        return y;                                                   \
    }
FEWBIT_OF_PAIRS(lesser, "min.NaN.bf16x2", bfloat16)
FEWBIT_OF_PAIRS(greater, "max.NaN.bf16x2", bfloat16)
FEWBIT_OF_PAIRS(lesser, "min.NaN.f16x2", half)
FEWBIT_OF_PAIRS(greater, "max.NaN.f16x2", half)
#undef FEWBIT_OF_PAIRS
#else
__device__ inline float lesser(float a, float b) { return a != a || a <= b ? a : b; }
__device__ inline float greater(float a, float b) { return a != a || a >= b ? a : b; }

template <class T> __device__ inline u32 lesser(u32 a, u32 b, T)
{
    return pair_of(lesser(first_of(a, T{}), first_of(b, T{})), lesser(second_of(a, T{}), second_of(b, T{})), T{});
}
template <class T> __device__ inline u32 greater(u32 a, u32 b, T)
{
    return pair_of(greater(first_of(a, T{}), first_of(b, T{})), greater(second_of(a, T{}), second_of(b, T{})), T{});
}
#endif

// The numbers within the type, outside which a level may lie.
template <class T> __device__ inline void clamp(Eight<T>& h)
{
    const u32 most = pair_of(limit<T>, limit<T>, T{});
#pragma unroll
    for (int i = 0; i < 4; ++i)
        h.pairs[i] = greater(lesser(h.pairs[i], most, T{}), most ^ 0x80008000u, T{});
}

__device__ inline void clamp(Eight<float>& h)
{
#pragma unroll
    for (int i = 0; i < 8; ++i)
        h.at[i] = greater(lesser(h.at[i], limit<float>), -limit<float>);
}

}  // namespace fewbit
