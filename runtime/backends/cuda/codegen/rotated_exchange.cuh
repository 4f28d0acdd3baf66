// ---- numbers of rotated codes between memory, where neighbours take 16 bytes that lie together, and lanes -----------

namespace fewbit {

// The same number, of which nothing is computed ahead and kept: shifted ones would fill registers all the way.
__device__ inline u32 in_loop(u32 word)
{
#ifdef __CUDACC__
    asm volatile("" : "+r"(word));
#endif
    return word;
}

__device__ inline i64 in_loop(i64 word)
{
#ifdef __CUDACC__
    asm volatile("" : "+l"(word));
#endif
    return word;
}

// A lane holds `held` numbers that lie together. If it loaded them itself, 2^26 numbers took 297 us on an H100 (with 32
// floats a lane), where a copy of as many bytes takes 94: so a warp loads 128 bytes for each lane at a time, a full line,
// and exchanges them in shared memory.
template <class T, int held> struct Exchange {
    static constexpr int elements = Chunk<T>::size, chunks = 8, rounds = held / (chunks * elements);
    Chunk<T> at[lanes * chunks];
    // No two of eight neighbours, by lanes or in memory, are in the same banks.
    static __device__ int slot(int chunk) { return chunk ^ (chunk >> 3 & 7); }
    // Where a chunk of a round is, behind the first number of the lane that holds it.
    static __device__ int behind(int round, int chunk) { return (round * chunks + chunk % chunks) * elements; }

    // Where a lane may lay 32 words of its own, while none exchanges.
    __device__ u32* words(int lane) { return reinterpret_cast<u32*>(at + lane * chunks); }

    __device__ void get(int round, int lane, float (&r)[held]) const
    {
#pragma unroll
        for (int i = 0; i < chunks; ++i) {
            const Chunk<T> own = at[slot(lane * chunks + i)];
#pragma unroll
            for (int j = 0; j < elements; j += 2)
                own.get(j, r[behind(round, i) + j], r[behind(round, i) + j + 1]);
        }
    }

    // Args: own, where the lane's numbers begin; dense, whether those of the warp's lanes follow each other; in_line,
    // whether 16 bytes are loaded at once wherever numbers of a lane begin.
    __device__ void load(const T* x, i64 own, bool dense, bool in_line, int lane, float (&r)[held])
    {
        lane = int(in_loop(u32(lane)));
        if (!dense)
            return load_apart(x, own, in_line, lane, r);
        const T* from = x + own + (lane / chunks - lane) * held + lane % chunks * elements;
        constexpr int batch = rounds < 2 ? 1 : 2;  // of 64 registers: four would spill
        Chunk<T> parts[batch][chunks];
#pragma unroll
        for (int round = 0; round < rounds; ++round) {
            if (round % batch == 0)
#pragma unroll
                for (int k = 0; k < batch; ++k)
#pragma unroll
                    for (int i = 0; i < chunks; ++i)
                        parts[k][i] = *reinterpret_cast<const Chunk<T>*>(
                            from + i * (lanes / chunks) * held + behind(round + k, 0));
            __syncwarp();
#pragma unroll
            for (int i = 0; i < chunks; ++i)
                at[slot(i * lanes + lane)] = parts[round % batch][i];
            __syncwarp();
            get(round, lane, r);
        }
    }

    __device__ void load_apart(const T* x, i64 own, bool in_line, int lane, float (&r)[held])
    {
#pragma unroll
        for (int round = 0; round < rounds; ++round) {
            __syncwarp();
#pragma unroll 1
            for (int chunk = lane; chunk < lanes * chunks; chunk += lanes) {
                const T* from = x + __shfl_sync(0xffffffffu, own, chunk / chunks) + behind(round, chunk);
                if (in_line)
                    at[slot(chunk)] = *reinterpret_cast<const Chunk<T>*>(from);
                else
                    at[slot(chunk)].load_part(from, elements);
            }
            __syncwarp();
            get(round, lane, r);
        }
    }

    // Stores numbers of the first `holders` lanes alone. Where `rare`, what has left the dtype becomes its limit.
    __device__ void store(
        T* out, i64 own, bool dense, bool in_line, i64 holders, bool rare, float factor, int lane, const float (&r)[held])
    {
#pragma unroll
        for (int round = 0; round < rounds; ++round) {
            __syncwarp();
#pragma unroll
            for (int i = 0; i < chunks; ++i) {
                Chunk<T> part;
#pragma unroll
                for (int j = 0; j < elements; j += 2)
                    part.set(j, r[behind(round, i) + j], r[behind(round, i) + j + 1]);
                at[slot(lane * chunks + i)] = part;
            }
            if (rare)
                limit_own(factor, lane);
            __syncwarp();
            if (dense) {
                T* to = out + own + (lane / chunks - lane) * held + lane % chunks * elements + behind(round, 0);
#pragma unroll
                for (int i = 0; i < chunks; ++i)
                    *reinterpret_cast<Chunk<T>*>(to + i * (lanes / chunks) * held) = at[slot(i * lanes + lane)];
            }
            else
                store_apart(out, own, in_line, holders, round, lane);
        }
    }

    __device__ void store_apart(T* out, i64 own, bool in_line, i64 holders, int round, int lane) const
    {
#pragma unroll 1
        for (int chunk = lane; chunk < lanes * chunks; chunk += lanes) {
            T* to = out + __shfl_sync(0xffffffffu, own, chunk / chunks) + behind(round, chunk);
            if (chunk / chunks >= holders)
                continue;
            if (in_line)
                *reinterpret_cast<Chunk<T>*>(to) = at[slot(chunk)];
            else
                at[slot(chunk)].store_part(to, elements);
        }
    }

    // A loop, in shared memory: groups of such scales are so few that their code shall not be in the way of others'.
    __device__ void limit_own(float factor, int lane)
    {
#pragma unroll 1
        for (int i = 0; i < chunks * elements; i += 2) {
            Chunk<T>& part = at[slot(lane * chunks + i / elements)];
            const int j = i % elements;
            float both[2];
            part.get(j, both[0], both[1]);
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                const float above = both[k] < -limit<T> ? -limit<T> : both[k];
                both[k] = factor == 0 ? 0 : above > limit<T> ? limit<T> : above;
            }
            part.set(j, both[0], both[1]);
        }
    }
};

}  // namespace fewbit
