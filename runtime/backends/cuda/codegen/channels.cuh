// ---- eights whose elements have channels: element i in memory belongs to channel (i / inner) mod C -------------------

namespace fewbit {

// The channels of 8 elements, one after the other.
struct Walk {
    i64 inner, C, place, channel;
    __device__ Walk(i64 element, i64 inner, i64 C) : inner(inner), C(C)
    {
        const i64 run = quotient(element, inner);
        place = element - run * inner;
        channel = run - quotient(run, C) * C;
    }
    __device__ void next()
    {
        if (++place == inner) {
            place = 0;
            channel = channel + 1 == C ? 0 : channel + 1;
        }
    }
};

// What a kernel needs of the channels of an eight: of each element, or one for all.
template <class Channel, int distinct> struct Channels {
    Channel of[distinct];
    __device__ const Channel& operator[](int i) const { return of[distinct == 1 ? 0 : i]; }
};

template <int distinct, class Work>
__device__ inline Channels<typename Work::Channel, distinct> channels_at(
    const Work& work, i64 eight, i64 inner, i64 C)
{
    Channels<typename Work::Channel, distinct> channels;
    Walk walk(eight * 8, inner, C);
#pragma unroll
    for (int i = 0; i < distinct; ++i, walk.next())
        channels.of[i] = work.channel(walk.channel);
    return channels;
}

// Eights that a thread has under way, 64 bytes; kernels that need more registers take fewer.
template <class T> constexpr int under_way = sizeof(T) == 2 ? 4 : 2;

// Whole eights in aligned memory. Where a thread's eights all have the same channels, `stay`, these are read once.
template <int distinct, bool stay, class Work>
__device__ inline void run_eights(const Work& work, u32 whole, u32 stride, i64 inner, i64 C)
{
    constexpr int many = stay ? Work::many : 1;
    const int lane = threadIdx.x % lanes;
    const u32 first = blockIdx.x * threads + threadIdx.x;
    auto channels = channels_at<distinct>(work, first, inner, C);
    for (u32 begin = first - lane; begin < whole; begin += many * stride) {
        typename Work::Input in[many];
#pragma unroll
        for (int i = 0; i < many; ++i) {
            const u32 eight = begin + lane + i * stride;
            in[i] = work.load(eight < whole ? eight : begin);  // of its own warp: others may store theirs in place
        }
        if (!stay)
            channels = channels_at<distinct>(work, begin + lane, inner, C);
#pragma unroll
        for (int i = 0; i < many; ++i) {
            const u32 eight = begin + lane + i * stride;
            work.take(eight, in[i], channels, first < stride && eight < whole);
        }
    }
}

// Runs over the eights of n elements, all lanes of a warp together, of which two neighbours are active or none. Of `work`
//   many                                  eights are under way in a thread that keeps their channels; of 0 none does
//   channel(c)                            is what it needs of a channel, a Channel
//   load(eight)                           of a whole eight in aligned memory, an Input
//   take(eight, input, channels, active)  does it, which writes nothing if it is not active
//   part(eight, left, channels)           does any eight, at any address, of which so many elements are there
template <class Work>
__device__ inline void each_eight(const Work& work, bool all_aligned, i64 n, i64 inner, i64 C)
{
    const i64 grid = i64(gridDim.x) * threads, first = i64(blockIdx.x) * threads + threadIdx.x;
    i64 whole = all_aligned && n / 8 < i64(1) << 31 ? n / 16 * 2 : 0;  // pairs of lanes store together
    const i64 once = inner * C, power = once & -once;  // elements after which channels come again
    const i64 period = once / (power < 16 ? power : 16) * 2;  // eights
    const i64 stride = quotient(grid, period) * period;
    if (Work::many > 0 && stride >= grid - grid / 8)  // threads beyond have nothing to do
        run_eights<8, (Work::many > 0)>(work, u32(whole), u32(stride), inner, C);
    else if (inner % 8 == 0)
        run_eights<1, false>(work, u32(whole), u32(grid), inner, C);
    else
        whole = 0;
    for (i64 eight = whole + first; eight * 8 < n; eight += grid)
        work.part(eight, n - eight * 8, channels_at<8>(work, eight, inner, C));
}

}  // namespace fewbit
