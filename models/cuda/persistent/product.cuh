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

// A thread's output of a group: where it goes and what is added to it, known before the sums.
struct Output {
    bool is_one;  // false: this thread has none
    int unit, row, column;
    uint16_t bias[2] = {}, addend = 0;  // as read: to make them floats is to wait for them

    // `first_unit`: the group's, of those of its set.
    __device__ __forceinline__ void open(const Args& args, const Operands& operands,
                                         const Shape& shape, int set, int first_unit) {
        const int thread = thread_index();
        unit = thread / (MAX_ROWS * UNIT);
        row = thread / UNIT % MAX_ROWS;
        const int own = set + (first_unit + unit) * shape.num_sets;
        column = (block_index() + own * num_blocks()) * UNIT + thread % UNIT;
        is_one = set < shape.num_sets && unit < GROUP_STAGES >> shape.gated && own < shape.num_own
            && row < args.rows;
        if (!is_one) return;
        if (operands.addend != nullptr) addend = load_fresh_half(at(operands.addend, place(shape)));
        if (operands.bias == nullptr) return;
        bias[0] = *at(operands.bias, column);
        if (shape.gated) bias[1] = *at(operands.bias, shape.features + column);
    }

    __device__ __forceinline__ int64_t place(const Shape& shape) const {
        return static_cast<int64_t>(row) * shape.features + column;
    }

    __device__ __forceinline__ void wait(const Args& args, const Operands& operands,
                                         const Shape& shape, Shared& shared, Patience& patience) {
        const bool adds = is_one && operands.addend != nullptr;
        while (patience.wait(args, shared, !adds || addend != EMPTY_HALF))
            if (adds) addend = load_fresh_half(at(operands.addend, place(shape)));
    }

    // From the sums of the set's warps.
    __device__ __forceinline__ float finish(const Args& args, const Operands& operands,
                                            const Shape& shape, const Shared& shared, int set,
                                            int buffer) const {
        if (!is_one) return 0;
        const int warp = set * shape.split, stage = unit << shape.gated;
        const int place = stage * MAX_ROWS * UNIT + thread_index() % (MAX_ROWS * UNIT);
        const int next = shape.gated ? place + MAX_ROWS * UNIT : place;
        float squares = 0, sum = 0, gated = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++)
            if (w < shape.split) {
                squares += shared.product.squares[warp + w][row];
                sum += shared.product.sums[buffer][warp + w][place];
                gated += shared.product.sums[buffer][warp + w][next];
            }
        if (operands.norm != nullptr) {
            const float factor = inverse_root(squares * shape.inverse_size + args.eps);
            sum *= factor, gated *= factor;
        }
        if (operands.bias != nullptr) sum += from_half(bias[0]), gated += from_half(bias[1]);
        if (shape.gated) sum = divide(sum, 1 + power_of_2(-sum * LOG2_E)) * gated;
        return operands.addend == nullptr ? sum : sum + from_half(addend);
    }

    // Neighbours' outputs are one word.
    __device__ __forceinline__ void store(const Operands& operands, const Shape& shape,
                                          float sum) const {
        const uint32_t half = to_half(sum);
        const uint32_t other = from_lane(static_cast<int>(half), thread_index() % 32 ^ 1);
        if (is_one && column % 2 == 0)
            store_fresh_pair(at(operands.out, place(shape)), half | other << 16);
    }
};

// A warp's slices of x times its stages of a group.
__device__ __forceinline__ void multiply_group(const Args& args, const Operands& operands,
                                               const Shape& shape, const Work& work, int num_stages,
                                               float (&sums)[GROUP_STAGES / 2][2][4],
                                               float (&squares)[MAX_ROWS], Shared& shared,
                                               Ring& ring, Patience& patience, const Lane& me) {
    Rows<1>& rows = shared.product.x[me.warp];
    Rows<DEPTH>& stages = shared.ring[me.warp];
    Piece piece;
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
        float sums[GROUP_STAGES / 2][2][4] = {};  // two each: an addition need not wait for the last
        float squares[MAX_ROWS] = {};
        Output outputs[MAX_SETS];
#pragma unroll
        for (int set = 0; set < MAX_SETS; set++) outputs[set].open(args, operands, shape, set, unit);
        if (num_stages > 0)
            multiply_group(args, operands, shape, work, num_stages, sums, squares, shared, ring,
                           patience, me);
#pragma unroll
        for (int i = 0; i < GROUP_STAGES; i++) {  // of output `me.row`, rows 2 * quad and the next
            const float(&parts)[2][4] = sums[i / 2];
            const int place = (i * MAX_ROWS + 2 * me.quad) * UNIT + me.row;
            float* to = &shared.product.sums[buffer][me.warp][place];
            to[0] = parts[0][i % 2 * 2] + parts[1][i % 2 * 2];
            to[UNIT] = parts[0][i % 2 * 2 + 1] + parts[1][i % 2 * 2 + 1];
        }
        if (operands.norm != nullptr && unit == 0) {
#pragma unroll
            for (int r = 0; r < MAX_ROWS; r++) {
                if (r >= args.rows) break;
                for (int step = 16; step > 0; step /= 2)
                    squares[r] = add_across(squares[r], step);
                if (me.lane == 0) shared.product.squares[me.warp][r] = squares[r];
            }
        }
        // One is enough: a buffer is written again after the next, which all reach done with it.
        sync_workers();
#pragma unroll
        for (int set = 0; set < MAX_SETS; set++) {
            outputs[set].wait(args, operands, shape, shared, patience);
            const float sum = outputs[set].finish(args, operands, shape, shared, set, buffer);
            outputs[set].store(operands, shape, sum);
        }
    }
}

}  // namespace
