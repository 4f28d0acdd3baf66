// ---- fixed-point codes by channel: the arithmetic of runtime/quantizers/fixed_point.py and layers/preact -----------
// Element i in memory belongs to channel (i / inner) mod C. No product is merged with a sum: see per_group.cuh.

namespace fewbit {

// What the codes of each channel mean: rows of a table (7, C) of 32 bits.
struct PreActQuantParams {
    const float *origin, *step, *inverse;
    const int* zero;  // codes from here on are positive
    const float *offset, *slope;  // of what was normalized: offset + (code + 1/2 - 2^(K-1)) slope
    const int* sign;  // as zero, but where gamma is 0 all codes have the sign of beta: 0, or 2^K
    __device__ PreActQuantParams(const float* table, i64 C)
        : origin(table), step(table + C), inverse(table + 2 * C), zero(reinterpret_cast<const int*>(table + 3 * C)),
          offset(table + 4 * C), slope(table + 5 * C), sign(reinterpret_cast<const int*>(table + 6 * C))
    {
    }
};

constexpr double largest_single = 3.4028234663852886e38;
constexpr double least_step = 7.52316384526264e-37, most_step = 3.32306998946229e35;  // 2^-120, 2^118

template <class V> __device__ inline double number_at(const void* numbers, i64 at)
{
    return widen(static_cast<const V*>(numbers)[at]);
}

__device__ inline double number_at(const void* numbers, i64 at, i64 kind)
{
    if (kind == kind_single)
        return number_at<float>(numbers, at);
    if (kind == kind_double)
        return number_at<double>(numbers, at);
    return kind == kind_half ? number_at<half>(numbers, at) : number_at<bfloat16>(numbers, at);
}

// The first rows of the table, or all of them with those of what was normalized. A thread takes one channel if there are
// enough: all of it is waiting, for divisions and for code that the cache does not have.
template <int bits>
__device__ inline void tabulate_channels(
    const void* scale, i64 scale_kind, const void* shift, i64 shift_kind, float* table, i64 C, bool all)
{
    constexpr double half = 1 << (bits - 1), top = 2 * half - 1, unit = 6.0 / (2 * half);
    int* zeros = reinterpret_cast<int*>(table + 3 * C);
    int* signs = reinterpret_cast<int*>(table + 6 * C);
    const i64 stride = i64(gridDim.x) * threads;
    for (i64 c = i64(blockIdx.x) * threads + threadIdx.x; c < C; c += stride) {
        const double gamma = number_at(scale, c, scale_kind), beta = number_at(shift, c, shift_kind);
        double step = 6 * fabs(gamma) / (2 * half);
        step = step > most_step ? most_step : step;
        const bool varies = !(step < least_step);
        double multiple = varies ? floor(beta / step) : 0;
        if (half - multiple > top)
            multiple += 1;
        const double lowest = varies ? __dmul_rn(multiple, step) : beta;
        const double above = lowest < -largest_single ? -largest_single : lowest;
        double zero = half - (multiple != multiple ? 0 : multiple);
        zero = zero < 1 ? 1 : zero > top ? top : zero;
        if (!varies)
            zero = beta > 0 ? 1 : beta < 0 ? top : half;
        table[c] = float(above > largest_single ? largest_single : above);
        table[C + c] = varies ? float(step) : 0;
        table[2 * C + c] = varies ? float(1 / step) : 0;
        zeros[c] = int(zero);
        if (!all)
            continue;
        double offset = (lowest - beta) / gamma;
        offset = offset != offset || !varies ? 0 : offset;
        offset = offset < -2 * unit ? -2 * unit : offset > 2 * unit ? 2 * unit : offset;
        table[4 * C + c] = float(offset);
        table[5 * C + c] = float(gamma < 0 ? -unit : unit);
        signs[c] = gamma == 0 ? (beta > 0 ? 0 : int(2 * half)) : int(zero);
    }
}

// A code as a float that is yet to be truncated.
template <int bits> __device__ inline float code_of(float a, float origin, float inverse, float zero)
{
    constexpr float half = 1 << (bits - 1), top = (1 << bits) - 1;
    const float y = __fadd_rn(__fmul_rn(__fsub_rn(a, origin), inverse), half);
    const bool positive = a > 0;
    return fminf(fmaxf(y, positive ? zero : 0.0f), positive ? top : zero - 1);  // NaN is the lowest
}

// The word of 8 codes, of those that are left.
template <int bits> __device__ inline Word<bits> word_of_codes(const float (&codes)[8], i64 left)
{
    u32 numbers[8];
#pragma unroll
    for (int i = 0; i < 8; ++i)
        numbers[i] = truncated(codes[i]);
    const Word<bits> word = gather<bits, 0>(numbers);
    return left < 8 ? word & ((Word<bits>(1) << (int(left) * bits)) - 1) : word;
}

template <int bits> __device__ inline float middle_of(float code)
{
    return __fadd_rn(code, 0.5f - float(1 << (bits - 1)));
}

template <class T> __device__ inline float value_of(float middle, float origin, float step, bool positive)
{
    const float value = __fadd_rn(origin, __fmul_rn(middle, step));
    return lesser(greater(value, positive ? least<T> : -limit<T>), positive ? limit<T> : -least<T>);
}

// 8 numbers at any address, those that are left.
template <class T> __device__ inline Eight<T> eight_at(const T* from, i64 left)
{
    float values[8];
    load_eight(from, left, values);
    return Eight<T>::of(values);
}

template <class T, int bits> struct QuantizeEights {
    static constexpr int many = under_way<T>;
    struct Channel { float origin, inverse, zero; };
    using Input = Eight<T>;
    const T* x;
    u8* packed;
    const float *origin, *inverse;
    const int* zero;

    __device__ Channel channel(i64 c) const { return {origin[c], inverse[c], float(zero[c])}; }
    __device__ Input load(u32 eight) const { return reinterpret_cast<const Input*>(x)[eight]; }
    template <int distinct>
    __device__ Word<bits> word(const Input& in, const Channels<Channel, distinct>& channels, i64 left) const
    {
        float h[8];
        in.widen_to(h);
#pragma unroll
        for (int i = 0; i < 8; ++i)
            h[i] = code_of<bits>(h[i], channels[i].origin, channels[i].inverse, channels[i].zero);
        return word_of_codes<bits>(h, left);
    }
    template <int distinct>
    __device__ void take(u32 eight, const Input& in, const Channels<Channel, distinct>& channels, bool active) const
    {
        const Word<bits> codes = word(in, channels, 8);
        if (active)
            store_group<bits>(packed, eight, codes);
    }
    __device__ void part(i64 eight, i64 left, const Channels<Channel, 8>& channels) const
    {
        store_group<bits>(packed, eight, word(eight_at(x + eight * 8, left), channels, left));
    }
};

template <class T, int bits>
__device__ inline void quantize_channels(
    const T* x, u8* packed, const float* origin, const float* inverse, const int* zero, i64 n, i64 inner, i64 C)
{
    each_eight(QuantizeEights<T, bits>{x, packed, origin, inverse, zero}, aligned(x), n, inner, C);
}

template <class T, int bits, bool leaky> struct DequantizeEights {
    static constexpr int many = leaky ? 1 : under_way<T>;
    struct Channel { float origin, step, zero; };  // zero as a middle
    using Input = Word<bits>;
    const u8* packed;
    T* out;
    const float *origin, *step;
    const int* zero;
    float leak;

    __device__ Channel channel(i64 c) const { return {origin[c], step[c], middle_of<bits>(float(zero[c]))}; }
    __device__ Input load(u32 eight) const { return load_group<bits>(packed, eight); }
    template <int distinct>
    __device__ void values(Word<bits> word, const Channels<Channel, distinct>& channels, float (&to)[8]) const
    {
        spread_above<bits>(word, to);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float middle = __fadd_rn(to[i], middle_of<bits>(-spread_from));
            const bool positive = middle >= channels[i].zero;
            to[i] = value_of<T>(middle, channels[i].origin, channels[i].step, positive);
            if (leaky && !positive)
                to[i] = leak == 0 ? 0 : __fmul_rn(to[i], leak);
        }
    }
    template <int distinct>
    __device__ void take(u32 eight, const Input& in, const Channels<Channel, distinct>& channels, bool active) const
    {
        float h[8];
        values(in, channels, h);
        store_in_pairs(Eight<T>::of(h), out, eight, active, threadIdx.x % lanes);
    }
    __device__ void part(i64 eight, i64 left, const Channels<Channel, 8>& channels) const
    {
        float h[8];
        values(load_group<bits>(packed, eight), channels, h);
        store_eight(h, out + eight * 8, left);
    }
};

