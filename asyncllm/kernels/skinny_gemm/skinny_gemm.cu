// Matrix products of 2 to 32 rows, with what comes before and after them: see __init__.py.
//
// A cluster of two blocks computes some of the outputs, group by group, and each block has every other
// slice of the columns: x is read once for 64 or 128 rows of weights, what both add up stays between
// them. Half of a block's warps copy, as far ahead as there is shared memory, weights before the kernel
// before has ended. The others split a stage.
//
//   unit   16 outputs, the tensor cores' rows; if gated 16 gates and their 16 ups
//   tile   a unit's 16 rows of weights, or of one of its parts
//   group  as many units as a stage has tiles for
//   stage  SLICE columns of a group's weights, and of x
//
// Nobody waits for the ring while a group ends, or releases anything, which would wait for all copies
// in flight: sums travel by stores that the other block's barrier counts (docs/log/gemm.md).
#include "output.cuh"
#include "producer.cuh"

namespace {

template <int ROWS, int TILES>
using Sums = float[Tiling<ROWS, TILES>::TILES_OF_WARP][ROWS / 8][4];

// Multiplies two windows, from `first` on.
template <int ROWS, int TILES>
__device__ __forceinline__ void multiply_windows(Sums<ROWS, TILES>& sums, const Stage<ROWS, TILES>& stage,
                                                 int first, int num_tiles, const Lane& me) {
    using Own = Tiling<ROWS, TILES>;
    Windows x[ROWS / 8];
#pragma unroll
    for (int n = 0; n < ROWS / 8; n++)
        x[n] = load_windows<load_shared>(stage.x + (n * 8 + me.row) * ROW_BYTES, first, me);
#pragma unroll
    for (int t = 0; t < Own::TILES_OF_WARP; t++) {
        const int tile = t * Own::TEAMS + me.warp / Own::PARTS_OF_SLICE;
        if (tile >= num_tiles) break;
        const unsigned char* row = stage.weight[tile] + me.row * ROW_BYTES;
        const Windows upper = load_windows<load_shared>(row, first, me);
        const Windows lower = load_windows<load_shared>(row + 8 * ROW_BYTES, first, me);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint4 a = upper.get(i, me), b = lower.get(i, me);
#pragma unroll
            for (int n = 0; n < ROWS / 8; n++) {
                const uint4 v = x[n].get(i, me);
                multiply_add(sums[t][n], a.x, b.x, a.y, b.y, v.x, v.y);
                multiply_add(sums[t][n], a.z, b.z, a.w, b.w, v.z, v.w);
            }
        }
    }
}

// A warp's part of a stage.
template <int ROWS, int TILES>
__device__ __forceinline__ void multiply(Sums<ROWS, TILES>& sums, const Stage<ROWS, TILES>& stage,
                                         int num_columns, int num_tiles, const Lane& me) {
    using Own = Tiling<ROWS, TILES>;
    const int first = me.warp % Own::PARTS_OF_SLICE * Own::COLUMNS;
#pragma unroll
    for (int column = first; column < first + Own::COLUMNS; column += PAIR)
        if (column < num_columns)
            multiply_windows<ROWS, TILES>(sums, stage, column / (PAIR / 2), num_tiles, me);
}

// To the block whose outputs they are.
template <int ROWS, int TILES>
__device__ __forceinline__ void hand_over(const Sums<ROWS, TILES>& sums, Shared<ROWS, TILES>& shared,
                                          int buffer, int num_tiles, const Lane& me) {
    using Own = Tiling<ROWS, TILES>;
    const int columns = me.warp % Own::PARTS_OF_SLICE, rank = cluster_rank();
#pragma unroll
    for (int t = 0; t < Own::TILES_OF_WARP; t++) {
        const int tile = t * Own::TEAMS + me.warp / Own::PARTS_OF_SLICE;
        if (tile >= num_tiles) break;
#pragma unroll
        for (int n = 0; n < ROWS / 8; n++)
            store_remote(shared.sums[buffer][rank][columns][tile % Own::OWN_TILES][n][me.lane], sums[t][n],
                 shared.is_summed[buffer], tile / Own::OWN_TILES);
    }
}

// The factors of the norm before, by the sums of squares that its product left.
template <int ROWS, int TILES>
__device__ __forceinline__ void find_factors(const Args& args, Shared<ROWS, TILES>& shared,
                                             const Lane& me) {
    for (int row = me.warp; row < args.rows; row += WARPS) {
        float sum = 0;
        for (int i = me.lane; i < args.num_squares; i += 32)
            sum += args.squares[row * args.num_squares + i];
        for (int step = 16; step > 0; step /= 2) sum = add_across(sum, step);
        if (me.lane == 0) shared.factors[row] = inverse_root(sum / args.size + args.eps);
    }
    sync_first(THREADS);
}

