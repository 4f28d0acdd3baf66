// ---- random bits by their place: Philox4x32-7, as runtime/tensors/philox.py specifies it -----------------------

namespace fewbit {

// The 128 random bits of a counter: 16 for each of the 8 codes of a group, element 0 the lowest of word 0.
struct Random {
    u32 words[4];
    __device__ u32 half(int i) const { return words[i / 2] >> (i % 2 * 16) & 0xffff; }
};

// One instruction: of a product of two u64 the compiler adds up the halves that are 0, 14 times in 8 codes.
__device__ inline u64 wide_product(u32 a, u32 b)
{
#ifdef __CUDACC__
    u64 product;
    asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
    return product;
#else
    return u64(a) * b;
#endif
}

__device__ inline Random philox(u64 counter, u64 key)
{
    u32 c0 = u32(counter), c1 = u32(counter >> 32), c2 = 0, c3 = 0;
    u32 k0 = u32(key), k1 = u32(key >> 32);
#pragma unroll
    for (int round = 0; round < 7; ++round) {
        const u64 p0 = wide_product(c0, 0xD2511F53u), p1 = wide_product(c2, 0xCD9E8D57u);
        const u32 next0 = u32(p1 >> 32) ^ c1 ^ k0, next2 = u32(p0 >> 32) ^ c3 ^ k1;
        c0 = next0, c1 = u32(p1), c2 = next2, c3 = u32(p0);
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    return {c0, c1, c2, c3};
}

// A key: the number itself, or so many after what lies at an address in the GPU's memory. A CUDA graph repeats the
// arguments of its launches: only what a replay has drawn anew differs from one replay to the next.
__device__ inline u64 key_of(i64 seed, const i64* drawn)
{
    return drawn ? (u64(*drawn) + u64(seed)) & ~(u64(1) << 63) : u64(seed);
}

}  // namespace fewbit
