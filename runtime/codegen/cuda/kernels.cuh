// ---- kernels: x is read once and f(x) and its code are written; a gradient and a code make the gradient of x -----

namespace fewbit {

constexpr int lanes = 32;
constexpr int warps = 8;      // of a block
constexpr int threads = warps * lanes;
constexpr int loads = 4;      // 16-byte loads under way in a thread

// What a warp does at once: `loads` rows of one chunk a lane, so that neighbours touch neighbouring memory.
template <class T, int bits> struct Tile {
    static constexpr int elements = loads * lanes * Chunk<T>::size;
    static constexpr int bytes = elements / 8 * bits;        // of packed code: a multiple of 16
    static constexpr int sharers = 8 / Chunk<T>::size;       // lanes that hold one group of 8 elements
};

// Blocks for n elements: enough to fill any GPU, and each does its share of what is more.
template <class T> __host__ __device__ inline unsigned blocks(i64 n)
{
    const i64 tiles = (n + Tile<T, 8>::elements * warps - 1) / (Tile<T, 8>::elements * warps);
    return unsigned(tiles < 1 ? 1 : tiles < 2048 ? tiles : 2048);
}

template <class T> __device__ inline bool aligned(const T* pointer)
{
    return reinterpret_cast<u64>(pointer) % sizeof(Chunk<T>) == 0;
}

// `left` elements are there from `at` on, any number; what is beyond them is not read, and is 0.
template <class T> __device__ inline Chunk<T> load(const T* at, i64 left, bool whole)
{
    if (whole)
        return *reinterpret_cast<const Chunk<T>*>(at);
    Chunk<T> chunk = {};
#pragma unroll
    for (int i = 0; i < Chunk<T>::size; ++i)
        if (i < left)
            chunk.at[i] = at[i];
    return chunk;
}

template <class T> __device__ inline void store(T* at, const Chunk<T>& chunk, i64 left, bool whole)
{
    if (whole) {
        *reinterpret_cast<Chunk<T>*>(at) = chunk;
        return;
    }
#pragma unroll
    for (int i = 0; i < Chunk<T>::size; ++i)
        if (i < left)
            at[i] = chunk.at[i];
}

template <int bits> __device__ inline u32 smaller(u32 bytes, i64 groups)
{
    return groups * bits < i64(bytes) ? u32(groups * bits) : bytes;
}

// A function that is not there: only the code is written.
struct CodeAlone {
    static constexpr bool writes = false;
    template <class A> static __device__ A of(A x) { return x; }
};

// Write y = Function(x) and the packed code of x.
//   x, y: n numbers at any addresses; y is not read and may be x.    packed: ⌈n/8⌉·bits bytes, 16-byte aligned.
template <class T, class Codes, class Function>
__device__ void encode_tiles(const T* x, T* y, u8* packed, i64 n)
{
    constexpr int bits = Codes::bits;
    using T_ = Tile<T, bits>;
    __shared__ typename Codes::Shared table;
    alignas(16) __shared__ u8 stages[warps][T_::bytes];
    Codes::fill(table);
    const int lane = threadIdx.x % lanes;
    u8* stage = stages[threadIdx.x / lanes];
    const bool all_aligned = aligned(x) && (!Function::writes || aligned(y));
    const i64 step = i64(gridDim.x) * warps * T_::elements;
    for (i64 begin = (i64(blockIdx.x) * warps + threadIdx.x / lanes) * T_::elements; begin < n; begin += step) {
        const bool whole = all_aligned && n - begin >= T_::elements;
        Chunk<T> in[loads];
#pragma unroll
        for (int row = 0; row < loads; ++row) {
            const i64 at = begin + (row * lanes + lane) * Chunk<T>::size;
            in[row] = load(x + at, n - at, whole);
        }
#pragma unroll
        for (int row = 0; row < loads; ++row) {
            const i64 at = begin + (row * lanes + lane) * Chunk<T>::size;
            const int first = lane % T_::sharers * Chunk<T>::size;  // place of the chunk in its group
            Word<bits> word = 0;
            Chunk<T> out;
#pragma unroll
            for (int i = 0; i < Chunk<T>::size; i += 2) {
                const arithmetic<T> a = widen(in[row].at[i]), b = widen(in[row].at[i + 1]);
                word |= pack<bits>(Codes::of(a, table), i) | pack<bits>(Codes::of(b, table), i + 1);
                if (Function::writes)
                    narrow(Function::of(a), Function::of(b), out.at[i], out.at[i + 1]);
            }
            if (!whole && n - at < Chunk<T>::size)  // nothing but 0 beyond the end
                word = n > at ? word & ((Word<bits>(1) << (int(n - at) * bits)) - 1) : 0;
            if (Function::writes)
                store(y + at, out, n - at, whole);
            word <<= first * bits;
#pragma unroll
            for (int other = 1; other < T_::sharers; other *= 2)
                word |= __shfl_xor_sync(0xffffffffu, word, other);
            if (first == 0)
                store_group<bits>(stage, (row * lanes + lane) / T_::sharers, word);
        }
        __syncwarp();
        warp_copy(stage, packed + begin / 8 * bits, smaller<bits>(T_::bytes, (n - begin + 7) / 8), lane);
        __syncwarp();
    }
}

// Write result = gradient · level of the code, rounded once; where the level is 0, 0 whatever the gradient.
//   grad, result: n numbers at any addresses; result may be grad.    packed: as above.
template <class T, class Levels>
__device__ void multiply_tiles(const T* grad, const u8* packed, T* result, i64 n)
{
    constexpr int bits = Levels::bits;
    using T_ = Tile<T, bits>;
    __shared__ typename Levels::Shared table;
    alignas(16) __shared__ u8 stages[warps][T_::bytes];
    Levels::fill(table);
    const int lane = threadIdx.x % lanes;
    u8* stage = stages[threadIdx.x / lanes];
    const bool all_aligned = aligned(grad) && aligned(result);
    const i64 step = i64(gridDim.x) * warps * T_::elements;
    for (i64 begin = (i64(blockIdx.x) * warps + threadIdx.x / lanes) * T_::elements; begin < n; begin += step) {
        const bool whole = all_aligned && n - begin >= T_::elements;
        Chunk<T> in[loads];
#pragma unroll
        for (int row = 0; row < loads; ++row) {
            const i64 at = begin + (row * lanes + lane) * Chunk<T>::size;
            in[row] = load(grad + at, n - at, whole);
        }
        warp_copy(packed + begin / 8 * bits, stage, smaller<bits>(T_::bytes, (n - begin + 7) / 8), lane);
        __syncwarp();
#pragma unroll
        for (int row = 0; row < loads; ++row) {
            const i64 at = begin + (row * lanes + lane) * Chunk<T>::size;
            Word<bits> word = load_group<bits>(stage, (row * lanes + lane) / T_::sharers);
            word >>= lane % T_::sharers * Chunk<T>::size * bits;
            Chunk<T> out;
#pragma unroll
            for (int i = 0; i < Chunk<T>::size; i += 2) {
                arithmetic<T> product[2];
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const arithmetic<T> level = Levels::of(unpack<bits>(word, i + j), table);
                    product[j] = level * widen(in[row].at[i + j]);
                    if (Levels::has_zero)
                        product[j] = level == 0 ? arithmetic<T>(0) : product[j];
                }
                narrow(product[0], product[1], out.at[i], out.at[i + 1]);
            }
            store(result + at, out, n - at, whole);
        }
        __syncwarp();
    }
}

}  // namespace fewbit
