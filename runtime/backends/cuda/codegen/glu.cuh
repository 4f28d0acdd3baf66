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

// Groups of which a warp takes both copies at once: as many copies as `chunks`, each in the words of its type.
template <class T> constexpr int pairs = chunks<T> / 2;

// What the forward pass reads and writes: gate and up (n) once; h (n), the packed codes of act' and of the copies of up
// and act(gate), and their parameters (4, groups).
template <class T, class Codes, class Function, int up_bits, int act_bits> struct GatedForward {
    const T *gate, *up;
    T* h;
    u8 *codes, *up_packed, *act_packed;
    u16* parameters;
    i64 n, groups;
    u64 up_seed, act_seed;
    const typename Codes::Shared& table;
    int lane;

    // The codes of 8 numbers, which become act of them as it is stored.
    __device__ Word<Codes::bits> activate(float (&x)[8], i64 left, Eight<T>& stored) const
    {
        Word<Codes::bits> word = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (i < left)
                word |= pack<Codes::bits>(Codes::of(x[i], table), i);
            x[i] = Function::of(x[i]);
        }
        stored = Eight<T>::of(x);
        stored.widen_to(x);
        return word;
    }

    // One group, of which there may be less, at any address.
    __device__ void part(i64 group) const
    {
        const i64 begin = group * span + lane * 8, left = n - begin;
        float x[8], u[8];
        load_eight(gate + begin, left, x);
        load_eight(up + begin, left, u);
        Eight<T> stored;
        const Word<Codes::bits> word = activate(x, left, stored);
        if (left > 0)
            store_group<Codes::bits>(codes, begin / 8, word);
        keep_copy<up_bits>(u, left, up_packed, parameters, 0, groups, group, up_seed, lane);
        keep_copy<act_bits>(x, left, act_packed, parameters, 2, groups, group, act_seed, lane);
#pragma unroll
        for (int i = 0; i < 8; ++i)
            u[i] = __fmul_rn(x[i], u[i]);
        store_eight(u, h + begin, left);
    }

    // Whole groups, aligned: what a copy of a group needs once one lane finds for all.
    __device__ void whole(i64 first) const
    {
        Eight<T> copies[2 * pairs<T>];  // up and act of each group
        Ends<T> ends[2 * pairs<T>];
        const i64 begin = first * lanes + lane;  // eights
#pragma unroll
        for (int c = 0; c < pairs<T>; ++c) {
            copies[2 * c] = reinterpret_cast<const Eight<T>*>(up)[begin + c * lanes];
            copies[2 * c + 1] = reinterpret_cast<const Eight<T>*>(gate)[begin + c * lanes];
        }
#pragma unroll
        for (int c = 0; c < pairs<T>; ++c) {
            float x[8], u[8];
            copies[2 * c + 1].widen_to(x);
            copies[2 * c].widen_to(u);
            store_group<Codes::bits>(codes, begin + c * lanes, activate(x, 8, copies[2 * c + 1]));
#pragma unroll
            for (int i = 0; i < 8; ++i)
                u[i] = __fmul_rn(x[i], u[i]);
            reinterpret_cast<Eight<T>*>(h)[begin + c * lanes] = Eight<T>::of(u);
        }
#pragma unroll
        for (int i = 0; i < 2 * pairs<T>; ++i)
            ends[i] = Ends<T>::of(copies[i]);
        const Ends<T> mine = ends_of_slots<T>(ends, lane, lanes);
        const int own_copy = chunk_of<T>(lane);
        const GroupParameters kept = group_parameters(mine.low(), mine.high());
        if (lane < chunks<T>) {
            u16* to = parameters + own_copy % 2 * 2 * groups + first + own_copy / 2;
            to[0] = u16(kept.minimum);
            to[groups] = u16(kept.range);
        }
        const Steps own = Steps::of(kept, mine.low(), own_copy % 2 ? act_bits : up_bits);
#pragma unroll
        for (int c = 0; c < pairs<T>; ++c) {
            const i64 eight = begin + c * lanes;
            write_copy<up_bits>(copies[2 * c], own.from(holder<T>(2 * c, lane)), up_packed, eight, up_seed);
            write_copy<act_bits>(copies[2 * c + 1], own.from(holder<T>(2 * c + 1, lane)), act_packed, eight, act_seed);
        }
    }

    template <int bits>
    __device__ static void write_copy(const Eight<T>& h, const Steps& steps, u8* packed, i64 eight, u64 seed)
    {
        Random random = to_nearest;
        if (seed != NEAREST)
            random = philox(u64(eight), seed);
        store_group<bits>(packed, eight, codes_of<T, bits>(h, steps, random));
    }
};

template <class T, class Codes, class Function, int up_bits, int act_bits>
__device__ inline void glu_forward_groups(
    const T* gate, const T* up, T* h, u8* codes, u8* up_packed, u8* act_packed, u16* parameters, i64 n, u64 up_seed,
    u64 act_seed)
{
    __shared__ typename Codes::Shared table;
    Codes::fill(table);
    const i64 groups = (n + span - 1) / span;
    const GatedForward<T, Codes, Function, up_bits, act_bits> work = {
        gate, up, h, codes, up_packed, act_packed, parameters, n, groups, up_seed, act_seed, table,
        int(threadIdx.x % lanes)};
    const i64 rows = aligned(gate) && aligned(up) && aligned(h) ? n / span / pairs<T> : 0;
    const i64 warp = i64(blockIdx.x) * warps + threadIdx.x / lanes, stride = i64(gridDim.x) * warps;
    for (i64 row = warp; row < rows; row += stride)
        work.whole(row * pairs<T>);
    for (i64 group = rows * pairs<T> + warp; group < groups; group += stride)
        work.part(group);
}

