// A matrix product by all blocks, with what comes before and after it: the norm's weights and
// factor, SiLU, the addition to the residual.
#pragma once

#include "exchange.cuh"
#include "multiply.cuh"

namespace {

struct Operands {
    const void *x, *norm, *bias;  // norm, bias: may be null
    const void* addend;           // may be null: of the outputs' shape
    void* out;
};

// A warp's slice of x, a lane's 8 columns of each row, and of the norm's weights; on their way.
struct Piece {
    uint4 values[MAX_ROWS] = {};
    uint4 norm = {};

    __device__ __forceinline__ void load(const Operands& operands, int size, int rows, int slice,
                                         const Lane& me) {
        const int column = slice * SLICE + me.lane * 8;
        if (operands.norm != nullptr) norm = load_constant(at(operands.norm, column));
#pragma unroll
        for (int r = 0; r < MAX_ROWS; r++)
            if (r < rows)
                values[r] = load_fresh(at(operands.x, static_cast<int64_t>(r) * size + column));
    }

    __device__ __forceinline__ bool is_there(int rows) const {
        bool is_there = true;
#pragma unroll
        for (int r = 0; r < MAX_ROWS; r++)
            if (r < rows) is_there = is_there && !is_empty(values[r]);
        return is_there;
    }

    // Of many rows only the first is looked at until it is there: all are made at once.
    __device__ __forceinline__ void load_missing(const Operands& operands, int size, int rows,
                                                 int slice, const Lane& me) {
        const int column = slice * SLICE + me.lane * 8;
        const int num = rows > 2 && is_empty(values[0]) ? 1 : rows;
#pragma unroll
        for (int r = 0; r < MAX_ROWS; r++)
            if (r < num && is_empty(values[r]))
                values[r] = load_fresh(at(operands.x, static_cast<int64_t>(r) * size + column));
    }

    static __device__ __forceinline__ uint32_t weigh(uint32_t pair, uint32_t by, float& squares) {
        squares += low(pair) * low(pair) + high(pair) * high(pair);
        return to_pair(low(pair) * low(by), high(pair) * high(by));
    }

    // To shared memory, times the norm's weights, rounded as everywhere; the factor of a row comes
    // at the end.
    __device__ __forceinline__ void store(bool has_norm, int rows, float (&squares)[MAX_ROWS],
                                          Rows<1>& to, const Lane& me) const {
#pragma unroll
        for (int r = 0; r < MAX_ROWS; r++) {
            if (r >= rows) break;
            uint4 v = values[r];
            if (has_norm)
                v = {weigh(v.x, norm.x, squares[r]), weigh(v.y, norm.y, squares[r]),
                     weigh(v.z, norm.z, squares[r]), weigh(v.w, norm.w, squares[r])};
            *reinterpret_cast<uint4*>(to.row(0, r) + me.lane * 16) = v;
        }
    }
};

// A thread's two neighbouring outputs of a group, one word: where they go and what is added to them,
// known before the sums.
struct Output {
    bool is_one;  // false: this thread has none
    int set, unit, row, column;
    uint32_t bias[2] = {}, addend = 0;  // as read: to make them floats is to wait for them

    // `first_unit`: the group's, of those of its set.
    __device__ __forceinline__ Output(const Args& args, const Operands& operands,
                                      const Shape& shape, int first_unit) {
        static_assert(MAX_SETS * GROUP_STAGES * MAX_ROWS * UNIT / 2 == THREADS);
        const int thread = thread_index();
        set = thread / (THREADS / MAX_SETS);
        unit = thread / (MAX_ROWS * UNIT / 2) % GROUP_STAGES;
        row = thread / (UNIT / 2) % MAX_ROWS;
        const int own = set + (first_unit + unit) * shape.num_sets;
        column = (block_index() + own * num_blocks()) * UNIT + thread % (UNIT / 2) * 2;
        is_one = set < shape.num_sets && unit < GROUP_STAGES >> shape.gated && own < shape.num_own
            && row < args.rows;
        if (!is_one) return;
        if (operands.addend != nullptr) load_addend(operands, shape);
        if (operands.bias == nullptr) return;
        bias[0] = load_fresh_pair(at(operands.bias, column));
        if (shape.gated) bias[1] = load_fresh_pair(at(operands.bias, shape.features + column));
    }

    __device__ __forceinline__ int64_t place(const Shape& shape) const {
        return static_cast<int64_t>(row) * shape.features + column;
    }

    __device__ __forceinline__ void load_addend(const Operands& operands, const Shape& shape) {
        addend = load_fresh_pair(at(operands.addend, place(shape)));
    }

    // One of the two, from the sum without bias and the gated's; `half`: of a pair.
    template <typename Half>
    static __device__ __forceinline__ float finish(const Operands& operands, bool is_gated,
                                                   float sum, float gated, uint32_t bias0,
                                                   uint32_t bias1, uint32_t addend, Half half) {
        if (operands.bias != nullptr) sum += half(bias0), gated += half(bias1);
        if (is_gated) sum = divide(sum, 1 + power_of_2(-sum * LOG2_E)) * gated;
        return operands.addend == nullptr ? sum : sum + half(addend);
    }

