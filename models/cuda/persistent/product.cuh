// A matrix product by all blocks, with what comes before and after it: the norm's weights and
// factor, SiLU, the addition to the residual.
#pragma once

#include "exchange.cuh"
#include "multiply.cuh"

namespace {

struct Operands {
    const unsigned char* x;
    const void *norm, *bias;      // may be null
    const unsigned char* addend;  // may be null: of the outputs' shape
    unsigned char* out;
};

// `exchange`: the layer's; `input`: [rows, hidden], what the layer before it left.
__device__ __forceinline__ Operands operands_of(const Args& args, const Layer& layer, int kind,
                                                const Shape& shape, unsigned char* exchange,
                                                const void* input) {
    const auto* given = static_cast<const unsigned char*>(input);
    return {shape.x == INPUT ? given : exchange + shape.x, layer.norms[kind % 4],
            layer.biases[kind % 4],
            shape.addend == INPUT ? given : shape.addend == NONE ? nullptr : exchange + shape.addend,
            shape.out == NONE ? static_cast<unsigned char*>(args.logits) : exchange + shape.out};
}

// A warp's slice of x, a lane's 8 columns of each row, and of the norm's weights; on their way.
template <int ROWS>
struct Piece {
    uint4 values[ROWS] = {};
    uint4 norm = {};

    __device__ __forceinline__ void load(const Operands& operands, int size, int rows, int slice,
                                         const Lane& me) {
        const int place = (slice * SLICE + me.lane * 8) * 2;
        if (operands.norm != nullptr)
            norm = load_constant(static_cast<const unsigned char*>(operands.norm) + place);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            if (r >= rows) break;
            values[r] = load_fresh(operands.x + place + r * size * 2);
        }
    }

    __device__ __forceinline__ bool is_there(int rows) const {
        bool is_there = true;
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            if (r >= rows) break;
            is_there = is_there && !is_empty(values[r]);
        }
        return is_there;
    }

    // Of many rows only the first is looked at until it is there: all are made at once.
    __device__ __forceinline__ void load_missing(const Operands& operands, int size, int rows,
                                                 int slice, const Lane& me) {
        const int place = (slice * SLICE + me.lane * 8) * 2;
        const int num = rows > 2 && is_empty(values[0]) ? 1 : rows;
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            if (r < num && is_empty(values[r]))
                values[r] = load_fresh(operands.x + place + r * size * 2);
    }

    static __device__ __forceinline__ uint32_t weigh(uint32_t pair, uint32_t by, float& squares) {
        squares += low(pair) * low(pair) + high(pair) * high(pair);
        return to_pair(low(pair) * low(by), high(pair) * high(by));
    }

    // To shared memory, times the norm's weights, rounded as everywhere; the factor of a row comes
    // at the end.
    __device__ __forceinline__ void store(bool has_norm, int rows, float (&squares)[ROWS],
                                          Rows<1>& to, const Lane& me) const {
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
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
    int place;                   // bytes
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
        place = (row * shape.features + column) * 2;
        is_one = set < shape.num_sets && unit < GROUP_STAGES >> shape.gated && own < shape.num_own
            && row < args.rows;
        if (!is_one) return;
        if (operands.addend != nullptr) load_addend(operands);
        if (operands.bias == nullptr) return;
        bias[0] = load_fresh_pair(at(operands.bias, column));
        if (shape.gated) bias[1] = load_fresh_pair(at(operands.bias, shape.features + column));
    }

    __device__ __forceinline__ void load_addend(const Operands& operands) {
        addend = load_fresh_pair(operands.addend + place);
    }

    __device__ __forceinline__ void wait(const Args& args, const Operands& operands, Shared& shared,
                                         Patience& patience) {
        if (operands.addend == nullptr) return;
        while (patience.wait(args, shared, !is_one || !is_empty(addend)))
            if (is_one) load_addend(operands);
    }

    // From the sums of the set's warps.
    __device__ __forceinline__ void store(const Args& args, const Operands& operands,
                                          const Shape& shape, const Shared& shared,
                                          int buffer) const {
        if (!is_one) return;
        const int stage = unit << shape.gated, warp = set * shape.split;
        const float factor = operands.norm == nullptr ? 1 : factor_of(args, shape, shared, warp);
        float sums[2] = {};
        add_warps(shape, shared, buffer, warp, stage, sums);
        sums[0] *= factor, sums[1] *= factor;
        if (operands.bias != nullptr) sums[0] += low(bias[0]), sums[1] += high(bias[0]);
        if (shape.gated) {
            float others[2] = {};
            add_warps(shape, shared, buffer, warp, stage + 1, others);
            others[0] *= factor, others[1] *= factor;
            if (operands.bias != nullptr) others[0] += low(bias[1]), others[1] += high(bias[1]);
#pragma unroll
            for (int i = 0; i < 2; i++)
                sums[i] = divide(sums[i], 1 + power_of_2(-sums[i] * LOG2_E)) * others[i];
        }
        if (operands.addend != nullptr) sums[0] += low(addend), sums[1] += high(addend);
        store_fresh_pair(operands.out + place, to_pair(sums[0], sums[1]));
    }

    // Of the warps that share a unit, four at a time: fewer are all there are.
    __device__ __forceinline__ void add_warps(const Shape& shape, const Shared& shared, int buffer,
                                              int warp, int stage, float (&sums)[2]) const {
        const int place = (stage * MAX_ROWS + row) * UNIT + column % UNIT;
#pragma unroll 1
        for (int w = 0; w < shape.split; w += 4) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float* from = shared.product.sums[buffer][(warp + w + i) % WARPS] + place;
                sums[0] += w + i < shape.split ? from[0] : 0;
                sums[1] += w + i < shape.split ? from[1] : 0;
            }
        }
    }

    __device__ __forceinline__ float factor_of(const Args& args, const Shape& shape,
                                               const Shared& shared, int warp) const {
        float squares = 0;
#pragma unroll 1
        for (int w = 0; w < shape.split; w += 4) {
#pragma unroll
            for (int i = 0; i < 4; i++)
                squares += w + i < shape.split
                    ? shared.product.squares[(warp + w + i) % WARPS][row] : 0;
        }
        return inverse_root(squares * shape.inverse_size + args.eps);
    }
};

