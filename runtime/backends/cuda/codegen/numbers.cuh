// ---- numbers: four floating-point types, and the type in which each is computed ---------------------------------

namespace fewbit {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

struct half { u16 bits; };
struct bfloat16 { u16 bits; };

// float for the types of 16 bits, as torch computes; else the type itself.
template <class T> struct arithmetic_of { using type = float; };
template <> struct arithmetic_of<double> { using type = double; };
template <class T> using arithmetic = typename arithmetic_of<T>::type;

__device__ inline float widen(float x) { return x; }
__device__ inline double widen(double x) { return x; }
__device__ inline void narrow(float x, float& to) { to = x; }
__device__ inline void narrow(double x, double& to) { to = x; }

#ifdef __CUDACC__

__device__ inline float widen(half x)
{
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}

__device__ inline float widen(bfloat16 x) { return __uint_as_float(u32(x.bits) << 16); }

// To nearest, ties to even. Two at once is one instruction where there is one, from sm_80 on.
#if __CUDA_ARCH__ >= 800
__device__ inline void narrow(float x, float y, half& x_to, half& y_to)
{
    u32 both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(y), "f"(x));
    x_to.bits = u16(both), y_to.bits = u16(both >> 16);
}

__device__ inline void narrow(float x, float y, bfloat16& x_to, bfloat16& y_to)
{
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(y), "f"(x));
    x_to.bits = u16(both), y_to.bits = u16(both >> 16);
}

template <class T> __device__ inline void narrow(float x, T& to)
{
    T nothing;
    narrow(x, 0.0f, to, nothing);
}
#else
__device__ inline void narrow(float x, half& to) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to.bits) : "f"(x)); }

__device__ inline void narrow(float x, bfloat16& to)
{
    const u32 bits = __float_as_uint(x);
    to.bits = x != x ? 0x7fff : u16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
#endif
#endif  // elsewhere, whoever compiles this on a host supplies them

template <class T> __device__ inline void narrow(arithmetic<T> x, arithmetic<T> y, T& x_to, T& y_to)
{
    narrow(x, x_to);
    narrow(y, y_to);
}

// What is left of x once it was stored as a T: where torch does two operations, the first one's result is.
template <class T> __device__ inline arithmetic<T> rounded(arithmetic<T> x)
{
    T stored;
    narrow(x, stored);
    return widen(stored);
}

// Two 16-bit numbers in a word, the first in its lower half. An instruction takes either half of a word, or makes both:
// of numbers that lie apart one more would be spent on each.
#if defined(__CUDACC__) && __CUDA_ARCH__ >= 800
__device__ inline float first_of(u32 pair, bfloat16) { return __uint_as_float(pair << 16); }
__device__ inline float second_of(u32 pair, bfloat16) { return __uint_as_float(pair & 0xffff0000u); }

__device__ inline float first_of(u32 pair, half)
{
    float y;
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, low;}" : "=f"(y) : "r"(pair));
    return y;
}

__device__ inline float second_of(u32 pair, half)
{
    float y;
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, high;}" : "=f"(y) : "r"(pair));
    return y;
}

__device__ inline u32 pair_of(float x, float y, bfloat16)
{
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(y), "f"(x));
    return pair;
}

__device__ inline u32 pair_of(float x, float y, half)
{
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(y), "f"(x));
    return pair;
}
#else
template <class T> __device__ inline float first_of(u32 pair, T) { return widen(T{u16(pair)}); }
template <class T> __device__ inline float second_of(u32 pair, T) { return widen(T{u16(pair >> 16)}); }

template <class T> __device__ inline u32 pair_of(float x, float y, T)
{
    T first, second;
    narrow(x, first);
    narrow(y, second);
    return first.bits | u32(second.bits) << 16;
}
#endif

// One 16-byte load or store: 8, 4 or 2 numbers, of which neighbours are taken and set together.
template <class T> struct alignas(16) Chunk {
    static constexpr int size = 16 / sizeof(T);
    T at[size];
    __device__ void get(int i, T& x, T& y) const { x = at[i], y = at[i + 1]; }
    __device__ void set(int i, T x, T y) { at[i] = x, at[i + 1] = y; }
    __device__ void load_part(const T* from, i64 left)
    {
#pragma unroll
        for (int i = 0; i < size; ++i)
            at[i] = i < left ? from[i] : T(0);
    }
    __device__ void store_part(T* to, i64 left) const
    {
#pragma unroll
        for (int i = 0; i < size; ++i)
            if (i < left)
                to[i] = at[i];
    }
};

template <class T> struct alignas(16) ChunkOfPairs {
    static constexpr int size = 8;
    u32 pairs[4];
    __device__ void get(int i, float& x, float& y) const
    {
        x = first_of(pairs[i / 2], T{}), y = second_of(pairs[i / 2], T{});
    }
    __device__ void set(int i, float x, float y) { pairs[i / 2] = pair_of(x, y, T{}); }
    __device__ void load_part(const T* from, i64 left)
    {
#pragma unroll
        for (int i = 0; i < size; i += 2)
            pairs[i / 2] = (i < left ? from[i].bits : 0) | u32(i + 1 < left ? from[i + 1].bits : 0) << 16;
    }
    __device__ void store_part(T* to, i64 left) const
    {
#pragma unroll
        for (int i = 0; i < size; ++i)
            if (i < left)
                to[i].bits = u16(pairs[i / 2] >> i % 2 * 16);
    }
};

template <> struct Chunk<half> : ChunkOfPairs<half> {};
template <> struct Chunk<bfloat16> : ChunkOfPairs<bfloat16> {};

// 8 numbers in 16-byte loads and stores.
template <class T> struct alignas(16) Eight {
    u32 pairs[4];
    __device__ void widen_to(float (&to)[8]) const
    {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            to[2 * i] = first_of(pairs[i], T{}), to[2 * i + 1] = second_of(pairs[i], T{});
    }
    static __device__ Eight of(const float (&from)[8])
    {
        Eight eight;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            eight.pairs[i] = pair_of(from[2 * i], from[2 * i + 1], T{});
        return eight;
    }
};

template <> struct alignas(16) Eight<float> {
    float at[8];
    __device__ void widen_to(float (&to)[8]) const
    {
#pragma unroll
        for (int i = 0; i < 8; ++i)
            to[i] = at[i];
    }
    static __device__ Eight of(const float (&from)[8])
    {
        Eight eight;
#pragma unroll
        for (int i = 0; i < 8; ++i)
            eight.at[i] = from[i];
        return eight;
    }
};

}  // namespace fewbit
