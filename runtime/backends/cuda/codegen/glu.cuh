// ---- gated linear units: h = act(gate) * up and its parts; from a gradient and the parts the gradients and h ---------
// The arithmetic of runtime/backends/reference/glu.py, step by step. A copy is one sample in groups of 256: a group is a warp's.

namespace fewbit {

// Minimum and range of the 8 numbers that each lane of a warp has, those that are left.
__device__ inline GroupParameters warp_parameters(const float (&h)[8], i64 left)
{
    int low = 0x7fffffff, high = ~0x7fffffff;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int key = ordered(int(__float_as_uint(h[i])));
        if (i < left) {
            low = key < low ? key : low;
            high = key > high ? key : high;
        }
    }
#pragma unroll
    for (int other = 1; other < lanes; other *= 2) {
        const int their_low = __shfl_xor_sync(0xffffffffu, low, other);
        const int their_high = __shfl_xor_sync(0xffffffffu, high, other);
        low = their_low < low ? their_low : low;
        high = their_high > high ? their_high : high;
    }
    return group_parameters_of_keys(low, high);
}

// Keep one copy of a group: `row` and the next one of `parameters` take its minimum and range.
template <int bits>
__device__ inline void keep_copy(
    const float (&h)[8], i64 left, u8* packed, u16* parameters, int row, i64 groups, i64 group, u64 seed, int lane)
{
    const GroupParameters kept = warp_parameters(h, left);
    if (lane == 0) {
        parameters[row * groups + group] = u16(kept.minimum);
        parameters[(row + 1) * groups + group] = u16(kept.range);
    }
    const i64 eight = group * lanes + lane;
    if (left > 0)
        store_group<bits>(packed, eight, codes_of<bits>(h, left, kept, Straight{}, u64(eight), seed));
}

// Read gate and up (n) once; write h (n), the packed codes of act' and of the copies of up and act(gate), and their
// parameters (4, groups).
template <class T, class Codes, class Function, int up_bits, int act_bits>
__device__ inline void glu_forward_groups(
    const T* gate, const T* up, T* h, u8* codes, u8* up_packed, u8* act_packed, u16* parameters, i64 n, u64 up_seed,
    u64 act_seed)
{
    __shared__ typename Codes::Shared table;
    Codes::fill(table);
    const i64 groups = (n + span - 1) / span;
    const int lane = threadIdx.x % lanes;
    for (i64 group = i64(blockIdx.x) * warps + threadIdx.x / lanes; group < groups; group += i64(gridDim.x) * warps) {
        const i64 begin = group * span + lane * 8, left = n - begin;
        float x[8], u[8];
        load_eight(gate + begin, left, x);
        load_eight(up + begin, left, u);
        Word<Codes::bits> word = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (i < left)
                word |= pack<Codes::bits>(Codes::of(x[i], table), i);
            x[i] = rounded<T>(Function::of(x[i]));
        }
        if (left > 0)
            store_group<Codes::bits>(codes, begin / 8, word);
        keep_copy<up_bits>(u, left, up_packed, parameters, 0, groups, group, up_seed, lane);
        keep_copy<act_bits>(x, left, act_packed, parameters, 2, groups, group, act_seed, lane);
#pragma unroll
        for (int i = 0; i < 8; ++i)
            u[i] = __fmul_rn(x[i], u[i]);
        store_eight(u, h + begin, left);
    }
}

// The 8 values of a copy from `eight` on, float32.
template <int bits>
__device__ inline void read_copy(
    const u8* packed, const u16* parameters, int row, i64 groups, i64 eight, float (&to)[8])
{
    const i64 group = eight / lanes;
    const GroupParameters kept = {parameters[row * groups + group], parameters[(row + 1) * groups + group]};
    const Word<bits> word = load_group<bits>(packed, eight);
    if (kept.is_constant()) {
#pragma unroll
        for (int i = 0; i < 8; ++i)
            to[i] = __uint_as_float(kept.minimum << 16 | unpack<bits>(word, 0) << 15 | (kept.range & 0x7fff));
        return;
    }
    const float Z = __uint_as_float(kept.minimum << 16);
    const float step = __fdiv_rn(__uint_as_float(kept.range << 16), float((1u << bits) - 1));
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float value = __fadd_rn(Z, __fmul_rn(float(unpack<bits>(word, i)), step));
        const float below = value > limit<float> ? limit<float> : value;
        to[i] = below < -limit<float> ? -limit<float> : below;
    }
}

// Read the gradient of h (n) and each part once; write what is wanted: a null pointer is not.
template <class T, class Levels, int up_bits, int act_bits>
__device__ inline void glu_backward_groups(
    const T* grad, const u8* codes, const u8* up_packed, const u8* act_packed, const u16* parameters, T* d_gate,
    T* d_up, T* h, i64 n)
{
    __shared__ typename Levels::Shared table;
    Levels::fill(table);
    const i64 groups = (n + span - 1) / span, eights = (n + 7) / 8;
    for (i64 eight = i64(blockIdx.x) * threads + threadIdx.x; eight < eights; eight += i64(gridDim.x) * threads) {
        const i64 begin = eight * 8, left = n - begin;
        float dy[8], u[8], a[8], result[8];
        if (d_gate || d_up)
            load_eight(grad + begin, left, dy);
        read_copy<up_bits>(up_packed, parameters, 0, groups, eight, u);
        read_copy<act_bits>(act_packed, parameters, 2, groups, eight, a);
        if (d_gate) {
            const Word<Levels::bits> word = load_group<Levels::bits>(codes, eight);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const float level = Levels::of(unpack<Levels::bits>(word, i), table);
                const float exact = __fmul_rn(__fmul_rn(dy[i], u[i]), level);
                result[i] = Levels::has_zero && level == 0 ? 0.0f : exact;
            }
            store_eight(result, d_gate + begin, left);
        }
        if (d_up) {
#pragma unroll
            for (int i = 0; i < 8; ++i)
                result[i] = __fmul_rn(dy[i], a[i]);
            store_eight(result, d_up + begin, left);
        }
        if (h) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const float value = __fmul_rn(a[i], u[i]);
                const float below = value > limit<T> ? limit<T> : value;
                result[i] = below < -limit<T> ? -limit<T> : below;
            }
            store_eight(result, h + begin, left);
        }
    }
}

}  // namespace fewbit
