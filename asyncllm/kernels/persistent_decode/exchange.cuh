// Where values pass from the blocks that make them to those that need them. A word says by itself
// whether it is there: who needs it reads it until it is not EMPTY, so there is no count to add to
// and no release, which would wait for all copies that are on their way (docs/log/decode.md).
//
// Each layer has its own words, each of which a step writes once. There are two of everything:
// while a step uses one, it empties the other for the next, and the end of its kernel is between.
#pragma once

#include "shared.cuh"

namespace {

constexpr uint32_t EMPTY = ~0u;     // no result: a NaN that is computed has other bits
constexpr int MAX_POLLS = 1 << 24;  // of a step: seconds
constexpr int LOOK_POLLS = 1 << 14;  // between looks at the host's memory, which are slow

__device__ __forceinline__ bool is_empty(uint32_t v) { return v == EMPTY; }
__device__ __forceinline__ bool is_empty(const uint4& v) {
    return is_empty(v.x) || is_empty(v.y) || is_empty(v.z) || is_empty(v.w);
}

// How long a warp still waits in this step, for all that it waits for: seconds, because what did not
// come may never come, and the kernel must end.
struct Patience {
    int polls = MAX_POLLS;

    // By all lanes of a warp: whether to look again, because one of them misses something.
    __device__ __forceinline__ bool wait(const Args& args, Shared& shared, bool is_there) {
        if (count_lanes(is_there) == 32 || polls == 0) return false;
        polls--;
        if constexpr (RANKS > 1)
            if (polls % LOOK_POLLS == 0 && from_lane(load_anywhere(args.closed), 0)) polls = 0;
        if (polls == 0) *args.stuck = shared.is_stuck = 1;
        poll_again();
        return true;
    }
};

__device__ __forceinline__ unsigned char* exchange_of(const Args& args, int set, int layer) {
    return static_cast<unsigned char*>(args.exchange)
        + (set * args.num_layers + layer) * args.layer_bytes;
}

// By all workers of all blocks.
__device__ __forceinline__ void empty(unsigned char* bytes, int64_t num_bytes) {
    auto* words = reinterpret_cast<uint4*>(bytes);
    const int64_t num_words = num_bytes / sizeof(uint4);
#pragma unroll 1
    for (int64_t i = block_index() * THREADS + thread_index(); i < num_words;
         i += num_blocks() * THREADS)
        words[i] = {EMPTY, EMPTY, EMPTY, EMPTY};
}

}  // namespace