    // From the sums of the set's warps.
    __device__ __forceinline__ void store(const Args& args, const Operands& operands,
                                          const Shape& shape, const Shared& shared,
                                          int buffer) const {
        if (!is_one) return;
        const int warp = set * shape.split;
        const int place_of_sums = ((unit << shape.gated) * MAX_ROWS + row) * UNIT + column % UNIT;
        const int next = shape.gated ? place_of_sums + MAX_ROWS * UNIT : place_of_sums;
        float squares = 0, sums[2] = {}, gated[2] = {};
#pragma unroll
        for (int w = 0; w < WARPS; w++)
            if (w < shape.split) {
                const float* from = shared.product.sums[buffer][warp + w];
                squares += shared.product.squares[warp + w][row];
                sums[0] += from[place_of_sums], sums[1] += from[place_of_sums + 1];
                gated[0] += from[next], gated[1] += from[next + 1];
            }
        if (operands.norm != nullptr) {
            const float factor = inverse_root(squares * shape.inverse_size + args.eps);
            sums[0] *= factor, sums[1] *= factor, gated[0] *= factor, gated[1] *= factor;
        }
        sums[0] = finish(operands, shape.gated, sums[0], gated[0], bias[0], bias[1], addend, low);
        sums[1] = finish(operands, shape.gated, sums[1], gated[1], bias[0], bias[1], addend, high);
        store_fresh_pair(at(operands.out, place(shape)), to_pair(sums[0], sums[1]));
    }
};

__device__ __forceinline__ void store_squares(float (&squares)[MAX_ROWS], int rows, Shared& shared,
                                              const Lane& me) {
#pragma unroll
    for (int r = 0; r < MAX_ROWS; r++) {
        if (r >= rows) break;
        for (int step = 16; step > 0; step /= 2) squares[r] = add_across(squares[r], step);
        if (me.lane == 0) shared.product.squares[me.warp][r] = squares[r];
    }
}

// A warp's slices of x times its stages of a group.
__device__ __forceinline__ void multiply_group(const Args& args, const Operands& operands,
                                               const Shape& shape, const Work& work, int num_stages,
                                               float (&sums)[GROUP_STAGES / 2][CHAINS][4],
                                               Shared& shared, Ring& ring, Patience& patience,
                                               const Lane& me) {
    Rows<1>& rows = shared.product.x[me.warp];
    Rows<DEPTH>& stages = shared.ring[me.warp];
    Piece piece;
    float squares[MAX_ROWS] = {};
    int slice = work.first_slice;
    piece.load(operands, shape.size, args.rows, slice, me);
#pragma unroll 1
    for (int left = work.num_slices; left > 0; left--, slice += shape.split) {
        while (patience.wait(args, shared, piece.is_there(args.rows)))
            piece.load_missing(operands, shape.size, args.rows, slice, me);
        piece.store(operands.norm != nullptr, args.rows, squares, rows, me);
        // The next is on its way while this one is used.
        if (left > 1) piece.load(operands, shape.size, args.rows, slice + shape.split, me);
        sync_warp();
        uint4 x[SLICE / 32];
#pragma unroll
        for (int window = 0; window < SLICE / 32; window++)
            x[window] = me.row < args.rows ? load_window(rows.row(0, me.row), window, me)
                                           : uint4{0, 0, 0, 0};
        if (left == 1 && operands.norm != nullptr) store_squares(squares, args.rows, shared, me);
#pragma unroll
        for (int pair = 0; pair < GROUP_STAGES / 2; pair++) {
            if (2 * pair >= num_stages) break;
            const bool is_whole = 2 * pair + 1 < num_stages;
            const int upper = ring.next(shared, me);
            const int lower = is_whole ? ring.next(shared, me) : upper;
            multiply(sums[pair], x, stages.row(upper, me.row), stages.row(lower, me.row), me);
            ring.give_back(shared, me);
        }
    }
}

// All kinds by one piece of code: the kernel is a step's only one, and each kind's own would not fit
// where instructions are kept (docs/LOG.md).
__device__ __forceinline__ void product(const Args& args, const Operands& operands, int kind,
                                        Shared& shared, Ring& ring, Patience& patience,
                                        const Lane& me) {
    const Shape shape = shared.shapes[kind];
    const Work work = shared.works[kind][me.warp];
    const int group_units = GROUP_STAGES >> shape.gated;
    int buffer = 0;
    sync_workers();  // nobody still reads what the last product or the attention left
    for (int unit = 0; unit * shape.num_sets < shape.num_own; unit += group_units, buffer ^= 1) {
        const int left = (work.num_units - unit) << shape.gated;
        const int num_stages = left < GROUP_STAGES ? left : GROUP_STAGES;
        float sums[GROUP_STAGES / 2][CHAINS][4] = {};
        Output output(args, operands, shape, unit);
        if (num_stages > 0)
            multiply_group(args, operands, shape, work, num_stages, sums, shared, ring, patience, me);
#pragma unroll
        for (int i = 0; i < GROUP_STAGES; i++) {  // of output `me.row`, rows 2 * quad and the next
            const int place = (i * MAX_ROWS + 2 * me.quad) * UNIT + me.row;
            float* to = &shared.product.sums[buffer][me.warp][place];
            to[0] = add_chains(sums[i / 2], i % 2 * 2);
            to[UNIT] = add_chains(sums[i / 2], i % 2 * 2 + 1);
        }
        const bool adds = output.is_one && operands.addend != nullptr;
        while (patience.wait(args, shared, !adds || !is_empty(output.addend)))
            if (adds) output.load_addend(operands, shape);
        // One is enough: a buffer is written again after the next, which all reach done with it.
        sync_workers();
        output.store(args, operands, shape, shared, buffer);
    }
}

}  // namespace
