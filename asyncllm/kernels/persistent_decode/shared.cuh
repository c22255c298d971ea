// A block's shared memory: most of it is the warps' rings of weights.
#pragma once

#include "../include/windows.cuh"
#include "args.cuh"

namespace {

// A product's sizes, and where in a layer's exchange its x, its outputs and what is added to them are.
struct alignas(16) Shape {
    int size, features, num_slices;
    int gated;     // 1: a unit has two stages, 0: one
    int num_own;   // units of this block: block_index(), then every num_blocks()th
    int split;     // warps that have the slices of one unit: a set
    int num_sets;  // which alternate at the block's units
    float inverse_size;
    int x, out, addend;  // bytes; INPUT: the layer's own, NONE: nothing, or the logits
};
constexpr int INPUT = -1, NONE = -2;

// A warp's part of a product. Known before the step: to divide takes long.
struct alignas(16) Work {
    int set, num_units;            // of the set
    int first_slice, num_slices;   // every `split`th
};

__device__ __forceinline__ Work work_of(const Shape& shape, int warp) {
    const int set = warp / shape.split, first = warp % shape.split;
    Work work = {set, 0, first, (shape.num_slices - first + shape.split - 1) / shape.split};
    if (set < shape.num_sets)
        work.num_units = (shape.num_own - set + shape.num_sets - 1) / shape.num_sets;
    return work;
}

// Bytes from the beginning of a layer's exchange, where its output is.
struct Places {
    int middle, gated, qkv, attended, splits;

    __device__ __forceinline__ Places(const Args& args)
        : middle(MAX_ROWS * args.hidden * 2), gated(2 * middle),
          qkv(gated + MAX_ROWS * args.intermediate * 2),
          attended(qkv + MAX_ROWS * (args.heads + 2 * args.kv_heads) * HEAD_DIM * 2),
          splits(attended + MAX_ROWS * args.heads * HEAD_DIM * 2) {}
};

__device__ __forceinline__ Shape shape_of(const Args& args, int kind) {
    const int q_size = args.heads * HEAD_DIM, kv_size = args.kv_heads * HEAD_DIM;
    const Places places(args);
    Shape shape = {args.hidden, args.hidden, 0, kind == GATE_UP, 0, WARPS, 0, 0, INPUT, 0, NONE};
    if (kind == QKV) shape.features = q_size + 2 * kv_size, shape.out = places.qkv;
    if (kind == OUTPUT)
        shape.size = q_size, shape.x = places.attended, shape.out = places.middle,
        shape.addend = INPUT;
    if (kind == GATE_UP)
        shape.features = args.intermediate, shape.x = places.middle, shape.out = places.gated;
    if (kind == DOWN)
        shape.size = args.intermediate, shape.x = places.gated, shape.addend = places.middle;
    if (kind == HEAD) shape.features = args.vocab, shape.out = NONE;
    shape.num_own = (shape.features / UNIT - block_index() + num_blocks() - 1) / num_blocks();
    shape.inverse_size = 1.0f / shape.size;
    shape.num_slices = shape.size / (kind == HEAD ? SLICE<PLAIN> : SLICE<LAYERS>);
    while (shape.split > shape.num_slices) shape.split /= 2;
    shape.num_sets = WARPS / shape.split < MAX_SETS ? WARPS / shape.split : MAX_SETS;
    return shape;
}

// A warp's stages, each eight rows. A bulk copy to a place that is not one of 128 bytes takes a sixth
// longer (docs/log/decode.md), so all rows begin in one bank: see `Windows`.
struct Stages {
    alignas(128) unsigned char bytes[DEPTH * (STAGE_BYTES + SCALE_BYTES)];

    __device__ __forceinline__ unsigned char* row(int stage, int row) {
        return bytes + (stage * UNIT + row) * ROW_BYTES + stage * SCALE_BYTES;
    }
    // Of INT4: an output's scale of a group (part 0, 1: of which unit), or offset (2, 3).
    __device__ __forceinline__ unsigned char* scale(int stage, int part, int row, int group) {
        return this->row(stage, UNIT) + part * UNIT_SCALES + (row * GROUPS + group) * 2;
    }
};

// A warp's slice of x. Warps read two neighbouring rows at once, which begin in different banks.
struct Inputs {
    static constexpr int SIZE = SLICE<LAYERS>;
    alignas(16) unsigned char bytes[MAX_ROWS * SIZE * 2 + 64];

    __device__ __forceinline__ unsigned char* row(int row) {
        return bytes + row % 2 * (MAX_ROWS * SIZE + 64) + row / 2 * SIZE * 2;
    }
};

constexpr int SUMS = GROUP_STAGES * MAX_ROWS * UNIT;  // of a group: [stage][row][output]

// A split of one sequence's attention: which tokens of which row and KV head. Made by split.cuh.
struct Split {
    int work;  // its number among those of all blocks
    int row, kv_head, number, position;
    int start, end;  // tokens
    int num_active;  // splits of this row and KV head, a power of 2; 0: this is none of them
    int first_pair, end_pair;  // of the entries, those whose splits this one's block merges
};
constexpr int MAX_BLOCK_SPLITS = 8;  // of a block; as __init__.py has it

struct Shared {
    Stages ring[WARPS];
    Barrier full[WARPS][DEPTH], empty[WARPS][DEPTH];
    union {
        struct {
            Inputs x[WARPS];
            float sums[2][WARPS][SUMS];  // two groups alternate
            float squares[WARPS][MAX_ROWS];
        } product;
        struct {
            alignas(16) uint16_t q[GROUP_SIZE][HEAD_DIM];
            uint16_t new_token[2 * HEAD_DIM];  // its key, then its value
            float best[WARPS][GROUP_SIZE], total[WARPS][GROUP_SIZE];
            float sums[WARPS][GROUP_SIZE][HEAD_DIM];
        } attention;
    };
    uint32_t set, is_stuck;  // set: of the exchange, this step's
    int splits;              // bytes: where in a layer's exchange the splits' results are
    uint32_t was_stuck;      // whether a block of an earlier step waited in vain (several ranks)
    Shape shapes[HEAD + 1];  // of the products, by kind
    Work works[HEAD + 1][WARPS];
    Split own_splits[MAX_BLOCK_SPLITS];
    Layer layers[1];         // [num_layers + 1]: the last one has the head's weights alone
};
constexpr int MAX_LAYERS = HAS_OFFSETS ? 56 : 80;
static_assert(sizeof(Shared) + MAX_LAYERS * sizeof(Layer) <= 227 << 10);

}  // namespace
