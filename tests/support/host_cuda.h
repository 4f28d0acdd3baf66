/* CUDA on the CPU, as far as fewbit's kernels need it: the same source, built by a C++ compiler.
 *
 * The threads of a block are fibres. Each runs until a barrier and goes on when all that the barrier is for have come;
 * a barrier that some thread never reaches ends the program. Blocks run one after the other.
 */
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#define __host__
#define __device__
#define __global__
#define __shared__ static
#define __launch_bounds__(...)

struct Index { unsigned x; };
static Index blockIdx, threadIdx, gridDim, blockDim;

namespace host {

struct Barrier { unsigned arrived, generation; };
static Barrier block_barrier, warp_barriers[32];

// Where a fibre goes on, and the barrier before which it waits; one fibre a thread, kept from launch to launch.
struct Fibre {
    void* place[5];
    std::vector<char> stack;
    const Barrier* barrier;
    unsigned generation;
    bool done;

    bool waits() const { return barrier && barrier->generation == generation; }
};
static void* scheduler[5];
static std::vector<Fibre> fibres;
static std::function<void()> kernel;

// The compiler's own setjmp takes nanoseconds; swapcontext asks the kernel for the mask of signals each time.
static __attribute__((noinline)) void go_to(void** place) { __builtin_longjmp(place, 1); }

static __attribute__((noinline)) void change(void** from, void** to)
{
    if (__builtin_setjmp(from) == 0)
        go_to(to);
}

static void pause() { change(fibres[threadIdx.x].place, scheduler); }

static void arrive(Barrier& barrier, unsigned all)
{
    Fibre& fibre = fibres[threadIdx.x];
    fibre.barrier = &barrier;
    fibre.generation = barrier.generation;
    if (++barrier.arrived == all) {
        barrier.arrived = 0;
        ++barrier.generation;
    }
    while (fibre.waits())
        pause();
}

static void run_fibre()
{
    for (;;) {
        kernel();
        fibres[threadIdx.x].done = true;
        pause();
    }
}

static __attribute__((noinline)) void begin(Fibre& fibre)
{
    ucontext_t context;
    fibre.stack.resize(1 << 16);
    getcontext(&context);
    context.uc_stack.ss_sp = fibre.stack.data();
    context.uc_stack.ss_size = fibre.stack.size();
    makecontext(&context, run_fibre, 0);
    if (__builtin_setjmp(scheduler) == 0)
        setcontext(&context);
}

static void launch(unsigned blocks, unsigned threads, std::function<void()> what)
{
    kernel = what;
    gridDim.x = blocks, blockDim.x = threads;
    if (fibres.size() < threads)
        fibres.resize(threads);
    for (unsigned block = 0; block < blocks; ++block) {
        blockIdx.x = block;
        block_barrier = {};
        for (Barrier& barrier : warp_barriers)
            barrier = {};
        for (Fibre& fibre : fibres)
            fibre.barrier = nullptr, fibre.done = false;
        for (unsigned left = threads; left > 0;) {
            bool progress = false;
            for (unsigned i = 0; i < threads; ++i) {
                Fibre& fibre = fibres[i];
                if (fibre.done || fibre.waits())
                    continue;
                threadIdx.x = i;
                if (fibre.stack.empty())
                    begin(fibre);
                else
                    change(scheduler, fibre.place);
                left -= fibre.done;
                progress = true;
            }
            if (!progress) {
                std::fprintf(stderr, "a barrier that not all threads reach\n");
                std::abort();
            }
        }
    }
}

}  // namespace host

static void __syncthreads() { host::arrive(host::block_barrier, blockDim.x); }
static void __syncwarp() { host::arrive(host::warp_barriers[threadIdx.x / 32], 32); }

template <class V> static V __shfl_xor_sync(unsigned, V value, int lanes)
{
    static V values[1024];
    values[threadIdx.x] = value;
    __syncwarp();
    const V other = values[threadIdx.x ^ unsigned(lanes)];
    __syncwarp();
    return other;
}

// The value of the lane so many before this one; its own where there is none.
template <class V> static V __shfl_up_sync(unsigned, V value, int lanes)
{
    static V values[1024];
    values[threadIdx.x] = value;
    __syncwarp();
    const bool there = threadIdx.x % 32 >= unsigned(lanes);
    const V other = values[threadIdx.x - (there ? unsigned(lanes) : 0)];
    __syncwarp();
    return other;
}

template <class V> static V __shfl_sync(unsigned, V value, int lane)
{
    static V values[1024];
    values[threadIdx.x] = value;
    __syncwarp();
    const V other = values[threadIdx.x / 32 * 32 + unsigned(lane)];
    __syncwarp();
    return other;
}

// Threads run one at a time, and change places at barriers alone.
template <class V> static V atomicAdd(V* to, V value)
{
    const V before = *to;
    *to += value;
    return before;
}

template <class V> static V atomicMax(V* to, V value)
{
    const V before = *to;
    *to = before > value ? before : value;
    return before;
}

static int __popc(unsigned bits) { return __builtin_popcount(bits); }

static float __saturatef(float x) { return x > 0 ? (x < 1 ? x : 1) : 0; }

static unsigned __float_as_uint(float x)
{
    unsigned bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}

static float __uint_as_float(unsigned bits)
{
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

// One rounding each; the compiler is told not to contract them.
static float __fadd_rn(float x, float y) { return x + y; }
static float __fsub_rn(float x, float y) { return x - y; }
static float __fmul_rn(float x, float y) { return x * y; }
static float __fdiv_rn(float x, float y) { return x / y; }
static float __fsqrt_rn(float x) { return __builtin_sqrtf(x); }
static float __fmaf_rn(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
static double __dmul_rn(double x, double y) { return x * y; }

using std::erf, std::exp, std::expm1, std::fabs, std::floor, std::log1p, std::tanh;
