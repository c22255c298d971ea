// Runs one of our CUDA kernels on a CPU, to see that it computes what it should and never waits for
// what will not come. `g++ -include emulator.h -x c++ kernel.cu`.
//
// Every CUDA thread is a coroutine; which one goes on is drawn by lot, and now and then some warps stay
// behind, as they may on a device. A barrier, an exchange between
// the lanes of a warp and a poll of memory are where they stop. Asynchronous copies happen at once
// or when they are waited for, by chance, and shared memory starts as NaN: what is used before it is
// there, or overwritten while it is used, is seen. What is not shown: the memory order between blocks, and time.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#define ASYNCLLM_EMULATED
#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

struct uint2 {
    uint32_t x, y;
};
struct uint4 {
    uint32_t x, y, z, w;
};

namespace emulator {

constexpr int WARP = 32;
constexpr size_t STACK_BYTES = 64 << 10;
#ifndef MOST_POLLS  // of each thread there is, in which nothing happens: a deadlock
#define MOST_POLLS 5000
#endif

struct Copy {
    void* to;
    const void* from;
    int bytes;
};

struct Thread;

// Where some threads meet, each with something for the others.
struct Meeting {
    std::vector<Thread*> waiting;
    uint64_t phase = 0;
    unsigned char slots[2][WARP][64];
};

// An asynchronous copy that comes when it likes, and its barrier.
struct BulkCopy {
    void* to;
    const void* from;  // null: zeros
    int bytes;
    uint64_t* barrier;
};

struct Grid;

struct Block {
    static constexpr size_t ALIGNMENT = 1024;
    int index;
    Grid* grid;
    std::vector<unsigned char> bytes;
    bool has_ended = false;  // one of its threads
    Meeting whole, first;
    int cluster_arrivals = 0;  // of a cluster's first block, for both
    std::vector<Thread*> cluster_waiting;
    std::vector<BulkCopy> on_the_way;
    std::vector<Meeting> warps;

    // At the same place of an aligned address in every block.
    unsigned char* memory() {
        const auto beyond = reinterpret_cast<uintptr_t>(bytes.data()) % ALIGNMENT;
        return bytes.data() + (ALIGNMENT - beyond);
    }
};

struct Thread {
    ucontext_t context;  // for its start
    jmp_buf place;       // where it stopped
    bool has_begun = false;
    std::unique_ptr<unsigned char[]> stack{new unsigned char[STACK_BYTES]};
    Block* block;
    int index;
    std::deque<std::vector<Copy>> groups;  // asked for and not yet copied; the last one is open
    int cluster_phases = 0;  // meetings of its cluster that it has come to
};

// A kernel that runs, and what it runs. Several do at once where GPUs wait for each other.
struct Grid {
    std::function<void()> body;
    std::vector<std::unique_ptr<Block>> blocks;
};

inline jmp_buf scheduler;
inline Thread* current;
inline int num_blocks, num_threads;
inline std::vector<Thread*> ready;
inline size_t num_live, idle_polls;
inline std::vector<std::unique_ptr<Grid>> grids;
inline std::vector<std::unique_ptr<Thread>> everyone;
inline std::mt19937 shuffle;

// Warps of one block that hardly run for some while, then others: where nothing else keeps those ahead of
// them from what they still use, it shows.
struct Laggards {
    static constexpr int MOST = 4, TRIES = 12;
    static constexpr size_t STEPS = 400;  // of each thread there is, at most
    Block* block;
    int first, end;  // warps
    size_t steps = 0;

