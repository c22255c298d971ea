// Where all blocks of the kernel wait for each other.
#pragma once

#include "args.cuh"

namespace {

// All blocks meet: the top bit of the word turns when the last has arrived, and needs no reset.
struct Barrier {
    uint32_t* word;
    uint32_t* stuck;
    uint32_t turned;  // the top bit as it will be
    uint32_t gave_up = 0;  // 1: waits no more, or every later barrier would take as long

    __device__ __forceinline__ Barrier(const Args& args)
        : word(args.barrier), stuck(args.stuck), turned(load_acquire(args.barrier) & TOP) {}

    __device__ __forceinline__ void arrive() {
        sync_workers();
        turned ^= TOP;
        const uint32_t step = block_index() == 0 ? TOP - (num_blocks() - 1) : 1;
        if (thread_index() == 0) add_release(word, step);
    }

    __device__ __forceinline__ void wait() {
        if (thread_index() == 0) {
            int polls = 0;
#pragma unroll 1
            while (!gave_up && (load_acquire(word) & TOP) != turned && ++polls < MAX_POLLS) {
            }
            if (polls == MAX_POLLS) *stuck = gave_up = 1;
        }
        sync_workers();
    }

    // At the end. What a block computed that had given up waiting may be wrong, in all rows: each
    // gets a NaN among the block's own logits, and fails by it. The word itself is right again,
    // since every block has arrived at every barrier.
    __device__ __forceinline__ void spoil(const Args& args) const {
        sync_workers();  // the logits are written
        if (!gave_up) return;
        const int column = block_index() * UNIT;
        for (int row = 0; row < args.rows; row++)
            *at(args.logits, static_cast<int64_t>(row) * args.vocab + column) = NAN_HALF;
    }

    static constexpr uint16_t NAN_HALF = 0x7fff;
    static constexpr uint32_t TOP = 0x80000000u;
    static constexpr int MAX_POLLS = 1 << 24;  // seconds: one never came, and the kernel must end
};

}  // namespace
