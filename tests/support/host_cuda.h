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
static ucontext_t scheduler;
static std::vector<ucontext_t> fibres;
static bool progress;  // since the scheduler last asked everybody

static void pause() { swapcontext(&fibres[threadIdx.x], &scheduler); }

static void arrive(Barrier& barrier, unsigned all)
{
    const unsigned generation = barrier.generation;
    progress = true;
    if (++barrier.arrived == all) {
        barrier.arrived = 0;
        ++barrier.generation;
    }
    while (barrier.generation == generation)
        pause();
    progress = true;
}

static std::function<void()> kernel;
static std::vector<char> done;

static void run_fibre()
{
    kernel();
    done[threadIdx.x] = progress = true;
    for (;;)
        pause();
}

static void launch(unsigned blocks, unsigned threads, std::function<void()> what)
{
    static std::vector<std::vector<char>> stacks(threads, std::vector<char>(1 << 16));
    kernel = what;
    gridDim.x = blocks, blockDim.x = threads;
    for (unsigned block = 0; block < blocks; ++block) {
        blockIdx.x = block;
        block_barrier = {};
        for (Barrier& barrier : warp_barriers)
            barrier = {};
        fibres.assign(threads, {});
        done.assign(threads, 0);
        for (unsigned i = 0; i < threads; ++i) {
            getcontext(&fibres[i]);
            fibres[i].uc_stack.ss_sp = stacks[i].data();
            fibres[i].uc_stack.ss_size = stacks[i].size();
            makecontext(&fibres[i], run_fibre, 0);
        }
        for (unsigned left = threads; left > 0;) {
            progress = false;
            for (unsigned i = 0; i < threads; ++i)
                if (!done[i]) {
                    threadIdx.x = i;
                    swapcontext(&scheduler, &fibres[i]);
                    left -= done[i];
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
static double __dmul_rn(double x, double y) { return x * y; }

using std::erf, std::exp, std::expm1, std::fabs, std::floor, std::log1p, std::tanh;