    void pass() {
        if (steps-- > 0) return;
        steps = shuffle() % (STEPS * num_live + 1);
        block = grids[shuffle() % grids.size()]->blocks[shuffle() % num_blocks].get();
        first = shuffle() % (num_threads / WARP);
        end = first + shuffle() % (MOST + 1);
    }
    bool have(const Thread& thread) const {
        const int warp = thread.index / WARP;
        return thread.block == block && warp >= first && warp < end;
    }
};
inline Laggards laggards;

// Who goes on.
inline Thread* draw() {
    laggards.pass();
    size_t drawn = shuffle() % ready.size();
    for (int i = 0; i < Laggards::TRIES && laggards.have(*ready[drawn]); i++)
        drawn = shuffle() % ready.size();
    std::swap(ready[drawn], ready.back());
    Thread* thread = ready.back();
    ready.pop_back();
    return thread;
}

// Jumps between stacks: swapcontext does the same with two system calls each time.
[[gnu::noinline]] inline void stop() {
    if (_setjmp(current->place) == 0) _longjmp(scheduler, 1);
}
[[gnu::noinline]] inline void resume(Thread* thread) {
    current = thread;
    if (_setjmp(scheduler) != 0) return;  // it has stopped
    if (thread->has_begun) _longjmp(thread->place, 1);
    thread->has_begun = true;
    setcontext(&thread->context);
}

// Others must run before what this thread waits for can change.
inline void poll() {
    if (++idle_polls > MOST_POLLS * num_live) {
        std::fprintf(stderr, "deadlock: %zu threads wait for what does not come\n", num_live);
        std::_Exit(3);
    }
    ready.push_back(current);
    stop();
}

inline void entry() {
    current->block->grid->body();
    current->block->has_ended = true;
    num_live--;
    idle_polls = 0;
    stop();
}

// Until `size` threads have come here; returns what each brought, valid until it comes to the next.
template <typename T>
const unsigned char (*meet(Meeting& meeting, size_t size, int place, const T& mine))[64] {
    static_assert(sizeof(T) <= 64);
    auto& slots = meeting.slots[meeting.phase % 2];
    if (place < WARP) std::memcpy(slots[place], &mine, sizeof(T));
    meeting.waiting.push_back(current);
    if (meeting.waiting.size() == size) {
        ready.insert(ready.end(), meeting.waiting.begin(), meeting.waiting.end());
        meeting.waiting.clear();
        meeting.phase++;
        idle_polls = 0;
    }
    stop();
    return slots;
}

template <typename T>
const unsigned char (*meet_warp(const T& mine))[64] {
    return meet(current->block->warps[current->index / WARP], WARP, current->index % WARP, mine);
}

template <typename T>
T brought(const unsigned char (*slots)[64], int lane) {
    T value;
    std::memcpy(&value, slots[lane], sizeof(T));
    return value;
}

// Every thread of every block, until all have ended. Ends the process where nobody can go on. Of so many
// launches `together`, each on a GPU of its own, the last one runs all.
inline void launch(int blocks, int threads, size_t shared_bytes, unsigned seed, size_t together,
                   std::function<void()> kernel) {
    num_blocks = blocks;
    num_threads = threads;
    grids.push_back(std::make_unique<Grid>(Grid{std::move(kernel), {}}));
    for (int b = 0; b < blocks; b++) {
        auto& block = *grids.back()->blocks.emplace_back(std::make_unique<Block>());
        block.index = b;
        block.grid = grids.back().get();
        block.bytes.assign(shared_bytes + Block::ALIGNMENT, 0xff);
        block.warps.resize(threads / WARP);
        for (int t = 0; t < threads; t++) {
            Thread& thread = *everyone.emplace_back(std::make_unique<Thread>());
            thread.block = &block;
            thread.index = t;
            thread.groups.emplace_back();
            getcontext(&thread.context);
            thread.context.uc_stack.ss_sp = thread.stack.get();
            thread.context.uc_stack.ss_size = STACK_BYTES;
            makecontext(&thread.context, entry, 0);
            ready.push_back(&thread);
        }
    }
    if (grids.size() < together) return;
    shuffle.seed(seed);
    laggards = {};
    num_live = everyone.size();
    idle_polls = 0;
    while (!ready.empty()) resume(draw());
    if (num_live > 0) {
        std::fprintf(stderr, "deadlock: %zu threads wait for each other\n", num_live);
        std::_Exit(3);
    }
    grids.clear();
    everyone.clear();
}

}  // namespace emulator

inline int thread_index() { return emulator::current->index; }
inline int block_index() { return emulator::current->block->index; }
inline int num_blocks() { return emulator::num_blocks; }
inline unsigned char* shared_memory() { return emulator::current->block->memory(); }

