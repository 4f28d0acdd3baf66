/* What the executor of host_cuda.h tells the checker of host_races.cpp: who runs, and what is more than a load or a store. */
namespace races {

// The thread that runs. Accesses of one block before and after a barrier of the block, and those of one warp before and
// after a __syncwarp, differ in these numbers.
struct Now {
    bool in_kernel;
    unsigned block, thread, of_block, of_warp;
    const char *stack, *behind_stack;  // its own memory, which is not looked at
};
extern Now now;

void begin_launch();  // all before it comes before
void begin_block();   // whose shared memory is new
void is_atomic(const void* at, unsigned size, const void* code);
void is_divergent(int line, int other);  // threads of a barrier have come to it at two places
void is_stuck(int line);                 // a barrier that not all threads reach

}  // namespace races
