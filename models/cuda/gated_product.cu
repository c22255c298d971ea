// silu(gate) * up, where gate and up are products of the same x: see gated_product.py.
//
// A block computes tiles of 128 rows and 112 features: the weights' tile is 112 rows of gate above 112
// of up, so that a thread ends with both of the same output and writes their SwiGLU; the products
// themselves never leave the block. One thread copies, as far ahead as there is shared memory, weights
// before the kernel before has ended; two groups of four warps have 64 rows each and multiply. The
// tiles of a pair of blocks are below each other, an odd last row's side by side, and each block copies
// half of what both need: what comes from the second cache costs time and, where the card is at its
// power limit, clock.
#include "gated/tensor_tiles.cuh"
#include "turn.cuh"

namespace {

constexpr int STAGES = 5;
constexpr int GROUPS = 2;
constexpr int ROWS = GROUPS * GROUP_ROWS;
constexpr int NUM_THREADS = (1 + GROUPS) * 128;
constexpr int REGISTERS = 232, COPY_REGISTERS = 40;
constexpr int ALIGNMENT = 1024;  // of a tile

struct Request {  // gated_product.py: Args
    const void* x;       // bf16 [rows, size]
    const void* weight;  // bf16 [2 * features, size]
    void* out;           // bf16 [rows, features]
    int rows, features, size;
};

struct Args {
    Matrix x, weight;
    uint16_t* out;
    int rows, features, num_slices;
    int row_tiles, num_pairs;  // tiles below each other, pairs of tiles in all
};

struct Stage {
    alignas(ALIGNMENT) unsigned char x[ROWS * ROW_BYTES];
    alignas(ALIGNMENT) unsigned char weight[WEIGHT_ROWS * ROW_BYTES];
};

struct Shared {
    Stage stages[STAGES];
    Signal full[STAGES], empty[STAGES];
};

__device__ __forceinline__ Shared& shared_data() {
    unsigned char* memory = shared_memory();
    const auto beyond = reinterpret_cast<uintptr_t>(memory) % ALIGNMENT;
    return *reinterpret_cast<Shared*>(memory + (beyond ? ALIGNMENT - beyond : 0));
}

// A block's, by the number of its pair's.
struct Tile {
    int row, feature;
    bool is_below;  // or above, the other one of the pair; else they have the same rows
};

__device__ __forceinline__ Tile tile_of(const Args& args, int number) {
    const int height = args.row_tiles / 2;  // in pairs, of a column of tiles; two have `row_tiles`
    const int column = number / args.row_tiles * 2, place = number % args.row_tiles;
    const int rank = rank_in_pair();
    if (place < 2 * height)
        return {(place % height * 2 + rank) * ROWS, (column + place / height) * FEATURES, true};
    return {(args.row_tiles - 1) * ROWS, (column + rank) * FEATURES, false};
}

__device__ __forceinline__ void copy_x(const Args& args, Stage& stage, Signal& full, int slice,
                                       const Tile& tile) {
    const int column = slice * TILE_COLUMNS, half = rank_in_pair() * GROUP_ROWS;
    if (!tile.is_below) {
        copy_box_to_both(stage.x + half * ROW_BYTES, args.x, column, tile.row + half, full);
        return;
    }
    for (int row = 0; row < ROWS; row += GROUP_ROWS)
        copy_box(stage.x + row * ROW_BYTES, args.x, column, tile.row + row, full);
}
__device__ __forceinline__ void copy_weight(const Args& args, Stage& stage, Signal& full, int slice,
                                            const Tile& tile) {
    const int column = slice * TILE_COLUMNS, up = args.features + tile.feature;
    unsigned char* up_rows = stage.weight + FEATURES * ROW_BYTES;
    if (!tile.is_below) {
        copy_box(stage.weight, args.weight, column, tile.feature, full);
        copy_box(up_rows, args.weight, column, up, full);
    } else if (rank_in_pair() == 0) {
        copy_box_to_both(stage.weight, args.weight, column, tile.feature, full);
    } else {
        copy_box_to_both(up_rows, args.weight, column, up, full);
    }
}

// By one thread: all that the block multiplies, and half of what its neighbour does.
__device__ __forceinline__ void copy(const Args& args, Shared& shared) {
    const int first = block_index() / 2, step = num_blocks() / 2;
    Tile tile = tile_of(args, first);
    const int early = args.num_slices < STAGES ? args.num_slices : STAGES;
    for (int i = 0; i < early; i++) {
        expect_bytes(shared.full[i], sizeof(Stage));
        copy_weight(args, shared.stages[i], shared.full[i], i, tile);
    }
    wait_kernel_before();
    Turn<STAGES> turn;
    for (int i = 0; i < early; i++, turn.next())
        copy_x(args, shared.stages[i], shared.full[i], i, tile);
    for (int pair = first, slice = early; pair < args.num_pairs; pair += step, slice = 0) {
        tile = tile_of(args, pair);
        for (; slice < args.num_slices; slice++, turn.next()) {
            Stage& stage = shared.stages[turn.place];
            Signal& full = shared.full[turn.place];
            wait_signal(shared.empty[turn.place], turn.parity ^ 1);
            expect_bytes(full, sizeof(Stage));
            copy_x(args, stage, full, slice, tile);
            copy_weight(args, stage, full, slice, tile);
        }
    }
}

// Of gate and up, as bf16 has them.
__device__ __forceinline__ float swiglu(uint32_t gate, uint32_t up) {
    const float x = bits_to_float(gate), y = bits_to_float(up);
    return divide(x, 1 + power_of_2(-1.4426950408889634f * x)) * y;
}
__device__ __forceinline__ uint32_t swiglu_pair(const float* gate, const float* up) {
    const uint32_t x = to_pair(gate[0], gate[1]), y = to_pair(up[0], up[1]);
    return to_pair(swiglu(x << 16, y << 16), swiglu(x & 0xffff0000u, y & 0xffff0000u));
}

struct alignas(8) Pairs {
    uint32_t left, right;
};

// What a warp has of 16 rows. Of each two times 8 columns, two lanes with neighbouring pairs exchange
// one each, to write 8 bytes.
__device__ __forceinline__ void store(const Args& args, const float (&sums)[FEATURES], int first_row,
                                      int first_feature) {
    const int lane = thread_index() % 32, odd = lane & 1;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = first_row + lane / 4 + 8 * half;
        uint16_t* line = at(args.out, static_cast<int64_t>(row) * args.features);
#pragma unroll
        for (int i = 0; i < FEATURES / 8; i += 2) {
            const float* gate = sums + 4 * i + 2 * half;
            const float* up = gate + FEATURES / 2;
            const uint32_t first = swiglu_pair(gate, up), second = swiglu_pair(gate + 4, up + 4);
            const uint32_t got = from_lane(odd ? first : second, lane ^ 1);
            const int feature = first_feature + 8 * (i + odd) + 2 * (lane % 4 - odd);
            if (row < args.rows && feature < args.features)
                *reinterpret_cast<Pairs*>(line + feature)
                    = {odd ? got : first, odd ? second : got};
        }
    }
}