// The 8 values of a copy, float32.
template <int bits> __device__ inline void values_of_copy(Word<bits> word, GroupParameters kept, float (&to)[8])
{
    if (kept.is_constant()) {
#pragma unroll
        for (int i = 0; i < 8; ++i)
            to[i] = __uint_as_float(kept.minimum << 16 | unpack<bits>(word, i) << 15 | (kept.range & 0x7fff));
        return;
    }
    const float Z = __uint_as_float(kept.minimum << 16);
    const float step = __fdiv_rn(__uint_as_float(kept.range << 16), float((1u << bits) - 1));
    spread<bits>(word, to);
#pragma unroll
    for (int i = 0; i < 8; ++i)
        to[i] = __fadd_rn(Z, __fmul_rn(to[i], step));
    constexpr u32 quarter = 0x7e80;  // of the largest: sums of less do not leave the type
    if ((kept.minimum & 0x7fff) >= quarter || kept.range >= quarter)
#pragma unroll
        for (int i = 0; i < 8; ++i)
            to[i] = greater(lesser(to[i], limit<float>), -limit<float>);
}

// Reads the gradient of h (n) and each part once, and writes what is wanted: a null pointer is not.
template <class T, class Levels, int up_bits, int act_bits> struct GatedBackward {
    const T* grad;
    const u8 *codes, *up_packed, *act_packed;
    const u16* parameters;
    T *d_gate, *d_up, *h;
    i64 n, groups;
    const typename Levels::Shared& table;

    // What is loaded of an eight.
    struct Parts {
        Word<Levels::bits> codes;
        Word<up_bits> up;
        Word<act_bits> act;
        GroupParameters of_up, of_act;
    };
    __device__ Parts parts(i64 eight) const
    {
        const i64 group = eight / lanes;
        return {d_gate ? load_group<Levels::bits>(codes, eight) : 0, load_group<up_bits>(up_packed, eight),
                load_group<act_bits>(act_packed, eight), {parameters[group], parameters[groups + group]},
                {parameters[2 * groups + group], parameters[3 * groups + group]}};
    }
    // Calls `write(values, to)` for each result.
    template <class Write> __device__ void compute(const float (&dy)[8], const Parts& parts, const Write& write) const
    {
        float u[8], a[8], result[8];
        values_of_copy<up_bits>(parts.up, parts.of_up, u);
        values_of_copy<act_bits>(parts.act, parts.of_act, a);
        if (d_gate) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const float level = Levels::of(unpack<Levels::bits>(parts.codes, i), table);
                const float exact = __fmul_rn(__fmul_rn(dy[i], u[i]), level);
                result[i] = Levels::has_zero && level == 0 ? 0.0f : exact;
            }
            write(result, d_gate);
        }
        if (d_up) {
#pragma unroll
            for (int i = 0; i < 8; ++i)
                result[i] = __fmul_rn(dy[i], a[i]);
            write(result, d_up);
        }
        if (h) {
#pragma unroll
            for (int i = 0; i < 8; ++i)
                result[i] = greater(lesser(__fmul_rn(a[i], u[i]), limit<T>), -limit<T>);
            write(result, h);
        }
    }
    // Whole eights in aligned memory, two of 16-bit numbers at once; lanes without one read that of the warp's first.
    __device__ void run_whole(i64 whole) const
    {
        constexpr int many = sizeof(T) == 2 ? 2 : 1;
        const int lane = threadIdx.x % lanes;
        const i64 stride = i64(gridDim.x) * threads, first = i64(blockIdx.x) * threads + threadIdx.x - lane;
        for (i64 begin = first; begin < whole; begin += many * stride) {
            Eight<T> in[many];
            Parts of[many];
#pragma unroll
            for (int k = 0; k < many; ++k) {
                const i64 eight = begin + k * stride + lane, there = eight < whole ? eight : begin;
                if (d_gate || d_up)
                    in[k] = reinterpret_cast<const Eight<T>*>(grad)[there];
                of[k] = parts(there);
            }
#pragma unroll
            for (int k = 0; k < many; ++k) {
                const i64 from = begin + k * stride;
                const bool active = from + lane < whole;
                float dy[8];
                in[k].widen_to(dy);
                compute(dy, of[k], [&](const float (&values)[8], T* to) {
                    store_in_pairs(Eight<T>::of(values), to + from * 8, lane, active, lane);
                });
            }
        }
    }
    // One eight, of which so much is left, at any address.
    __device__ void run_part(i64 eight) const
    {
        const i64 begin = eight * 8, left = n - begin;
        float dy[8];
        if (d_gate || d_up)
            load_eight(grad + begin, left, dy);
        compute(dy, parts(eight), [&](const float (&values)[8], T* to) { store_eight(values, to + begin, left); });
    }
};

template <class T, class Levels, int up_bits, int act_bits>
__device__ inline void glu_backward_groups(
    const T* grad, const u8* codes, const u8* up_packed, const u8* act_packed, const u16* parameters, T* d_gate,
    T* d_up, T* h, i64 n)
{
    __shared__ typename Levels::Shared table;
    Levels::fill(table);
    const GatedBackward<T, Levels, up_bits, act_bits> work = {
        grad, codes, up_packed, act_packed, parameters, d_gate, d_up, h, n, (n + span - 1) / span, table};
    const bool all_aligned = aligned(grad) && aligned(d_gate) && aligned(d_up) && aligned(h);
    const i64 whole = all_aligned ? n / 16 * 2 : 0;  // lanes store in pairs
    work.run_whole(whole);
    for (i64 eight = whole + i64(blockIdx.x) * threads + threadIdx.x; eight * 8 < n; eight += i64(gridDim.x) * threads)
        work.run_part(eight);
}

}  // namespace fewbit
