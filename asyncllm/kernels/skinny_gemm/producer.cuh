// Copies of what a block reads from memory.
#pragma once

#include "shared.cuh"

namespace {

// How many of `num` one part has: from `first` on, at most `most`.
__device__ __forceinline__ int part_of(int num, int first, int most) {
    return num <= first ? 0 : num - first < most ? num - first : most;
}

// A warp that copies some rows of each stage, weights by its first lanes and x by the next.
template <int ROWS, int TILES, int PARTS>
struct Producer {
    using OwnWalk = Walk<TILES, PARTS>;
    static constexpr int STAGES = Shared<ROWS, TILES>::STAGES;
    static constexpr int WEIGHT_ROWS = TILES * FEATURES / PRODUCERS, X_ROWS = ROWS / PRODUCERS;
    static_assert(WEIGHT_ROWS + X_ROWS <= 32 && FEATURES % WEIGHT_ROWS == 0 && ROWS % PRODUCERS == 0);
    const Args& args;
    Shared<ROWS, TILES>& shared;
    const int producer, lane;
    const int tile, first;  // the warp's, and its first row there

    __device__ __forceinline__ Producer(const Args& args, Shared<ROWS, TILES>& shared)
        : args(args), shared(shared), producer(thread_index() / 32 - WARPS), lane(thread_index() % 32),
          tile(producer * WEIGHT_ROWS / FEATURES), first(producer * WEIGHT_ROWS % FEATURES) {}

    // Expects the warp's x as well.
    __device__ __forceinline__ void copy_weight(const OwnWalk& walk, int place) {
        const int feature = (walk.unit + tile / PARTS) * FEATURES + first;
        const int num = tile < walk.num_tiles() ? part_of(args.features, feature, WEIGHT_ROWS) : 0;
        const int num_of_x = part_of(args.rows, producer * X_ROWS, X_ROWS);
        const int bytes = walk.num_columns() * 2;
        Barrier& full = shared.full[place];
        if (lane == 0) arrive_and_expect_tx(full, (num + num_of_x) * bytes);
        sync_warp();
        if (lane >= num || bytes == 0) return;
        const int64_t row = static_cast<int64_t>(tile % PARTS) * args.features + feature + lane;
        copy_bulk(shared.stages[place].weight[tile] + (first + lane) * ROW_BYTES,
                  args.weight + row * args.size + walk.slice * SLICE, bytes, full);
    }

    __device__ __forceinline__ void copy_x(const OwnWalk& walk, int place) {
        const int index = lane - WEIGHT_ROWS, row = producer * X_ROWS + index;
        const int bytes = walk.num_columns() * 2;
        if (index < 0 || index >= X_ROWS || row >= args.rows || bytes == 0) return;
        copy_bulk(shared.stages[place].x + row * ROW_BYTES,
                  args.x + static_cast<int64_t>(row) * args.size + walk.slice * SLICE, bytes,
                  shared.full[place]);
    }

    __device__ __forceinline__ void copy() {
        OwnWalk walk(args);
        int num_early = 0;
        for (OwnWalk ahead = walk; num_early < STAGES && ahead.has_stage(); ahead.next())
            copy_weight(ahead, num_early++);
        wait_kernel_before();
        for (PipelineState<STAGES> state; walk.has_stage(); walk.next(), state.next(), num_early--) {
            if (num_early <= 0) {
                wait_barrier(shared.empty[state.index], state.phase ^ 1);
                copy_weight(walk, state.index);
            }
            copy_x(walk, state.index);
        }
        cluster_wait();
    }
};

}  // namespace
