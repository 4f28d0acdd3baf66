// ---- kernels: x is read once and f(x) and its code are written; a gradient and a code make the gradient of x -----

namespace fewbit {

constexpr int lanes = 32;
constexpr int warps = 8;  // of a block
constexpr int threads = warps * lanes;

// Blocks that a multiprocessor shall hold at once: with 4 of them 64 registers are left for a thread. Double functions
// take more; and where the others spill, fewbit compiles them again for fewer blocks.
#ifndef FEWBIT_RESIDENTS
#define FEWBIT_RESIDENTS 4
#endif
template <class T> constexpr int residents = sizeof(T) == 8 && FEWBIT_RESIDENTS > 2 ? 2 : FEWBIT_RESIDENTS;

// 16-byte loads under way in a thread; more, and the registers that f takes for each number would spill.
template <class T> constexpr int loads = sizeof(T) == 2 ? 2 : 4;

// What a warp does at once: rows of one chunk a lane, so that neighbours touch neighbouring memory.
template <class T, int bits> struct Tile {
    static constexpr int elements = loads<T> * lanes * Chunk<T>::size;
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

// Of a chunk the first `left` elements alone, any number; the others are 0.
template <class T> __device__ inline Chunk<T> load_part(const T* from, i64 left)
{
    Chunk<T> chunk;
    chunk.load_part(from, left);
    return chunk;
}

// Runs tile by tile over n elements, each warp of the grid in turn: `work(begin, whole)`, where the elements of a whole
// tile are all there, in aligned memory.
template <int elements, class Work> __device__ inline void each_tile(i64 n, bool all_aligned, const Work& work)
{
    const i64 warp = i64(blockIdx.x) * warps + threadIdx.x / lanes;
    for (i64 begin = warp * elements; begin < n; begin += i64(gridDim.x) * warps * elements) {
        if (all_aligned && n - begin >= elements)
            work.whole(begin);
        else
            work.part(begin, n - begin);
    }
}

// A function that is not there: only the code is written.
struct CodeAlone {
    static constexpr bool writes = false;
    template <class A> static __device__ A of(A x) { return x; }
};

// Codes of one tile after the other.
template <class T, class Codes, class Function> struct Encoder {
    static constexpr int bits = Codes::bits;
    static constexpr int size = Chunk<T>::size;
    using Tile = fewbit::Tile<T, bits>;

    const T* x;
    T* y;
    u8* packed;
    const typename Codes::Shared& table;
    u8* stage;  // the warp's, where the tile's packed code is gathered
    int lane;

    // The codes of a chunk, and f of it.
    __device__ Word<bits> encode(const Chunk<T>& in, Chunk<T>& out) const
    {
        Word<bits> word = 0;
#pragma unroll
        for (int i = 0; i < size; i += 2) {
            arithmetic<T> a, b;
            in.get(i, a, b);
            word |= pack<bits>(Codes::of(a, table), i) | pack<bits>(Codes::of(b, table), i + 1);
            if (Function::writes)
                out.set(i, Function::of(a), Function::of(b));
        }
        return word;
    }

    // The lanes that hold a group bring its codes together, and the first of them stages it.
    __device__ void gather(Word<bits> word, int row) const
    {
        const int sharer = lane % Tile::sharers;
        word <<= sharer * size * bits;
#pragma unroll
        for (int other = 1; other < Tile::sharers; other *= 2)
            word |= __shfl_xor_sync(0xffffffffu, word, other);
        if (sharer == 0)
            store_group<bits>(stage, (row * lanes + lane) / Tile::sharers, word);
    }

    __device__ void whole(i64 begin) const
    {
        Chunk<T> in[loads<T>];
#pragma unroll
        for (int row = 0; row < loads<T>; ++row)
            in[row] = reinterpret_cast<const Chunk<T>*>(x + begin)[row * lanes + lane];
#pragma unroll
        for (int row = 0; row < loads<T>; ++row) {
            Chunk<T> out;
            gather(encode(in[row], out), row);
            if (Function::writes)
                reinterpret_cast<Chunk<T>*>(y + begin)[row * lanes + lane] = out;
        }
        __syncwarp();
        warp_copy<Tile::bytes>(stage, packed + begin / 8 * bits, lane);
        __syncwarp();
    }

    __device__ void part(i64 begin, i64 left) const
    {
#pragma unroll 1
        for (int row = 0; row < loads<T>; ++row) {
            const int at = (row * lanes + lane) * size;
            const i64 here = left - at;
            Chunk<T> out;
            Word<bits> word = encode(load_part(x + begin + at, here), out);
            if (here < size)  // the bits beyond the end are 0
                word = here > 0 ? word & ((Word<bits>(1) << (int(here) * bits)) - 1) : 0;
            gather(word, row);
            if (Function::writes)
                out.store_part(y + begin + at, here);
        }
        __syncwarp();
        const i64 bytes = (left + 7) / 8 * bits;
        warp_copy_part(stage, packed + begin / 8 * bits, bytes < Tile::bytes ? bytes : Tile::bytes, lane);
        __syncwarp();
    }
};

// Write y = Function(x) and the packed code of x.
//   x, y: n numbers at any addresses; y is not written without a function, and may be x.
//   packed: (n + 7) / 8 * bits bytes, 16-byte aligned.
template <class T, class Codes, class Function>
__device__ inline void encode_tiles(const T* x, T* y, u8* packed, i64 n)
{
    using Work = Encoder<T, Codes, Function>;
    __shared__ typename Codes::Shared table;
    alignas(16) __shared__ u8 stages[warps][Work::Tile::bytes];
    Codes::fill(table);
    const Work work = {x, y, packed, table, stages[threadIdx.x / lanes], int(threadIdx.x % lanes)};
    each_tile<Work::Tile::elements>(n, aligned(x) && (!Function::writes || aligned(y)), work);
}

// Products of one tile after the other.
template <class T, class Levels> struct Multiplier {
    static constexpr int bits = Levels::bits;
    static constexpr int size = Chunk<T>::size;
    using Tile = fewbit::Tile<T, bits>;

    const T* grad;
    const u8* packed;
    T* result;
    const typename Levels::Shared& table;
    u8* stage;  // the warp's, where the tile's packed code is spread from
    int lane;

    __device__ Chunk<T> multiply(const Chunk<T>& in, int row) const
    {
        Word<bits> word = load_group<bits>(stage, (row * lanes + lane) / Tile::sharers);
        word >>= lane % Tile::sharers * size * bits;
        Chunk<T> out;
#pragma unroll
        for (int i = 0; i < size; i += 2) {
            arithmetic<T> a, b;
            in.get(i, a, b);
            out.set(i, product(a, unpack<bits>(word, i)), product(b, unpack<bits>(word, i + 1)));
        }
        return out;
    }

    __device__ arithmetic<T> product(arithmetic<T> gradient, u32 code) const
    {
        const arithmetic<T> level = Levels::of(code, table);
        const arithmetic<T> exact = level * gradient;
        return Levels::has_zero && level == 0 ? arithmetic<T>(0) : exact;
    }

    __device__ void whole(i64 begin) const
    {
        Chunk<T> in[loads<T>];
#pragma unroll
        for (int row = 0; row < loads<T>; ++row)
            in[row] = reinterpret_cast<const Chunk<T>*>(grad + begin)[row * lanes + lane];
        warp_copy<Tile::bytes>(packed + begin / 8 * bits, stage, lane);
        __syncwarp();
#pragma unroll
        for (int row = 0; row < loads<T>; ++row)
            reinterpret_cast<Chunk<T>*>(result + begin)[row * lanes + lane] = multiply(in[row], row);
        __syncwarp();
    }

    __device__ void part(i64 begin, i64 left) const
    {
        const i64 bytes = (left + 7) / 8 * bits;
        warp_copy_part(packed + begin / 8 * bits, stage, bytes < Tile::bytes ? bytes : Tile::bytes, lane);
        __syncwarp();
#pragma unroll 1
        for (int row = 0; row < loads<T>; ++row) {
            const int at = (row * lanes + lane) * size;
            multiply(load_part(grad + begin + at, left - at), row).store_part(result + begin + at, left - at);
        }
        __syncwarp();
    }
};

// Write result = gradient * level of the code, rounded once; where the level is 0, 0 whatever the gradient.
//   grad, result: n numbers at any addresses; result may be grad.
//   packed: as above.
template <class T, class Levels>
__device__ inline void multiply_tiles(const T* grad, const u8* packed, T* result, i64 n)
{
    using Work = Multiplier<T, Levels>;
    __shared__ typename Levels::Shared table;
    alignas(16) __shared__ u8 stages[warps][Work::Tile::bytes];
    Levels::fill(table);
    const Work work = {grad, packed, result, table, stages[threadIdx.x / lanes], int(threadIdx.x % lanes)};
    each_tile<Work::Tile::elements>(n, aligned(grad) && aligned(result), work);
}

}  // namespace fewbit