template <int ROWS>
__device__ __forceinline__ void store_squares(float (&squares)[ROWS], int rows, Shared& shared,
                                              const Lane& me) {
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        if (r >= rows) break;
        for (int step = 16; step > 0; step /= 2) squares[r] = add_across(squares[r], step);
        if (me.lane == 0) shared.product.squares[me.warp][r] = squares[r];
    }
}

using Sums = float[GROUP_STAGES / 2][CHAINS][4];

// A warp's slices of x times its stages of a group.
template <int ROWS>
__device__ __forceinline__ void multiply_group(const Args& args, const Operands& operands,
                                               const Shape& shape, const Work& work, int num_stages,
                                               Sums& sums, Shared& shared, Ring& ring,
                                               Patience& patience, const Lane& me) {
    const int num_rows = ROWS == 1 ? 1 : args.rows;
    Rows<1>& rows = shared.product.x[me.warp];
    Rows<DEPTH>& stages = shared.ring[me.warp];
    Piece<ROWS> piece;
    float squares[ROWS] = {};
    int slice = work.first_slice;
    piece.load(operands, shape.size, num_rows, slice, me);
#pragma unroll 1
    for (int left = work.num_slices; left > 0; left--, slice += shape.split) {
        while (patience.wait(args, shared, piece.is_there(num_rows)))
            piece.load_missing(operands, shape.size, num_rows, slice, me);
        piece.store(operands.norm != nullptr, num_rows, squares, rows, me);
        // The next is on its way while this one is used.
        if (left > 1) piece.load(operands, shape.size, num_rows, slice + shape.split, me);
        sync_warp();
        uint4 x[SLICE / 32];  // rows beyond the batch are what they are: so are their outputs
#pragma unroll
        for (int window = 0; window < SLICE / 32; window++)
            x[window] = load_window(rows.row(0, me.row), window, me);
        if (left == 1 && operands.norm != nullptr) store_squares(squares, num_rows, shared, me);
#pragma unroll
        for (int pair = 0; pair < GROUP_STAGES / 2; pair++) {
            if (2 * pair >= num_stages) break;
            const bool is_whole = 2 * pair + 1 < num_stages;
            const int upper = ring.next(shared, me);
            const int lower = is_whole ? ring.next(shared, me) : upper;
            multiply(sums[pair], x, stages.row(upper, me.row), stages.row(lower, me.row), me);
            ring.give_back(shared, upper, lower, me);
        }
    }
}

// All kinds by one piece of code: the kernel is a step's only one, and each kind's own would not fit
// where instructions are kept (docs/LOG.md).
template <int ROWS>
__device__ __forceinline__ void product(const Args& args, const Operands& operands,
                                        const Shape& shape, int kind, Shared& shared, Ring& ring,
                                        Patience& patience, const Lane& me) {
    const Work work = shared.works[kind][me.warp];
    const int group_units = GROUP_STAGES >> shape.gated;
    int buffer = 0;
    sync_workers();  // nobody still reads what the last product or the attention left
#pragma unroll 1
    for (int unit = 0; unit * shape.num_sets < shape.num_own; unit += group_units, buffer ^= 1) {
        const int left = (work.num_units - unit) << shape.gated;
        const int num_stages = left < GROUP_STAGES ? left : GROUP_STAGES;
        Sums sums = {};
        Output output(args, operands, shape, unit);
        if (num_stages > 0)
            multiply_group<ROWS>(args, operands, shape, work, num_stages, sums, shared, ring,
                                 patience, me);
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
}

}  // namespace
