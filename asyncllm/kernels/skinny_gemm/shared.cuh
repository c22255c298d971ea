// A block's shared memory, and the order in which it computes.
#pragma once

#include "../include/windows.cuh"

namespace {

constexpr int WARPS = 8;       // that multiply
constexpr int PRODUCERS = 8;     // that copy: one asks for a row of a stage in some 80 cycles
constexpr int THREADS = WARPS * 32;  // that multiply
constexpr int FEATURES = 16;   // of a unit
constexpr int SLICE = 256;     // columns of a stage: shorter copies are slow (docs/log/gemm.md)
constexpr int ROW_BYTES = SLICE * 2;
constexpr int PAIR = 64;       // columns of two windows
constexpr int FEW_COLUMNS = 2048;  // slower at 4096, quicker at 1024 (docs/log/gemm.md)

// How the warps split a stage of so many tiles. Parts of a slice are added up in shared memory: of
// many rows they would leave no room for stages.
template <int ROWS, int TILES>
struct Tiling {
    static constexpr int PARTS_OF_SLICE = TILES == WARPS ? 1 : ROWS == 32 ? 2 : 4;
    static constexpr int COLUMNS = SLICE / PARTS_OF_SLICE;  // a warp's
    static constexpr int TEAMS = WARPS / PARTS_OF_SLICE;    // of warps, which split the tiles
    static constexpr int TILES_OF_WARP = TILES / TEAMS;
    static constexpr int OWN_TILES = TILES / 2;  // whose outputs are one block's, the first or the last
    static_assert(TILES_OF_WARP * TEAMS == TILES);
};

// The stage of a ring that comes next, and the parity of its barriers' phase.
template <int STAGES>
struct PipelineState {
    int index = 0;
    uint32_t phase = 0;

    __device__ __forceinline__ void next() {
        if (++index == STAGES) index = 0, phase ^= 1;
    }
};

struct Args {
    const uint16_t* x;          // bf16 [rows, size]
    const float* squares;       // [rows, num_squares], or null: the factor is applied already
    const uint16_t* weight;     // [features (twice if gated), size]
    const uint16_t* bias;       // or null
    const uint16_t* next_norm;  // [features], or null: nothing is added
    uint16_t* out;              // [rows, features]: the result, or the residual it is added to
    uint16_t* scaled;           // [rows, features]: the sum times next_norm
    float* next_squares;        // [rows, units]
    int rows, features, size, num_squares, gated;
    float eps;

    __device__ __forceinline__ int num_units() const { return (features + FEATURES - 1) / FEATURES; }
};

template <int ROWS, int TILES>
struct Stage {
    alignas(128) unsigned char weight[TILES][FEATURES * ROW_BYTES];
    alignas(128) unsigned char x[ROWS * ROW_BYTES];
};

template <int ROWS, int TILES>
struct Shared {
    static constexpr int STAGES = TILES == WARPS ? 2 : 4;
    Stage<ROWS, TILES> stages[STAGES];
    // Sums of the tiles whose outputs are this block's, as the tensor cores leave them: of either
    // block, each part of its slices. Two groups alternate: who hands over the next but one has seen
    // the next summed, and nobody hands that over before all of its block have read the one before it.
    uint4 sums[2][2][Tiling<ROWS, TILES>::PARTS_OF_SLICE][Tiling<ROWS, TILES>::OWN_TILES][ROWS / 8][32];
    float factors[ROWS];
    Barrier full[STAGES], empty[STAGES];
    Barrier is_summed[2], is_read;
};
static_assert(sizeof(Shared<16, 4>) <= 227 << 10 && sizeof(Shared<32, 4>) <= 227 << 10
              && sizeof(Shared<32, 8>) <= 227 << 10);

// A block's stages one after another: every other slice of a group's columns, then the next group. PARTS:
// 1, or 2 where gate and up are computed together.
template <int TILES, int PARTS>
struct Walk {
    static constexpr int GROUP = TILES / PARTS;  // units
    const Args& args;
    int unit, end, slice;  // the group's first, those of the cluster

    __device__ __forceinline__ explicit Walk(const Args& args)
        : args(args), unit(first_of(block_index() / 2)), end(first_of(block_index() / 2 + 1)),
          slice(cluster_rank()) {}

    __device__ __forceinline__ int first_of(int cluster) const {
        return args.num_units() * cluster / (num_blocks() / 2);
    }
    __device__ __forceinline__ bool has_stage() const { return unit < end; }
    __device__ __forceinline__ int num_tiles() const {
        return (end - unit < GROUP ? end - unit : GROUP) * PARTS;
    }
    // The last slice may have fewer, and none where a row is one slice: each block has one.
    __device__ __forceinline__ int num_columns() const {
        const int left = args.size - slice * SLICE;
        return left < 0 ? 0 : left < SLICE ? left : SLICE;
    }
    __device__ __forceinline__ void next() {
        slice += 2;
        if (slice * SLICE >= args.size) slice = cluster_rank(), unit += GROUP;
    }
};

}  // namespace
