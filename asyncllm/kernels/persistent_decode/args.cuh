// The arguments of the kernel, field by field as __init__.py has it, and the sizes
// that all parts of the kernel split.
#pragma once

#include "../include/device.cuh"

#ifndef HEAD_DIM
#error "give HEAD_DIM (64 or 128), GROUP_SIZE (1 to 8 query heads of a KV head) and BLOCK_SIZE"
#endif
#ifndef WEIGHTS  // of the layers, a `Format`; then also COLUMNS, of a slice of them: 256 or 512
#define WEIGHTS PLAIN
#define COLUMNS 256
#endif
#ifndef RANKS  // that have the layers' weights between them, each on its own GPU
#define RANKS 1
#endif

namespace {

// How weights are stored; those of the head are always PLAIN.
//
//   PLAIN      bfloat16
//   FP8, INT8  a byte each (e4m3, signed), and a scale for each output
//   INT4       codes of four bits (8 is zero) in tiles of 8 outputs and a group of 128 columns
//              (quant_gemm/words.py), and for each output and group a scale
//   INT4_OFFSETS   the same, and an offset, too
enum Format { PLAIN, FP8, INT8, INT4, INT4_OFFSETS };
constexpr bool HAS_OFFSETS = WEIGHTS == INT4_OFFSETS;
constexpr Format LAYERS = HAS_OFFSETS ? INT4 : WEIGHTS;
template <Format FORMAT>
constexpr int SLICE = FORMAT == PLAIN ? 256 : COLUMNS;  // columns of a slice

constexpr int WARPS = 8;            // that work; as many more are their producers
constexpr int THREADS = WARPS * 32;  // that work
constexpr int MAX_ROWS = 8;
constexpr int MAX_RANKS = 8;
constexpr int UNIT = 8;             // outputs of a unit
constexpr int MAX_SETS = 2;         // of warps that have units of their own
constexpr int GROUP_STAGES = 4;     // of one slice
constexpr int ROW_BYTES = 512;      // from one row of a stage to the next
constexpr int STAGE_BYTES = UNIT * ROW_BYTES;
// Of INT4 a stage has two units, half of it each, and behind them their scales, by output and group,
// then their offsets.
constexpr int HALF_STAGE = STAGE_BYTES / 2, GROUP = 128, TILE_BYTES = UNIT * GROUP / 2;
constexpr int GROUPS = COLUMNS / GROUP, UNIT_SCALES = UNIT * 512 / GROUP * 2;
constexpr int SCALE_BYTES = LAYERS == INT4 ? (HAS_OFFSETS ? 4 : 2) * UNIT_SCALES : 0;
// Stages of a warp that are asked for or not yet used: what the activations leave room for.
constexpr int DEPTH = LAYERS == INT4 || COLUMNS > 256 ? 4 : 5;
// So many of these in flight. What the workers ask for has to queue behind what is on its way, so it is
// EARLY for a product's first DEPTH stages, which are asked for while the workers may wait for its x,
// and LATE for the others, and for keys and values behind them.
constexpr int EARLY = 1, LATE = 4;
static_assert(0 < EARLY && EARLY <= LATE && LATE <= DEPTH);
static_assert(DEPTH > 2);  // a warp uses two at a time, and gives back what is not all of them
// Registers of a thread; 128 on average is all there are.
constexpr int PRODUCER_REGISTERS = 56;
constexpr int CONSUMER_REGISTERS = 256 - PRODUCER_REGISTERS;
constexpr int MAX_SPLITS = 32;      // splits of one sequence's attention
constexpr int TOKENS = 8;           // of a stage
constexpr int LEAST_STAGES = 40;    // of a split, where there are several: to merge takes longer
constexpr int TILE = WARPS * TOKENS;  // tokens that a block takes at a time
static_assert(BLOCK_SIZE % TOKENS == 0);  // a stage is of one page
constexpr int PAIRS = GROUP_SIZE * HEAD_DIM / 2;  // of neighbouring entries of a KV head's results
constexpr int HALF = HEAD_DIM / 2;
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float NO_SCORE = -1e30f;  // below any score, and finite: no difference of two is NaN

enum Kind { QKV, OUTPUT, GATE_UP, DOWN, HEAD };  // four products of a layer, and the last

struct Layer {
    const void* weights[4];  // by kind: [features, size]
    const void* scales[4];   // float [features], or [features, groups] of INT4; or null
    const void* biases[4];   // [features], or null
    const void* norms[4];    // [hidden], of x, or null
    const void *q_norm, *k_norm;  // [HEAD_DIM], or null
    void* cache;  // [pages, 2, block_size, kv_heads, HEAD_DIM]
};

struct Args {
    const Layer* layers;          // [num_layers]
    const void* final_norm;       // [hidden]
    const void* head;             // [vocab, hidden]
    const void* const* offsets;   // [num_layers, 4] as scales, or null
    const void* embeddings;       // [rows, hidden]
    void* logits;                 // [rows, vocab]
    void* exchange;               // [2, num_layers, layer_bytes]: exchange.cuh
    uint32_t* phase;              // one word, zero at first
    uint32_t* stuck;              // set where a block waited in vain
    const int32_t* block_tables;  // [rows, table_stride]
    const int32_t* positions;     // [rows], of the new tokens
    const int32_t* rotary_rows;   // [rows], each token's row of cos_sin
    const float* cos_sin;         // [.., HEAD_DIM], cosines then sines
    int64_t table_stride, page_stride, kv_stride;  // elements
    int64_t layer_bytes;          // of the exchange
    int32_t num_layers, rows, hidden, heads, kv_heads, intermediate, vocab;
    float eps, head_eps, scale;   // of the norms; of the heads' norms; of q times k
    int32_t rank;                 // this and what follows: of several ranks
    void* peers[MAX_RANKS];       // by rank, what ranks send to it: ranks.cuh
    void* received;               // this rank's own
    const void* closed;           // a word of the host's, set where another rank is gone
};

__device__ __forceinline__ void sync_workers() { sync_first(THREADS); }

}  // namespace
