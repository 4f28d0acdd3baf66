// ---- the stream of keys of a GPU: runtime/tensors/philox.py's, its place in the GPU's own memory -----------------
// Here and not in the launch's arguments: a replay of a CUDA graph then draws the next ones.

namespace keys {

using fewbit::i64;
using fewbit::u64;

struct Place { u64 key, drawn; };
__device__ Place place;

__device__ inline u64 mixed(u64 number)
{
    u64 z = number + 0x9E3779B97F4A7C15ull;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    return z ^ z >> 31;
}

// One thread of all draws: the next keys, from 0 to 2^63 - 1. They are taken at once: a graph's replay may draw meanwhile.
extern "C" __global__ void draw(i64* seeds, i64 count)
{
    if (blockIdx.x || threadIdx.x)
        return;
    const u64 first = atomicAdd(&place.drawn, u64(count));
    for (i64 i = 0; i < count; ++i)
        seeds[i] = i64(mixed(place.key + first + u64(i)) >> 1);
}

// Begins the stream of a seed at so many keys, or goes so many further, or back.
extern "C" __global__ void move(i64 seed, i64 drawn, i64 begins)
{
    if (blockIdx.x || threadIdx.x)
        return;
    if (begins)
        place = {mixed(u64(seed)), u64(drawn)};
    else
        atomicAdd(&place.drawn, u64(drawn));
}

}  // namespace keys