inline void sync_block() {
    emulator::meet(emulator::current->block->whole, emulator::num_threads, emulator::WARP, 0);
}
inline void sync_first(int num_threads) {
    emulator::meet(emulator::current->block->first, num_threads, emulator::WARP, 0);
}
inline void sync_warp() { emulator::meet_warp(0); }
inline float across(float x, int step) {
    const int lane = thread_index() % emulator::WARP;
    return emulator::brought<float>(emulator::meet_warp(x), lane ^ step);
}
inline float add_across(float x, int step) { return x + across(x, step); }
inline float most_across(float x, int step) { return std::fmax(x, across(x, step)); }

inline int from_lane(int x, int lane) {
    return emulator::brought<int>(emulator::meet_warp(x), lane);
}
inline int count_lanes(bool is_one) {
    const auto slots = emulator::meet_warp(is_one);
    int count = 0;
    for (int lane = 0; lane < emulator::WARP; lane++) count += emulator::brought<bool>(slots, lane);
    return count;
}

template <int BYTES>
void copy_async_few(void* to, const void* from) {
    if (reinterpret_cast<uintptr_t>(to) % BYTES || reinterpret_cast<uintptr_t>(from) % BYTES)
        std::abort();
    if (emulator::shuffle() % 2)
        std::memcpy(to, from, BYTES);
    else
        emulator::current->groups.back().push_back({to, from, BYTES});
}
inline void copy_async_or_zero(void* to, const void* from, int bytes) {
    alignas(16) static const uint4 zeros = {0, 0, 0, 0};
    copy_async_few<16>(to, bytes == 0 ? &zeros : from);
}
inline void end_copies() { emulator::current->groups.emplace_back(); }
template <int LATER>
void wait_copies() {
    auto& groups = emulator::current->groups;
    while (groups.size() > LATER + 1) {  // the open group is not counted
        for (const auto& copy : groups.front()) std::memcpy(copy.to, copy.from, copy.bytes);
        groups.pop_front();
    }
}

// So many threads arrive in a phase; `bytes` that have come before they are expected count as negative.
using Barrier = uint64_t;
namespace emulator {
struct BarrierState {
    int16_t parity;
    int8_t arrivals, missing;  // of a phase; in this one
    int32_t bytes;
};
inline void change(Barrier& barrier, bool arrives, int bytes) {
    BarrierState state;
    std::memcpy(&state, &barrier, 8);
    if (arrives && state.missing == 0) {
        std::fprintf(stderr, "too many arrivals at a barrier in a phase\n");
        std::_Exit(3);
    }
    if (arrives) state.missing--;
    state.bytes += bytes;
    if (state.missing == 0 && state.bytes == 0)
        state = {static_cast<int16_t>(!state.parity), state.arrivals, state.arrivals, 0};
    std::memcpy(&barrier, &state, 8);
    idle_polls = 0;
}
// Some copy of the block comes.
inline void receive() {
    auto& copies = current->block->on_the_way;
    if (copies.empty()) return;
    std::swap(copies[shuffle() % copies.size()], copies.back());
    const BulkCopy copy = copies.back();
    copies.pop_back();
    if (copy.from)
        std::memcpy(copy.to, copy.from, copy.bytes);
    else
        std::memset(copy.to, 0, copy.bytes);
    change(*copy.barrier, false, -copy.bytes);
}
}  // namespace emulator
template <int ARRIVALS = 1>
void init_barrier(Barrier& barrier) {
    const emulator::BarrierState state = {0, ARRIVALS, ARRIVALS, 0};
    std::memcpy(&barrier, &state, 8);
}
inline void fence_barrier_init() {}
inline void arrive(Barrier& barrier) { emulator::change(barrier, true, 0); }
inline void arrive_and_expect_tx(Barrier& barrier, int bytes) { emulator::change(barrier, true, bytes); }
inline void wait_barrier(Barrier& barrier, uint32_t parity) {
    for (;;) {
        emulator::BarrierState state;
        std::memcpy(&state, &barrier, 8);
        if (static_cast<uint32_t>(state.parity) != parity) return;
        emulator::receive();
        emulator::poll();
    }
}
inline void copy_bulk(void* to, const void* from, int bytes, Barrier& barrier) {
    if (reinterpret_cast<uintptr_t>(to) % 16 || reinterpret_cast<uintptr_t>(from) % 16 || bytes % 16)
        std::abort();
    emulator::current->block->on_the_way.push_back({to, from, bytes, &barrier});
    while (emulator::shuffle() % 4 == 0) emulator::receive();
}
// A thread's open group comes when it likes.
inline void arrive_after_copies(Barrier& barrier) {
    auto& copies = emulator::current->groups.back();
    for (const auto& copy : copies) {
        emulator::current->block->on_the_way.push_back(
            {copy.to, copy.from, copy.bytes, &barrier});
        emulator::BarrierState state;
        std::memcpy(&state, &barrier, 8);
        state.bytes += copy.bytes;
        std::memcpy(&barrier, &state, 8);
    }
    copies.clear();
    while (emulator::shuffle() % 4 == 0) emulator::receive();
}
inline void show_to_copies() {}
template <int NUM>
void give_registers() {}
template <int NUM>
void take_registers() {}

