// ---- what the quantizers' kernels share: 8 numbers at once, those of a group of codes ------------------------------

namespace fewbit {

// Which dtype numbers have: tensors/traits.py, and float64.
enum { kind_single, kind_half, kind_brain, kind_double };

// a / b, in 32 bits where they suffice: a division in 64 takes many times longer.
__device__ inline i64 quotient(i64 a, i64 b)
{
    return (a | b) >> 32 ? a / b : i64(u32(a) / u32(b));
}

// 8 numbers from `from` on, those that are left; the others are 0.
template <class T> __device__ inline void load_eight(const T* from, i64 left, float (&to)[8])
{
    if (left >= 8 && aligned(from)) {
        const Eight<T> whole = *reinterpret_cast<const Eight<T>*>(from);  // a copy: members by themselves are not one load
        return whole.widen_to(to);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i)
        to[i] = i < left ? widen(from[i]) : 0.0f;
}

// Stores of 16 bytes, spelt out: beside the stores of single numbers the compiler takes four for one.
template <class T> __device__ inline void store_whole(const Eight<T>& eight, T* to)
{
#ifdef __CUDACC__
    const u32* words = reinterpret_cast<const u32*>(&eight);
#pragma unroll
    for (int i = 0; i < int(sizeof(T)) * 2; i += 4)
        asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                     :
                     : "l"(reinterpret_cast<u32*>(to) + i), "r"(words[i]), "r"(words[i + 1]), "r"(words[i + 2]),
                       "r"(words[i + 3])
                     : "memory");
#else
    *reinterpret_cast<Eight<T>*>(to) = eight;
#endif
}

template <class T> __device__ inline void store_eight(const float (&values)[8], T* to, i64 left)
{
    if (left >= 8 && aligned(to))
        return store_whole(Eight<T>::of(values), to);
#pragma unroll
    for (int i = 0; i < 8; ++i)
        if (i < left)
            narrow(values[i], to[i]);
}

// Store a lane's 8 numbers.
template <class T> __device__ inline void store_in_warp(const Eight<T>& h, T* out, u32 eight, bool active, int)
{
    if (active)
        reinterpret_cast<Eight<T>*>(out)[eight] = h;
}

// Of 32-bit numbers two lanes exchange halves, so that each store fills whole sectors of 32 bytes: the first half of both
// eights, of which the even lane has the first, then the second.
__device__ inline void store_halves(
    const Eight<float>& h, float* out, u32 even, bool even_active, bool odd_active, int lane)
{
    const bool upper = lane & 1;
    Chunk<float> first, second;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float other = __shfl_xor_sync(0xffffffffu, upper ? h.at[i] : h.at[4 + i], 1);
        first.at[i] = upper ? other : h.at[i];
        second.at[i] = upper ? h.at[4 + i] : other;
    }
    Chunk<float>* to = reinterpret_cast<Chunk<float>*>(out) + u64(even) * 2 + upper;
    if (even_active)
        to[0] = first;
    if (odd_active)
        to[2] = second;
}

__device__ inline void store_in_warp(const Eight<float>& h, float* out, u32 eight, bool active, int lane)
{
    const bool other_active = __shfl_xor_sync(0xffffffffu, int(active), 1), odd = lane & 1;
    const u32 other = __shfl_xor_sync(0xffffffffu, eight, 1);
    store_halves(h, out, odd ? other : eight, odd ? other_active : active, odd ? active : other_active, lane);
}

// The same of lanes whose eights follow each other, and of which two neighbours are both active or not.
template <class T> __device__ inline void store_in_pairs(const Eight<T>& h, T* out, u32 eight, bool active, int)
{
    if (active)
        reinterpret_cast<Eight<T>*>(out)[eight] = h;
}

__device__ inline void store_in_pairs(const Eight<float>& h, float* out, u32 eight, bool active, int lane)
{
    store_halves(h, out, eight - (lane & 1), active, active, lane);
}

// Those of 8 numbers that are left, at any address.
template <class T> __device__ inline void store_part(const Eight<T>& h, T* to, i64 left)
{
    float values[8];
    h.widen_to(values);
#pragma unroll
    for (int i = 0; i < 8; ++i)
        if (i < left)
            narrow(values[i], to[i]);
}

// What no value of the type exceeds: a level outside the group may lie outside the type.
template <class T> constexpr float limit = 3.402823466e38f;
template <> constexpr float limit<half> = 65504.0f;
template <> constexpr float limit<bfloat16> = 3.389531390e38f;

// Just above 0, in numbers of the type.
template <class T> constexpr float least = 1.17549435e-38f;
template <> constexpr float least<half> = 5.9604645e-8f;

// Integers in the order of the floats whose bits they were, NaN at both ends; its own inverse.
__device__ inline int ordered(int bits) { return bits ^ (bits >> 31 & 0x7fffffff); }

}  // namespace fewbit
