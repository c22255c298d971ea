// A matrix product by all blocks, with what comes before and after it: the norm's weights and
// factor, SiLU, the addition to the residual.
#pragma once

#include "output.cuh"
#include "ring.cuh"

namespace {

// The sums over lanes: with each step a lane gives away half of its rows, until it has one.
template <int ROWS>
__device__ __forceinline__ void store_squares(float (&squares)[ROWS], Shared& shared,
                                              const Lane& me) {
    constexpr int LANES = 32 / ROWS;  // of a row in the end
#pragma unroll
    for (int num = ROWS / 2; num > 0; num /= 2) {
        const int step = num * LANES;
        const bool is_upper = (me.lane & step) != 0;
#pragma unroll
        for (int r = 0; r < num; r++) {
            const float other = across(is_upper ? squares[r] : squares[r + num], step);
            squares[r] = (is_upper ? squares[r + num] : squares[r]) + other;
        }
    }
    for (int step = LANES / 2; step > 0; step /= 2) squares[0] = add_across(squares[0], step);
    if (me.lane % LANES == 0) shared.product.squares[me.warp][me.lane / LANES] = squares[0];
}

using Sums = float[GROUP_STAGES / 2][CHAINS][4];

// A warp's slices of x times its stages of a group, which may be the product's first or last. `piece`:
// of x, on its way from one group to the next.
template <int ROWS, Format FORMAT>
__device__ __forceinline__ void multiply_group(const Args& args, const Operands& operands,
                                               const Shape& shape, const Work& work, int num_stages,
                                               bool is_first, bool is_last,
                                               Piece<ROWS, FORMAT>& piece, Sums& sums,
                                               Shared& shared, Ring& ring, Patience& patience,
                                               const Lane& me) {
    // Registers hold a slice of x while it is used, and the next one on its way, if they are few.
    constexpr bool IS_AHEAD = LAYERS == PLAIN || ROWS == 1;
    // A warp's only slice stays in shared memory for the whole product.
    const bool comes_again = FORMAT == PLAIN || work.num_slices > 1;
    const int num_rows = ROWS == 1 ? 1 : args.rows;
    Inputs& rows = shared.product.x[me.warp];
    Stages& stages = shared.ring[me.warp];
    float squares[ROWS] = {};
    int slice = work.first_slice;
    if (IS_AHEAD && is_first) piece.load(operands, shape.size, num_rows, slice, me);
#pragma unroll 1
    for (int left = work.num_slices; left > 0; left--) {
        if (is_first || comes_again) {
            if (!IS_AHEAD) piece = {}, piece.load(operands, shape.size, num_rows, slice, me);
            while (patience.wait(args, shared, piece.is_there(num_rows)))
                piece.load_missing(operands, shape.size, num_rows, slice, me);
            piece.store(operands.norm != nullptr, num_rows, squares, rows, me);
            // The next is on its way while this one is used.
            slice = left > 1 ? slice + shape.split : work.first_slice;
            if (IS_AHEAD && comes_again && (left > 1 || !is_last))
                piece.load(operands, shape.size, num_rows, slice, me);
            sync_warp();
        }
        // Rows beyond the batch are what they are: so are their outputs.
        [[maybe_unused]] uint4 x[FORMAT == PLAIN ? SLICE<PLAIN> / 32 : 1];
        if constexpr (FORMAT == PLAIN)
#pragma unroll
            for (int window = 0; window < SLICE<PLAIN> / 32; window++)
                x[window] = load_shared_here(window_of(rows.row(me.row), window, me));
        if (is_first && left == 1 && operands.norm != nullptr) store_squares(squares, shared, me);
        if constexpr (FORMAT == INT4) {
            const int first = ring.next(shared, me);
            const int second = num_stages > 2 ? ring.next(shared, me) : first;
            multiply_groups(sums[0][0], sums[1][0], rows.row(me.row), stages, first, second, me);
            ring.give_back(shared, first, second, me);
            continue;
        }
#pragma unroll
        for (int pair = 0; pair < GROUP_STAGES / 2; pair++) {
            if (2 * pair >= num_stages) break;
            const bool is_whole = 2 * pair + 1 < num_stages;
            const int upper = ring.next(shared, me);
            const int lower = is_whole ? ring.next(shared, me) : upper;
            const unsigned char *a = stages.row(upper, me.row), *b = stages.row(lower, me.row);
            if constexpr (FORMAT == PLAIN)
                multiply(sums[pair], x, a, b, me);
            else if constexpr (FORMAT != INT4)
                multiply_bytes<FORMAT>(sums[pair], rows.row(me.row), a, b, me);
            ring.give_back(shared, upper, lower, me);
        }
    }
}

// All kinds by one piece of code: the kernel is a step's only one, and each kind's own would not fit
// where instructions are kept (docs/log/decode.md).
template <int ROWS, Format FORMAT>
__device__ __forceinline__ void product(const Args& args, const Operands& operands,
                                        const Shape& shape, int kind, Shared& shared, Ring& ring,
                                        Patience& patience, const Lane& me) {
    const Work work = shared.works[kind][me.warp];
    const int group_units = GROUP_STAGES >> shape.gated;
    int buffer = 0;
    sync_workers();  // nobody still reads what the last product or the attention left
    Piece<ROWS, FORMAT> piece;
#pragma unroll 1
    for (int unit = 0; unit * shape.num_sets < shape.num_own; unit += group_units, buffer ^= 1) {
        const int left = (work.num_units - unit) << shape.gated;
        const int num_stages = left < GROUP_STAGES ? left : GROUP_STAGES;
        Sums sums = {};
        Output<FORMAT> output(args, operands, shape, unit);
        if (num_stages > 0)
            multiply_group<ROWS, FORMAT>(args, operands, shape, work, num_stages, unit == 0,
                                         unit + group_units >= work.num_units, piece, sums, shared,
                                         ring, patience, me);
#pragma unroll
        for (int i = 0; i < GROUP_STAGES; i++) {  // of output `me.row`, rows 2 * quad and the next
            if (i >= num_stages) break;
            const int place = (i * MAX_ROWS + 2 * me.quad) * UNIT + me.row;
            float* to = &shared.product.sums[buffer][me.warp][place];
            to[0] = add_chains(sums[i / 2], i % 2 * 2);
            if (ROWS > 1) to[UNIT] = add_chains(sums[i / 2], i % 2 * 2 + 1);
        }
        output.wait(args, operands, shared, patience);
        // One is enough: a buffer is written again after the next, which all reach done with it.
        sync_workers();
        output.store(args, operands, shape, shared, buffer);
    }
    // Behind what the block sends, for none of which others are to wait.
    if constexpr (RANKS > 1)
#pragma unroll 1
        for (int unit = 0; operands.addend != nullptr && unit * shape.num_sets < shape.num_own;
             unit += group_units)
            add_ranks(args, operands, shape, unit, shared, patience);
}

}  // namespace