// Writes what the codes mean, or if `leaky` the (leaky) ReLU of it.
template <class T, int bits, bool leaky>
__device__ inline void dequantize_channels(const u8* packed, T* out, const float* origin, const float* step,
    const int* zero, i64 n, i64 inner, i64 C, float leak)
{
    each_eight(DequantizeEights<T, bits, leaky>{packed, out, origin, step, zero, leak}, aligned(out), n, inner, C);
}

// ---- the pre-activation layer (runtime/layers/preact) ------------------------------------------------------------------

// Writes the codes of A, which becomes its (leaky) ReLU. Where gamma is 0 they are of what was normalized,
// (x - mean) r.
template <class T, int bits> struct EncodeEights {
    static constexpr int many = 0;
    struct Channel { float origin, inverse, sign; };  // mean and r where gamma is 0
    using Input = Eight<T>;
    T* A;
    const T* x;
    u8* packed;
    PreActQuantParams meaning;
    const float *mean, *r;
    float leak;

    __device__ static bool is_flat(float sign) { return sign == 0 || sign == (1 << bits); }
    __device__ Channel channel(i64 c) const
    {
        const float sign = float(meaning.sign[c]);
        return {is_flat(sign) ? mean[c] : meaning.origin[c], is_flat(sign) ? r[c] : meaning.inverse[c], sign};
    }
    __device__ Input load(u32 eight) const { return reinterpret_cast<const Input*>(A)[eight]; }
    // The word of the codes; h becomes the ReLU.
    template <int distinct>
    __device__ Word<bits> word(i64 eight, float (&h)[8], const Channels<Channel, distinct>& channels, i64 left) const
    {
        constexpr float half = 1 << (bits - 1), inverse = float((2 * half) / 6.0);
        float codes[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const Channel c = channels[i];
            const bool flat = is_flat(c.sign);  // there `code_of` is not told a zero that it can take
            codes[i] = flat ? 0 : code_of<bits>(h[i], c.origin, c.inverse, c.sign);
            if (flat && i < left) {
                const float normal = rounded<T>(__fmul_rn(__fsub_rn(widen(x[eight * 8 + i]), c.origin), c.inverse));
                codes[i] = code_of<bits>(normal, 0, inverse, half);
            }
            h[i] = leak == 0 ? (h[i] < 0 ? 0 : h[i]) : (h[i] > 0 ? h[i] : __fmul_rn(h[i], leak));
        }
        return word_of_codes<bits>(codes, left);
    }
    template <int distinct>
    __device__ void take(u32 eight, const Input& in, const Channels<Channel, distinct>& channels, bool active) const
    {
        float h[8];
        in.widen_to(h);
        const Word<bits> codes = word(eight, h, channels, active ? 8 : 0);
        if (active)
            store_group<bits>(packed, eight, codes);
        __syncwarp();  // a lane stores where its neighbour has read
        store_in_pairs(Eight<T>::of(h), A, eight, active, threadIdx.x % lanes);
    }
    __device__ void part(i64 eight, i64 left, const Channels<Channel, 8>& channels) const
    {
        float h[8];
        load_eight(A + eight * 8, left, h);
        store_group<bits>(packed, eight, word(eight, h, channels, left));
        store_eight(h, A + eight * 8, left);
    }
};