inline uint4 load_fresh(const void* p) { return *static_cast<const uint4*>(p); }
inline uint32_t load_fresh_pair(const void* p) { return *static_cast<const uint32_t*>(p); }
inline float load_fresh_float(const float* p) { return *p; }
inline uint4 load_shared_here(const void* p) { return *static_cast<const uint4*>(p); }
inline uint4 load_shared(const void* p) { return *static_cast<const uint4*>(p); }
inline uint4 load_constant(const void* p) { return *static_cast<const uint4*>(p); }

inline void store_fresh_pair(void* p, uint32_t v) {
    emulator::idle_polls = 0;
    std::memcpy(p, &v, sizeof(v));
}
inline void store_fresh_float(float* p, float v) {
    emulator::idle_polls = 0;
    *p = v;
}
inline uint32_t load_anywhere(const void* p) { return load_fresh_pair(p); }
inline void store_anywhere(void* p, uint32_t v) { store_fresh_pair(p, v); }
inline void poll_again() { emulator::poll(); }

inline void add_relaxed(uint32_t* p, uint32_t value) { *p += value; }
inline uint32_t add_and_see(uint32_t* p, uint32_t value) {
    emulator::idle_polls = 0;
    const uint32_t old = *p;
    *p += value;
    return old;
}
inline float bits_to_float(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}
inline uint32_t to_bits(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}
inline uint32_t round_to_half(float x) {  // to nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if (x != x) return 0x7fff;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline uint32_t to_pair(float low, float high) { return round_to_half(low) | round_to_half(high) << 16; }
inline uint32_t masked_or(uint32_t x, uint32_t mask, uint32_t bits) { return (x & mask) | bits; }
inline uint32_t lower_halves(uint32_t a, uint32_t b) { return (a & 0xffffu) | b << 16; }
inline uint32_t upper_halves(uint32_t a, uint32_t b) { return a >> 16 | (b & 0xffff0000u); }
inline uint32_t subtract_pairs(uint32_t pair, uint32_t by) {
    return to_pair(bits_to_float(pair << 16) - bits_to_float(by << 16),
                   bits_to_float(pair & 0xffff0000u) - bits_to_float(by & 0xffff0000u));
}
inline float divide(float x, float by) { return x / by; }
inline float power_of_2(float x) { return std::exp2(x); }
inline float greater(float x, float y) { return std::fmax(x, y); }
inline float inverse_root(float x) { return 1 / std::sqrt(x); }

// mma.m16n8k16: thread (g, q) of a warp holds, of a, rows g and g + 8 at columns 2q.. (a0, a1) and
// 2q + 8.. (a2, a3), of b column g at the same rows, of c rows g and g + 8 at columns 2q and 2q + 1.
inline void multiply_add(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                         uint32_t b0, uint32_t b1) {
    struct Operands {
        uint32_t a[4], b[2];
    };
    const auto slots = emulator::meet_warp(Operands{{a0, a1, a2, a3}, {b0, b1}});
    const int lane = thread_index() % emulator::WARP;
    for (int i = 0; i < 4; i++) {
        const int row = lane / 4, lower = i / 2, column = lane % 4 * 2 + i % 2;
        for (int q = 0; q < 4; q++) {
            const auto a = emulator::brought<Operands>(slots, row * 4 + q);
            const auto b = emulator::brought<Operands>(slots, column * 4 + q);
            for (int half = 0; half < 2; half++) {
                const uint32_t x = a.a[half * 2 + lower], y = b.b[half];
                c[i] += bits_to_float(x << 16) * bits_to_float(y << 16);
                c[i] += bits_to_float(x & 0xffff0000u) * bits_to_float(y & 0xffff0000u);
            }
        }
    }
}
inline void prefetch(const void*) {}
inline void start_kernel_after() {}
inline void wait_kernel_before() {}

inline uint32_t transpose(uint32_t pair) {
    const auto slots = emulator::meet_warp(pair);
    const int row = thread_index() % emulator::WARP / 4, column = thread_index() % 4 * 2;
    const auto entry = [&](int r, int c) {
        return emulator::brought<uint32_t>(slots, r * 4 + c / 2) >> c % 2 * 16 & 0xffff;
    };
    return entry(column, row) | entry(column + 1, row) << 16;
}
inline uint4 load_transposed(const void* row) {
    struct Row {
        uint16_t numbers[8];
    };
    const auto slots = emulator::meet_warp(*static_cast<const Row*>(row));
    const int at = thread_index() % emulator::WARP / 4, column = thread_index() % 4 * 2;
    uint32_t pairs[4];
    for (int m = 0; m < 4; m++) {
        const auto entry = [&](int r) -> uint32_t {
            return emulator::brought<Row>(slots, m * 8 + r).numbers[at];
        };
        pairs[m] = entry(column) | entry(column + 1) << 16;
    }
    return {pairs[0], pairs[1], pairs[2], pairs[3]};
}

// `stream` is the seed of the order in which threads take turns, plus TOGETHER times the number of
// launches that run at the same time, if several do.
enum class Order;
template <typename Args>
int launch_kernel(void (*kernel)(Args), const Args& args, int num_blocks, int num_threads,
                  int shared_bytes, void* stream, Order, int = 1) {
    constexpr uintptr_t TOGETHER = 1 << 16;
    const auto both = reinterpret_cast<uintptr_t>(stream);
    emulator::launch(num_blocks, num_threads, shared_bytes, both % TOGETHER, both / TOGETHER, [=] { kernel(args); });
    return 0;
}

inline int copy_columns(void* to, const void* from, size_t pitch, size_t width, size_t num_rows, void*) {
    for (size_t at = 0; at < num_rows * pitch; at += pitch)
        memcpy(static_cast<char*>(to) + at, static_cast<const char*>(from) + at, width);
    return 0;
}

// Clusters of two blocks.
namespace emulator {
inline Block& first_of_cluster() {
    return *current->block->grid->blocks[current->block->index / 2 * 2];
}
template <typename T>
T& in_block(T& mine, int rank) {
    Block& block = *current->block->grid->blocks[current->block->index / 2 * 2 + rank];
    if (block.has_ended) {
        std::fprintf(stderr, "the shared memory of a block that has ended\n");
        std::_Exit(3);
    }
    auto* place = reinterpret_cast<unsigned char*>(&mine);
    return *reinterpret_cast<T*>(block.memory() + (place - current->block->memory()));
}
}  // namespace emulator

inline int cluster_rank() { return block_index() % 2; }
inline void cluster_arrive() {
    emulator::Block& first = emulator::first_of_cluster();
    emulator::current->cluster_phases++;
    if (++first.cluster_arrivals % (2 * emulator::num_threads)) return;
    auto& waiting = first.cluster_waiting;
    emulator::ready.insert(emulator::ready.end(), waiting.begin(), waiting.end());
    waiting.clear();
    emulator::idle_polls = 0;
}
inline void cluster_wait() {
    emulator::Block& first = emulator::first_of_cluster();
    if (first.cluster_arrivals >= emulator::current->cluster_phases * 2 * emulator::num_threads) return;
    first.cluster_waiting.push_back(emulator::current);
    emulator::stop();
}
inline void store_remote(uint4& to, const float (&values)[4], Barrier& barrier, int rank) {
    std::memcpy(&emulator::in_block(to, rank), values, 16);
    emulator::change(emulator::in_block(barrier, rank), false, -16);
}