// A group's rows of all the block's tiles.
__device__ __forceinline__ void multiply(const Args& args, Shared& shared, int group) {
    const int thread = thread_index() % 128, rank = thread / 32;
    const bool tells = thread % 32 == 0 && rank < 2;  // both blocks, for both copy to this one
    Turn<STAGES> turn;
    for (int pair = block_index() / 2; pair < args.num_pairs; pair += num_blocks() / 2) {
        float sums[FEATURES];
#pragma unroll
        for (int i = 0; i < FEATURES; i++) sums[i] = 0;
        int before = 0;
        for (int slice = 0; slice < args.num_slices; slice++, turn.next()) {
            wait_signal(shared.full[turn.place], turn.parity);
            Stage& stage = shared.stages[turn.place];
            multiply_tiles(sums, stage.x + group * GROUP_ROWS * ROW_BYTES, stage.weight);
            wait_products<1>();
            if (slice > 0 && tells) arrive_at(shared.empty[before], rank);
            before = turn.place;
        }
        wait_all_products(sums);
        if (tells) arrive_at(shared.empty[before], rank);
        const Tile tile = tile_of(args, pair);
        store(args, sums, tile.row + group * GROUP_ROWS + thread / 32 * 16, tile.feature);
    }
}

__global__ void __launch_bounds__(NUM_THREADS, 1) gated_product(const __grid_constant__ Args args) {
    Shared& shared = shared_data();
    if (thread_index() == 0) {
        for (int i = 0; i < STAGES; i++) {
            open_signal(shared.full[i]);
            open_signal<2 * GROUPS>(shared.empty[i]);
        }
        show_signals();
    }
    start_kernel_after();
    sync_pair();
    const int group = thread_index() / 128 - 1;
    if (group < 0) {
        give_registers<COPY_REGISTERS>();
        if (thread_index() == 0) copy(args, shared);
    } else {
        take_registers<REGISTERS>();
        multiply(args, shared, group);
    }
    sync_pair();  // nobody copies to a block that has ended, or tells it of anything
}

int tiles_of(int size, int tile) { return (size + tile - 1) / tile; }

}  // namespace

// Returns a cudaError_t; -1 where the driver knows no such copies. num_blocks: that are on the device
// at once.
extern "C" int asyncllm_gated_product(const void* untyped, int num_blocks, void* stream) {
    const auto& request = *static_cast<const Request*>(untyped);
    Args args;
    if (!describe(args.x, request.x, request.rows, request.size, GROUP_ROWS)
        || !describe(args.weight, request.weight, 2 * static_cast<uint64_t>(request.features),
                     request.size, FEATURES))
        return -1;
    args.out = static_cast<uint16_t*>(request.out);
    args.rows = request.rows;
    args.features = request.features;
    args.num_slices = request.size / TILE_COLUMNS;
    args.row_tiles = tiles_of(request.rows, ROWS);
    args.num_pairs = tiles_of(request.features, 2 * FEATURES) * args.row_tiles;
    const int num_pairs = num_blocks / 2 < args.num_pairs ? num_blocks / 2 : args.num_pairs;
    return launch_after(gated_product, args, 2 * num_pairs, NUM_THREADS,
                        static_cast<int>(sizeof(Shared) + ALIGNMENT), stream, true, 2);
}