template <class T, int bits>
__device__ inline void encode_channels(T* A, const T* x, u8* packed, const float* table, const float* mean,
    const float* r, i64 n, i64 inner, i64 C, float leak)
{
    const PreActQuantParams meaning(table, C);
    each_eight(EncodeEights<T, bits>{A, x, packed, meaning, mean, r, leak}, aligned(A), n, inner, C);
}

// The gradient behind the (leaky) ReLU: 0 and not 0 times infinity where there is none.
__device__ inline float through(float gradient, bool positive, float leak)
{
    return positive ? gradient : leak == 0 ? 0 : __fmul_rn(gradient, leak);
}

template <int bits> __device__ inline float normal_of(float code, float offset, float slope)
{
    return __fadd_rn(offset, __fmul_rn(middle_of<bits>(code), slope));
}

template <int bits> __device__ inline u32 code_at(const u8* packed, i64 element)
{
    const int bit = int(element % 8) * bits, shift = bit % 8;
    const u8* from = packed + element / 8 * bits + bit / 8;
    const u32 low = from[0], high = shift + bits > 8 ? from[1] : 0;
    return (low | high << 8) >> shift & ((1u << bits) - 1);
}

// Sums of the gradient of A, and of its product with what was normalized: (shares, 2, C), a warp for a share of a
// channel.
// Where the elements of a channel lie together they are shared out among lanes; else lanes have channels of their own.
template <class T, int bits>
__device__ inline void sum_channels(const u8* packed, const T* gradient, const float* table, float* sums, i64 shares,
    i64 n, i64 inner, i64 C, float leak)
{
    const PreActQuantParams meaning(table, C);
    const int lane = threadIdx.x % lanes;
    const bool together = inner >= lanes;
    const i64 of_channel = n / C, tiles = together ? C : (C + lanes - 1) / lanes;
    const i64 first = i64(blockIdx.x) * warps + threadIdx.x / lanes;
    for (i64 item = first; item < tiles * shares; item += i64(gridDim.x) * warps) {
        const i64 share = quotient(item, tiles), tile = item - share * tiles;
        const i64 c = together ? tile : tile * lanes + lane;
        const i64 end = of_channel * (share + 1) / shares;
        float plain = 0, weighted = 0;
        if (c < C) {
            const int sign = meaning.sign[c];
            const float offset = meaning.offset[c], slope = meaning.slope[c];
            for (i64 m = of_channel * share / shares + (together ? lane : 0); m < end; m += together ? lanes : 1) {
                const i64 run = quotient(m, inner), element = (run * C + c) * inner + (m - run * inner);
                const u32 code = code_at<bits>(packed, element);
                const float h = through(widen(gradient[element]), int(code) >= sign, leak);
                plain += h;
                weighted += h * normal_of<bits>(float(code), offset, slope);
            }
        }
        if (together) {
#pragma unroll
            for (int other = 1; other < lanes; other *= 2) {
                plain += __shfl_xor_sync(0xffffffffu, plain, other);
                weighted += __shfl_xor_sync(0xffffffffu, weighted, other);
            }
        }
        if (c < C && (!together || lane == 0)) {
            sums[share * 2 * C + c] = plain;
            sums[share * 2 * C + C + c] = weighted;
        }
    }
}

