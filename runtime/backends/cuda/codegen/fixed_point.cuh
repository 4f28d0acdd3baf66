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

template <int bits>
__device__ inline void tabulate_channels(const double* scale, const double* shift, float* table, i64 C)
{
    constexpr double half = 1 << (bits - 1), top = 2 * half - 1, unit = 6.0 / (2 * half);
    int* zeros = reinterpret_cast<int*>(table + 3 * C);
    int* signs = reinterpret_cast<int*>(table + 6 * C);
    const i64 stride = i64(gridDim.x) * threads;
    for (i64 c = i64(blockIdx.x) * threads + threadIdx.x; c < C; c += stride) {
        const double gamma = scale[c], beta = shift[c];
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
        double offset = (lowest - beta) / gamma;
        offset = offset != offset || !varies ? 0 : offset;
        offset = offset < -2 * unit ? -2 * unit : offset > 2 * unit ? 2 * unit : offset;
        table[c] = float(above > largest_single ? largest_single : above);
        table[C + c] = varies ? float(step) : 0;
        table[2 * C + c] = varies ? float(1 / step) : 0;
        zeros[c] = int(zero);
        table[4 * C + c] = float(offset);
        table[5 * C + c] = float(gamma < 0 ? -unit : unit);
        signs[c] = gamma == 0 ? (beta > 0 ? 0 : int(2 * half)) : int(zero);
    }
}

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

template <int bits> __device__ inline u32 code_of(float a, float origin, float inverse, int zero)
{
    constexpr float half = 1 << (bits - 1), top = (1 << bits) - 1;
    float y = __fadd_rn(__fmul_rn(__fsub_rn(a, origin), inverse), half);
    y = y > 0 ? y : 0;  // NaN too
    const int code = int(y < top ? y : top);
    return u32(a > 0 ? (code > zero ? code : zero) : (code < zero - 1 ? code : zero - 1));
}

template <int bits> __device__ inline float middle_of(u32 code)
{
    return __fadd_rn(float(code), 0.5f - float(1 << (bits - 1)));
}

template <class T, int bits> __device__ inline float value_of(u32 code, float origin, float step, bool positive)
{
    const float value = __fadd_rn(origin, __fmul_rn(middle_of<bits>(code), step));
    const float low = positive ? least<T> : -limit<T>, high = positive ? limit<T> : -least<T>;
    const float above = value < low ? low : value;
    return above > high ? high : above;
}

template <class T, int bits>
__device__ inline void quantize_channels(
    const T* x, u8* packed, const float* origin, const float* inverse, const int* zero, i64 n, i64 inner, i64 C)
{
    const i64 stride = i64(gridDim.x) * threads;
    for (i64 group = i64(blockIdx.x) * threads + threadIdx.x; group * 8 < n; group += stride) {
        float a[8];
        load_eight(x + group * 8, n - group * 8, a);
        Walk walk(group * 8, inner, C);
        Word<bits> word = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i, walk.next()) {
            const i64 c = walk.channel;
            if (group * 8 + i < n)
                word |= pack<bits>(code_of<bits>(a[i], origin[c], inverse[c], zero[c]), i);
        }
        store_group<bits>(packed, group, word);
    }
}

// Writes the (leaky) ReLU of what the codes mean; that itself with a leak of 1.
template <class T, int bits>
__device__ inline void dequantize_channels(const u8* packed, T* out, const float* origin, const float* step,
    const int* zero, i64 n, i64 inner, i64 C, float leak)
{
    const i64 stride = i64(gridDim.x) * threads;
    for (i64 group = i64(blockIdx.x) * threads + threadIdx.x; group * 8 < n; group += stride) {
        const Word<bits> word = load_group<bits>(packed, group);
        Walk walk(group * 8, inner, C);
        float values[8];
#pragma unroll
        for (int i = 0; i < 8; ++i, walk.next()) {
            const i64 c = walk.channel;
            const u32 code = unpack<bits>(word, i);
            const bool positive = int(code) >= zero[c];
            const float value = value_of<T, bits>(code, origin[c], step[c], positive);
            values[i] = positive ? value : leak == 0 ? 0 : __fmul_rn(value, leak);
        }
        store_eight(values, out + group * 8, n - group * 8);
    }
}

// ---- the pre-activation layer (runtime/layers/preact) ------------------------------------------------------------------

// Writes the codes of A, which becomes its (leaky) ReLU. Where gamma is 0 they are of what was normalized,
// (x - mean) r.
template <class T, int bits>
__device__ inline void encode_channels(T* A, const T* x, u8* packed, const float* table, const float* mean,
    const float* r, i64 n, i64 inner, i64 C, float leak)
{
    constexpr float half = 1 << (bits - 1), inverse = float((2 * half) / 6.0);
    const PreActQuantParams meaning(table, C);
    const i64 stride = i64(gridDim.x) * threads;
    for (i64 group = i64(blockIdx.x) * threads + threadIdx.x; group * 8 < n; group += stride) {
        const i64 begin = group * 8;
        float a[8];
        load_eight(A + begin, n - begin, a);
        Walk walk(begin, inner, C);
        Word<bits> word = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i, walk.next()) {
            if (begin + i >= n)
                continue;
            const i64 c = walk.channel;
            const int sign = meaning.sign[c];
            u32 code;
            if (sign == 0 || sign == (1 << bits)) {
                const float normal = rounded<T>(__fmul_rn(__fsub_rn(widen(x[begin + i]), mean[c]), r[c]));
                code = code_of<bits>(normal, 0, inverse, 1 << (bits - 1));
            } else {
                code = code_of<bits>(a[i], meaning.origin[c], meaning.inverse[c], sign);
            }
            word |= pack<bits>(code, i);
            a[i] = leak == 0 ? (a[i] < 0 ? 0 : a[i]) : (a[i] > 0 ? a[i] : __fmul_rn(a[i], leak));
        }
        store_group<bits>(packed, group, word);
        store_eight(a, A + begin, n - begin);
    }
}

// The gradient behind the (leaky) ReLU: 0 and not 0 times infinity where there is none.
__device__ inline float through(float gradient, bool positive, float leak)
{
    return positive ? gradient : leak == 0 ? 0 : __fmul_rn(gradient, leak);
}

template <int bits> __device__ inline float normal_of(u32 code, float offset, float slope)
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
                weighted += h * normal_of<bits>(code, offset, slope);
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
            const float normal = normal_of<bits>(code, meaning.offset[c], meaning.slope[c]);
            const float h = through(g[i], int(code) >= meaning.sign[c], leak);
            g[i] = __fmul_rn(__fsub_rn(__fsub_rn(h, p[c]), __fmul_rn(q[c], normal)), s[c]);
        }
        store_eight(g, gradient + group * 8, n - group * 8);
    }
}

}  // namespace fewbit
