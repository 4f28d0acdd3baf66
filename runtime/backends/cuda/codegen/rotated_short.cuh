// ---- rotated codes of the fewer than 64 numbers that a row ends with: a group of a warp, two numbers a lane ------------
// A turn of g numbers that are no power of two is three passes, over the first p of them, the last p and the first p again,
// p the largest power of two in g (runtime/tensors/rotation.py). Neighbours of a pass lie in shared memory.

namespace fewbit {

struct ShortGroup {
    float v[64];
    u8 codes[64];
};

// The passes of a group of g numbers: place m begins at 0 or g - p.
struct Passes {
    int g, p, many;
    __device__ Passes(int g, int turns) : g(g), p(g < 2 ? 1 : g < 4 ? 2 : g < 8 ? 4 : g < 16 ? 8 : g < 32 ? 16 : 32)
    {
        many = (p == g ? 1 : 3) * turns;
    }
    __device__ bool whole() const { return p == g; }
    __device__ int begin(int m) const { return !whole() && m % 3 == 1 ? g - p : 0; }
    // What a turn makes the numbers longer by, beyond what its passes divide by.
    __device__ float turned(int turns) const { return !whole() ? 1.0f : turns == 2 ? float(g) * g : float(g); }
};

// Signs of the elements from 0 on, one a bit: all that a group of so few needs are in the first two words of a counter.
__device__ inline bool sign_of(const Random& random, int i) { return random.words[i / 32] >> i % 32 & 1; }

__device__ inline void pass(float* v, const Passes& passes, int m, int lane)
{
    float* part = v + passes.begin(m);
    for (int step = 1; step < passes.p; step *= 2) {
        __syncwarp();
        if (lane < passes.p / 2) {
            float* pair = part + lane / step * 2 * step + lane % step;
            const float a = pair[0], b = pair[step];
            pair[0] = __fadd_rn(a, b), pair[step] = __fsub_rn(a, b);
        }
    }
    __syncwarp();
    if (!passes.whole() && lane < passes.p)
        part[lane] = __fmul_rn(part[lane], __fsqrt_rn(__fdiv_rn(1.0f, float(passes.p))));
    __syncwarp();
}

// Before pass m > 0, or behind it on the way back.
__device__ inline void flip_shared(float* v, const Passes& passes, int m, u64 seed, int lane)
{
    const Random random = philox(shared_signs + 2 * u64(m), seed);
    float* part = v + passes.begin(m);
    __syncwarp();
    if (lane < passes.p && sign_of(random, lane))
        part[lane] = -part[lane];
    __syncwarp();
}

// The sum of a lane's two terms and all others, in the order of all backends: halves of each 32, then both 32.
__device__ inline float short_sum(float first, float second)
{
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        first = __fadd_rn(first, __shfl_xor_sync(0xffffffffu, first, step));
        second = __fadd_rn(second, __shfl_xor_sync(0xffffffffu, second, step));
    }
    return __fadd_rn(first, second);
}

