/* CUDA on the CPU, as far as fewbit's kernels need it: the same source, built by a C++ compiler.
 *
 * The threads of a block are fibres. Each runs until a barrier and goes on when all that the barrier is for have come;
 * a barrier that some thread never reaches ends the program. Blocks run one after the other.
 *
 * With HOST_RACES, and g++'s -fsanitize=thread for what is included behind, host_races.cpp is told of every access to
 * memory, of which the executor's own are left out. Threads and blocks then run in the opposite order.
 */
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#ifdef HOST_RACES
#include "host_races.h"
#define TOLD(call) races::call
#define __shared__ static thread_local  // so that the checker knows it from other memory
constexpr bool backwards = true;
#else
#define TOLD(call) static_cast<void>(0)
#define __shared__ static
constexpr bool backwards = false;
#endif
#define EXECUTOR __attribute__((no_sanitize("thread")))

#define __host__
#define __device__
#define __global__
#define __launch_bounds__(...)

struct Index { unsigned x; };
static Index blockIdx, threadIdx, gridDim, blockDim;

namespace host {

struct Barrier {
    unsigned arrived, generation;
    int line;
};
static Barrier block_barrier, warp_barriers[32], warp_exchanges[32];

// Where a fibre goes on, and the barrier before which it waits; one fibre a thread, kept from launch to launch.
struct Fibre {
    void* place[5];
    std::vector<char> stack;
    const Barrier* barrier;
    unsigned generation;
    bool done;

    EXECUTOR bool waits() const { return barrier && barrier->generation == generation; }
};
static void* scheduler[5];
static std::vector<Fibre> fibres;
static std::function<void()> kernel;

// The compiler's own setjmp takes nanoseconds; swapcontext asks the kernel for the mask of signals each time.
static EXECUTOR __attribute__((noinline)) void go_to(void** place) { __builtin_longjmp(place, 1); }

static EXECUTOR __attribute__((noinline)) void change(void** from, void** to)
{
    if (__builtin_setjmp(from) == 0)
        go_to(to);
}

static EXECUTOR void pause() { change(fibres[threadIdx.x].place, scheduler); }

// Tells who runs, and which barriers it has behind it.
static EXECUTOR void tell()
{
#ifdef HOST_RACES
    const std::vector<char>& stack = fibres[threadIdx.x].stack;
    races::now = {true, blockIdx.x, threadIdx.x, block_barrier.generation, warp_barriers[threadIdx.x / 32].generation,
                  stack.data(), stack.data() + stack.size()};
#endif
}

static EXECUTOR void arrive(Barrier& barrier, unsigned all, int line)
{
    Fibre& fibre = fibres[threadIdx.x];
    if (barrier.arrived == 0)
        barrier.line = line;
    else if (barrier.line != line)
        TOLD(is_divergent(line, barrier.line));
    fibre.barrier = &barrier;
    fibre.generation = barrier.generation;
    if (++barrier.arrived == all) {
        barrier.arrived = 0;
        ++barrier.generation;
    }
    while (fibre.waits())
        pause();
    tell();
}

static EXECUTOR void run_fibre()
{
    for (;;) {
        tell();
        kernel();
        fibres[threadIdx.x].done = true;
        pause();
    }
}

static EXECUTOR __attribute__((noinline)) void begin(Fibre& fibre)
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

// Ends a launch whose threads wait for others that do not come.
static EXECUTOR void fail()
{
#ifdef HOST_RACES
    for (const Fibre& fibre : fibres)
        if (fibre.waits())
            races::is_stuck(fibre.barrier->line);
    fibres.clear();
#else
    std::fprintf(stderr, "a barrier that not all threads reach\n");
    std::abort();
#endif
}

// Whether the block's threads could all go on to their end.
static EXECUTOR bool run_block(unsigned threads)
{
    for (unsigned left = threads; left > 0;) {
        bool progress = false;
        for (unsigned i = 0; i < threads; ++i) {
            threadIdx.x = backwards ? threads - 1 - i : i;
            Fibre& fibre = fibres[threadIdx.x];
            if (fibre.done || fibre.waits())
                continue;
            if (fibre.stack.empty())
                begin(fibre);
            else
                change(scheduler, fibre.place);
            TOLD(now.in_kernel = false);
            left -= fibre.done;
            progress = true;
        }
        if (!progress)
            return false;
    }
    return true;
}

static EXECUTOR void launch(unsigned blocks, unsigned threads, std::function<void()> what)
{
    TOLD(begin_launch());
    kernel = what;
    gridDim.x = blocks, blockDim.x = threads;
    if (fibres.size() < threads)
        fibres.resize(threads);
    for (unsigned i = 0; i < blocks; ++i) {
        blockIdx.x = backwards ? blocks - 1 - i : i;
        TOLD(begin_block());
        block_barrier = {};
        for (unsigned warp = 0; warp < 32; ++warp)
            warp_barriers[warp] = warp_exchanges[warp] = {};
        for (Fibre& fibre : fibres)
            fibre.barrier = nullptr, fibre.done = false;
        if (!run_block(threads))
            return fail();
    }
}

}  // namespace host

static EXECUTOR void __syncthreads(int line = __builtin_LINE()) { host::arrive(host::block_barrier, blockDim.x, line); }
static EXECUTOR void __syncwarp(int line = __builtin_LINE())
{
    host::arrive(host::warp_barriers[threadIdx.x / 32], 32, line);
}

// The value of another thread of the warp. Numbers are exchanged, and nothing else is ordered by it.
template <class V> static EXECUTOR V exchange(V value, unsigned other, int line)
{
    static V values[1024];
    values[threadIdx.x] = value;
    host::arrive(host::warp_exchanges[threadIdx.x / 32], 32, line);
    const V result = values[other];
    host::arrive(host::warp_exchanges[threadIdx.x / 32], 32, line);
    return result;
}

template <class V> static EXECUTOR V __shfl_xor_sync(unsigned, V value, int lanes, int line = __builtin_LINE())
{
    return exchange(value, threadIdx.x ^ unsigned(lanes), line);
}

static int __any_sync(unsigned, int holds)
{
    for (int lanes = 1; lanes < 32; lanes *= 2)
        holds |= __shfl_xor_sync(0, holds != 0, lanes);
    return holds;
}

// The value of the lane so many before this one; its own where there is none.
template <class V> static EXECUTOR V __shfl_up_sync(unsigned, V value, int lanes, int line = __builtin_LINE())
{
    const bool there = threadIdx.x % 32 >= unsigned(lanes);
    return exchange(value, threadIdx.x - (there ? unsigned(lanes) : 0), line);
}

template <class V> static EXECUTOR V __shfl_sync(unsigned, V value, int lane, int line = __builtin_LINE())
{
    return exchange(value, threadIdx.x / 32 * 32 + unsigned(lane), line);
}

// Threads run one at a time, and change places at barriers alone.
template <class V> static EXECUTOR V atomicAdd(V* to, V value)
{
    TOLD(is_atomic(to, sizeof(V), __builtin_return_address(0)));
    const V before = *to;
    *to += value;
    return before;
}

template <class V> static EXECUTOR V atomicMax(V* to, V value)
{
    TOLD(is_atomic(to, sizeof(V), __builtin_return_address(0)));
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