template <int ROWS, int TILES, int PARTS, bool ADD>
__device__ __forceinline__ void work(const Args& args, Shared<ROWS, TILES>& shared) {
    using Own = Tiling<ROWS, TILES>;
    using Outputs = Output<ROWS, TILES, PARTS, ADD>;
    const int thread = thread_index(), lane = thread % 32;
    const Lane me = {thread / 32, lane, lane / 4, lane % 4};
    Walk<TILES, PARTS> walk(args);
    wait_kernel_before();
    cluster_wait();  // its barriers are initialised
    if (args.squares != nullptr) find_factors(args, shared, me);
    PipelineState<Shared<ROWS, TILES>::STAGES> state;
    PipelineState<1> read;
    for (PipelineState<2> buffer; walk.has_stage(); buffer.next()) {
        const int unit = walk.unit, num_tiles = walk.num_tiles();
        const int num_own = part_of(num_tiles, cluster_rank() * Own::OWN_TILES, Own::OWN_TILES);
        Barrier& is_summed = shared.is_summed[buffer.index];
        if (thread == 0 && num_own > 0)
            arrive_and_expect_tx(is_summed, num_own * 2 * Own::PARTS_OF_SLICE * FEATURES * ROWS * 4);
        Sums<ROWS, TILES> sums = {};
        for (; walk.unit == unit; walk.next(), state.next()) {
            wait_barrier(shared.full[state.index], state.phase);
            multiply<ROWS, TILES>(sums, shared.stages[state.index], walk.num_columns(), num_tiles, me);
            sync_warp();
            if (lane == 0) arrive(shared.empty[state.index]);
        }
        const auto output = [&](int i) { return Outputs(args, unit, num_tiles / PARTS, i); };
        const Outputs first = output(0), second = output(Outputs::NUM - 1);
        wait_barrier(shared.is_read, read.phase ^ 1);
        hand_over<ROWS, TILES>(sums, shared, buffer.index, num_tiles, me);
        if (num_own == 0) break;  // of the last group
        wait_barrier(is_summed, buffer.phase);
        first.store(args, shared, buffer.index);
        if constexpr (Outputs::NUM == 2) second.store(args, shared, buffer.index);
        sync_warp();
        if (lane == 0) arrive(shared.is_read);
        read.next();
    }
}

template <int ROWS, int TILES, int PARTS, bool ADD>
__global__ void __launch_bounds__(THREADS + PRODUCERS * 32, 1) skinny_gemm(const __grid_constant__ Args args) {
    using Own = Shared<ROWS, TILES>;
    auto& shared = *reinterpret_cast<Own*>(shared_memory());
    if (thread_index() == 0) {
        for (int i = 0; i < Own::STAGES; i++)
            init_barrier<PRODUCERS>(shared.full[i]), init_barrier<WARPS>(shared.empty[i]);
        for (Barrier& barrier : shared.is_summed) init_barrier(barrier);
        init_barrier<WARPS>(shared.is_read);
        fence_barrier_init();
    }
    start_kernel_after();
    cluster_arrive();
    sync_block();
    if (thread_index() < THREADS)
        work<ROWS, TILES, PARTS, ADD>(args, shared);
    else
        Producer<ROWS, TILES, PARTS>(args, shared).copy();
    cluster_arrive();
    cluster_wait();  // nobody sends to a block that has ended
}

template <int ROWS, int TILES, int PARTS, bool ADD>
int launch_tiled(const Args& args, int num_clusters, void* stream) {
    return launch_kernel(skinny_gemm<ROWS, TILES, PARTS, ADD>, args, 2 * num_clusters,
                         THREADS + PRODUCERS * 32, static_cast<int>(sizeof(Shared<ROWS, TILES>)), stream, Order::EARLY, 2);
}

// Where columns are few, as many tiles to a stage as a cluster has, and one group: between groups warps
// have nothing to multiply.
template <int ROWS, int PARTS, bool ADD>
int launch(const Args& args, int num_blocks, void* stream) {
    const int num_units = (args.features + FEATURES - 1) / FEATURES;
    const int num_clusters = num_blocks / 2 < num_units ? num_blocks / 2 : num_units;
    const int num_tiles = (num_units * PARTS + num_clusters - 1) / num_clusters;  // of a cluster
    if constexpr (ROWS >= 16)
        if (num_tiles > 4 && num_tiles <= 8 && args.size <= FEW_COLUMNS)
            return launch_tiled<ROWS, 8, PARTS, ADD>(args, num_clusters, stream);
    return launch_tiled<ROWS, 4, PARTS, ADD>(args, num_clusters, stream);
}

template <int ROWS>
int launch_for(const Args& args, int num_blocks, void* stream) {
    if (args.next_norm != nullptr) return launch<ROWS, 1, true>(args, num_blocks, stream);
    if (args.gated) return launch<ROWS, 2, false>(args, num_blocks, stream);
    return launch<ROWS, 1, false>(args, num_blocks, stream);
}

}  // namespace

EXPORT_LAYOUT(Args, FIELD(x), FIELD(squares), FIELD(weight), FIELD(bias), FIELD(next_norm), FIELD(out),
    FIELD(scaled), FIELD(next_squares), FIELD(rows), FIELD(features), FIELD(size), FIELD(num_squares),
    FIELD(gated), FIELD(eps))

// Returns a cudaError_t. `untyped`: Args. num_blocks: that are on the device at once. size: a multiple
// of 64; features: of 4; pointers aligned to 16 bytes.
extern "C" int asyncllm_skinny_gemm(const void* untyped, int num_blocks, void* stream) {
    const auto& args = *static_cast<const Args*>(untyped);
    if (args.rows <= 8) return launch_for<8>(args, num_blocks, stream);
    if (args.rows <= 16) return launch_for<16>(args, num_blocks, stream);
    return launch_for<32>(args, num_blocks, stream);
}