template <class T, int bits>
__device__ inline void quantize_short(const T* x, u8* packed, u16* scales, Pieces pieces, int g, int turns,
    bool unbiased, const float* levels, const float* edges, u64 seed)
{
    constexpr int half = 1 << (bits - 1);
    __shared__ ShortGroup groups[warps];
    const int lane = threadIdx.x % lanes;
    ShortGroup& own = groups[threadIdx.x / lanes];
    const Passes passes(g, turns);
    for (i64 row = i64(blockIdx.x) * warps + threadIdx.x / lanes; row < pieces.rows; row += i64(gridDim.x) * warps) {
        const Place place = place_of(row, g, pieces, false);
        const bool there[2] = {lane < g, lane + lanes < g};
        float h[2], most = 0;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            h[j] = there[j] ? widen(x[place.element + lane + j * lanes]) : 0.0f;
            most = fmaxf(most, fabsf(h[j]));  // leaves out what is not a number
        }
#pragma unroll
        for (int step = 1; step < lanes; step *= 2)
            most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, step));
        const Powers powers(most);
        const Random signs = philox(u64(place.k * pieces.counters), seed);
        float terms[2];
        __syncwarp();
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int i = lane + j * lanes;
            const float v = __fmul_rn(h[j], powers.down);
            terms[j] = __fmul_rn(v, v);
            own.v[i] = sign_of(signs, i) ? -v : v;
        }
        const float energy = short_sum(terms[0], terms[1]);
        const bool finite = most <= limit<float> && energy == energy;
        for (int m = 0; m < passes.many; ++m) {
            if (m > 0)
                flip_shared(own.v, passes, m, seed, lane);
            pass(own.v, passes, m, lane);
        }
        const float unit = !passes.whole() ? __fdiv_rn(1.0f, float(g)) : turns == 2 ? float(g) : 1.0f;
        const float deviation = __fsqrt_rn(__fmul_rn(energy, unit));
        float products[2], squares[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int i = lane + j * lanes;
            const float r = own.v[i], from = fabsf(r);
            int above = 0;
            for (int step = half / 2; step > 0; step /= 2)
                above += from > __fmul_rn(deviation, edges[above + step - 1]) ? step : 0;
            const float level = there[j] ? levels[above] : 0.0f;
            products[j] = there[j] ? __fmul_rn(from, level) : 0.0f;
            squares[j] = __fmul_rn(level, level);
            own.codes[i] = u8(there[j] ? above ^ (r > 0 ? half : half - 1) : 0);
        }
        const float along = short_sum(products[0], products[1]), of_levels = short_sum(squares[0], squares[1]);
        const float least = __fmul_rn(__fdiv_rn(along, of_levels), __fdiv_rn(1.0f, passes.turned(turns)));
        const float scale = unbiased ? __fdiv_rn(energy, along) : least;
        const u32 kept = saved_scale(scale, powers.up, most, finite);
        if (lane == 0)
            scales[place.k] = u16(kept);
        __syncwarp();
        if (lane < (g + 7) / 8) {
            u64 word = 0;
            for (int i = 0; i < 8; ++i)
                word |= u64(own.codes[lane * 8 + i]) << i * bits;
            for (int i = 0; i < bits; ++i)
                packed[(place.eight + lane) * bits + i] = kept && finite ? u8(word >> i * 8) : u8(0);
        }
    }
}

template <class T, int bits>
__device__ inline void dequantize_short(
    const u8* packed, const u16* scales, T* out, Pieces pieces, int g, int turns, const float* levels, u64 seed)
{
    constexpr int half = 1 << (bits - 1);
    __shared__ ShortGroup groups[warps];
    const int lane = threadIdx.x % lanes;
    float* v = groups[threadIdx.x / lanes].v;
    const Passes passes(g, turns);
    for (i64 row = i64(blockIdx.x) * warps + threadIdx.x / lanes; row < pieces.rows; row += i64(gridDim.x) * warps) {
        const Place place = place_of(row, g, pieces, false);
        __syncwarp();
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int i = lane + j * lanes;
            const i64 bit = (place.eight + i / 8) * bits * 8 + i % 8 * bits;
            u32 word = 0;
            if (i < g) {
                word = packed[bit / 8];
                if (bit % 8 + bits > 8)
                    word |= u32(packed[bit / 8 + 1]) << 8;
            }
            const int code = word >> bit % 8 & ((1 << bits) - 1);
            v[i] = code < half ? -levels[half - 1 - code] : levels[code - half];
        }
        for (int m = passes.many - 1; m >= 0; --m) {
            pass(v, passes, m, lane);
            if (m > 0)
                flip_shared(v, passes, m, seed, lane);
        }
        const Random signs = philox(u64(place.k * pieces.counters), seed);
        const float factor = __uint_as_float(u32(scales[place.k]) << 16);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int i = lane + j * lanes;
            const float value = __fmul_rn(sign_of(signs, i) ? -v[i] : v[i], factor);
            const float above = value < -limit<T> ? -limit<T> : value;
            if (i < g)
                narrow(factor == 0 ? 0.0f : above > limit<T> ? limit<T> : above, out[place.element + i]);
        }
    }
}

}  // namespace fewbit
