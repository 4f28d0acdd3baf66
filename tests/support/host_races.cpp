/* Finds races of a kernel: two accesses to a byte in one launch, one of them at least a store, that nothing orders.
 *
 * g++ puts a call of __tsan_read4 and the like before each load and store; here they lead not into ThreadSanitizer, but
 * to a record of each byte. In CUDA only two things order accesses of a launch: __syncthreads those of a block, __syncwarp
 * those of a warp. A shuffle exchanges numbers alone, and nothing orders two blocks; accesses that are atomic do not race
 * with each other. So a few numbers say of the accesses to a byte so far whether the next one may come before them on some
 * GPU, in whichever order the threads run here: what is found does not hang on the order, nor on luck.
 */
#include "host_races.h"

#include <dlfcn.h>
#include <link.h>

#include <cstdint>
#include <cstring>
#include <initializer_list>

namespace races {

Now now;

enum Kind : unsigned { read, write, atomic, divergent, stuck };

// As Python reads it: places are offsets in the library, or lines where a barrier is.
struct Race {
    unsigned kind, other_kind;
    std::uint64_t place, other_place;
    unsigned block, thread;
};
static Race found[16];
static unsigned count;

static void report(const Race& race)
{
    for (unsigned i = 0; i < count; ++i)
        if (found[i].place == race.place && found[i].other_place == race.other_place)
            return;
    if (count < sizeof(found) / sizeof(*found))
        found[count++] = race;
}

constexpr unsigned several = ~0u;  // blocks, warps or threads

// The accesses of a kind to a byte that one to come may race with, and the barriers which the last of them had behind it.
struct Accesses {
    unsigned block, of_block, warp, of_warp, thread;
    const void* code;  // null: there are none

    bool may_race() const
    {
        if (!code)
            return false;
        if (block != now.block)
            return true;
        if (of_block != now.of_block)
            return false;
        if (warp != now.thread / 32)
            return true;
        return of_warp == now.of_warp && thread != now.thread;
    }

    void add(const void* by)
    {
        const Accesses own = {now.block, now.of_block, now.thread / 32, now.of_warp, now.thread, by};
        if (!code || (block == own.block && of_block != own.of_block))
            *this = own;
        else if (block != own.block)
            block = several;
        else if (warp != own.warp)
            warp = several;
        else if (of_warp != own.of_warp)
            *this = own;
        else if (thread != own.thread)
            thread = several;
    }
};

struct Byte { Accesses of[3]; };

constexpr std::uintptr_t page_size = 1024, slots = 4096;
struct Page {
    std::uintptr_t number;
    Page* next;
    Byte bytes[page_size];
};
static Page* pages[slots];

static Byte& byte_at(std::uintptr_t address)
{
    const std::uintptr_t number = address / page_size;
    Page** at = &pages[number % slots];
    while (*at && (*at)->number != number)
        at = &(*at)->next;
    if (!*at)
        *at = new Page{number, nullptr, {}};
    return (*at)->bytes[address % page_size];
}

static std::uint64_t offset_of(const void* code)
{
    Dl_info library;
    dladdr(code, &library);
    return static_cast<const char*>(code) - static_cast<const char*>(library.dli_fbase);
}

static void access(const void* at, unsigned long size, Kind kind, const void* code)
{
    const char* begin = static_cast<const char*>(at);
    if (!now.in_kernel || (begin >= now.stack && begin < now.behind_stack))
        return;
    for (unsigned long i = 0; i < size; ++i) {
        Byte& byte = byte_at(reinterpret_cast<std::uintptr_t>(begin) + i);
        for (const Kind other : {read, write, atomic})
            if ((kind != other || kind == write) && byte.of[other].may_race())
                report({kind, other, offset_of(code), offset_of(byte.of[other].code), now.block, now.thread});
        byte.of[kind].add(code);
    }
}

void begin_launch()
{
    for (Page*& first : pages)
        while (Page* page = first) {
            first = page->next;
            delete page;
        }
}

// Shared memory is what is thread_local in this library.
static int forget_shared(dl_phdr_info* library, unsigned long, void* own)
{
    if (reinterpret_cast<void*>(library->dlpi_addr) != own || !library->dlpi_tls_data)
        return 0;
    const std::uintptr_t begin = reinterpret_cast<std::uintptr_t>(library->dlpi_tls_data);
    for (int i = 0; i < library->dlpi_phnum; ++i)
        if (library->dlpi_phdr[i].p_type == PT_TLS)
            for (std::uintptr_t at = begin; at < begin + library->dlpi_phdr[i].p_memsz; ++at)
                byte_at(at) = {};
    return 0;
}

void begin_block()
{
    Dl_info library;
    dladdr(&now, &library);
    dl_iterate_phdr(forget_shared, library.dli_fbase);
}

void is_atomic(const void* at, unsigned size, const void* code) { access(at, size, atomic, code); }
void is_divergent(int line, int other)
{
    report({divergent, divergent, unsigned(line), unsigned(other), now.block, now.thread});
}
void is_stuck(int line) { report({stuck, stuck, unsigned(line), 0, now.block, now.thread}); }

}  // namespace races

// The races found since the last call, 16 at most.
extern "C" unsigned take_races(races::Race* to)
{
    const unsigned count = races::count;
    std::memcpy(to, races::found, count * sizeof(*to));
    races::count = 0;
    return count;
}

#define ACCESS(name, size, kind) \
    extern "C" void __tsan_##name(void* at) { races::access(at, size, races::kind, __builtin_return_address(0)); }
#define ACCESSES(size)                       \
    ACCESS(read##size, size, read)           \
    ACCESS(write##size, size, write)         \
    ACCESS(unaligned_read##size, size, read) \
    ACCESS(unaligned_write##size, size, write)
ACCESSES(1) ACCESSES(2) ACCESSES(4) ACCESSES(8) ACCESSES(16)

extern "C" void __tsan_read_range(void* at, unsigned long size)
{
    races::access(at, size, races::read, __builtin_return_address(0));
}
extern "C" void __tsan_write_range(void* at, unsigned long size)
{
    races::access(at, size, races::write, __builtin_return_address(0));
}
extern "C" void __tsan_vptr_update(void**, void*) {}
extern "C" void __tsan_vptr_read(void**) {}
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}
extern "C" void __tsan_init() {}