// The sums of all shares, (2, C), and behind them the factors s, p and q of each channel: see `normalize_channels`.
__device__ inline void finish_channels(const float* sums, float* results, const double* scale, const float* r,
    i64 shares, i64 elements, i64 by_batch, i64 C)
{
    const i64 stride = i64(gridDim.x) * threads;
    for (i64 c = i64(blockIdx.x) * threads + threadIdx.x; c < C; c += stride) {
        double plain = 0, weighted = 0;
        for (i64 share = 0; share < shares; ++share) {
            plain += sums[share * 2 * C + c];
            weighted += sums[share * 2 * C + C + c];
        }
        results[c] = float(plain);
        results[C + c] = float(weighted);
        results[2 * C + c] = float(scale[c] * r[c]);
        results[3 * C + c] = by_batch ? float(plain / double(elements)) : 0;
        results[4 * C + c] = by_batch ? float(weighted / double(elements)) : 0;
    }
}

// The gradient behind the ReLU becomes that of the layer's input, s (gradient - p - q normal), where it lies.
template <class T, int bits>
__device__ inline void normalize_channels(
    const u8* packed, T* gradient, const float* table, const float* results, i64 n, i64 inner, i64 C, float leak)
{
    const PreActQuantParams meaning(table, C);
    const float *s = results + 2 * C, *p = results + 3 * C, *q = results + 4 * C;
    const i64 stride = i64(gridDim.x) * threads;
    for (i64 group = i64(blockIdx.x) * threads + threadIdx.x; group * 8 < n; group += stride) {
        const Word<bits> word = load_group<bits>(packed, group);
        float g[8];
        load_eight(gradient + group * 8, n - group * 8, g);
        Walk walk(group * 8, inner, C);
#pragma unroll
        for (int i = 0; i < 8; ++i, walk.next()) {
            const i64 c = walk.channel;
            const u32 code = unpack<bits>(word, i);
            const float normal = normal_of<bits>(float(code), meaning.offset[c], meaning.slope[c]);
            const float h = through(g[i], int(code) >= meaning.sign[c], leak);
            g[i] = __fmul_rn(__fsub_rn(__fsub_rn(h, p[c]), __fmul_rn(q[c], normal)), s[c]);
        }
        store_eight(g, gradient + group * 8, n - group * 8);
    }
}

}  // namespace fewbit
