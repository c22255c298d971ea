// A matrix product by all blocks, with what comes before and after it: the norm's weights and
// factor, SiLU, the addition to the residual.
#pragma once

#include "weight_ring.cuh"

namespace {

// A lane's share of one slice of x: of its row, 8 columns of each 32. And of the norm's weights: for
// row i of the lanes' 8, what all need of the i-th 32 columns.
struct Piece {
    uint4 values[SLICE / 32];
    uint4 norm;

    __device__ __forceinline__ void load(const void* x, const void* norm_weight, int size, int rows,
                                         int slice, const Lane& me) {
        static_assert(SLICE / 32 == 8);
        if (norm_weight != nullptr) norm = load_constant(at(norm_weight, slice * SLICE + me.lane * 8));
#pragma unroll
        for (int i = 0; i < SLICE / 32; i++) {
            const int column = slice * SLICE + i * 32 + me.quad * 8;
            values[i] = {0, 0, 0, 0};
            if (me.row < rows)
                values[i] = load_fresh(at(x, static_cast<int64_t>(me.row) * size + column));
        }
    }

    static __device__ __forceinline__ uint32_t weigh(uint32_t pair, uint32_t by, int lane,
                                                     float& squares) {
        by = static_cast<uint32_t>(from_lane(static_cast<int>(by), lane));
        squares += low(pair) * low(pair) + high(pair) * high(pair);
        return to_pair(low(pair) * low(by), high(pair) * high(by));
    }

    // Times the norm's weights, rounded as everywhere; the factor of a row comes at the end.
    __device__ __forceinline__ void weigh(float& squares, const Lane& me) {
#pragma unroll
        for (int i = 0; i < SLICE / 32; i++) {
            uint4& v = values[i];
            const int lane = i * 4 + me.quad;
            v = {weigh(v.x, norm.x, lane, squares), weigh(v.y, norm.y, lane, squares),
                 weigh(v.z, norm.z, lane, squares), weigh(v.w, norm.w, lane, squares)};
        }
    }
};

struct Operands {
    const void *x, *norm, *bias;  // norm, bias: may be null
    void* out;
    bool adds;  // to what is there
};

// A thread's output of a group: where it goes and what is added to it, known before the sums.
struct Output {
    uint16_t* to;  // null: this thread has none
    int unit, row, column;
    uint16_t bias[2], residual;  // as read: to make them floats is to wait for them

    // `first_unit`: the group's, of those of its set.
    __device__ __forceinline__ void open(const Args& args, const Operands& operands,
                                         const Shape& shape, int set, int first_unit) {
        const int thread = thread_index();
        unit = thread / (MAX_ROWS * UNIT);
        row = thread / UNIT % MAX_ROWS;
        const int own = set + (first_unit + unit) * shape.num_sets;
        column = (block_index() + own * num_blocks()) * UNIT + thread % UNIT;
        to = nullptr;
        if (set >= shape.num_sets || unit >= GROUP_STAGES >> shape.gated || own >= shape.num_own
            || row >= args.rows)
            return;
        to = at(operands.out, static_cast<int64_t>(row) * shape.features + column);
        if (operands.adds) residual = load_fresh_half(to);
        if (operands.bias == nullptr) return;
        bias[0] = *at(operands.bias, column);
        if (shape.gated) bias[1] = *at(operands.bias, shape.features + column);
    }

    // From the sums of the set's warps.
    __device__ __forceinline__ void finish(const Args& args, const Operands& operands,
                                           const Shape& shape, const Shared& shared, int set,
                                           int buffer) const {
        if (to == nullptr) return;
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
        if (shape.gated) sum = sum / (1 + power_of_2(-sum * LOG2_E)) * gated;
        if (operands.adds) sum += from_half(residual);
        *to = to_half(sum);
    }
};

// A lane's 16 bytes of 32 columns of its row of a stage.
__device__ __forceinline__ uint4 load_window(const unsigned char* stage, int window,
                                             const Lane& me) {
    return load_shared_here(stage + me.row * SLICE * 2 + (window * 4 + me.quad) * 16);
}

// Two stages times a slice of x. The loads are some windows ahead of their use, no more: registers
// are scarce.
__device__ __forceinline__ void multiply(float (&sums)[2][4], const uint4 (&x)[SLICE / 32],
                                         const unsigned char* upper, const unsigned char* lower,
                                         const Lane& me) {
    constexpr int LOADED = 3;
    uint4 p[LOADED], q[LOADED];
#pragma unroll
    for (int window = 0; window < LOADED; window++) {
        p[window] = load_window(upper, window, me);
        q[window] = load_window(lower, window, me);
    }
#pragma unroll
    for (int window = 0; window < SLICE / 32; window++) {
        const uint4 &v = x[window], &a = p[window % LOADED], &b = q[window % LOADED];
        multiply_add(sums[0], a.x, b.x, a.y, b.y, v.x, v.y);
        multiply_add(sums[1], a.z, b.z, a.w, b.w, v.z, v.w);
        if (window + LOADED < SLICE / 32) {
            p[window % LOADED] = load_window(upper, window + LOADED, me);
            q[window % LOADED] = load_window(lower, window + LOADED, me);
        }
    }
}

// All kinds by one piece of code: the kernel is a step's only one, and each kind's own would not fit
// where instructions are kept (docs/LOG.md).
__device__ __forceinline__ void product(const Args& args, const Operands& operands, int kind,
                                        Shared& shared, Ring& ring, const Lane& me) {
    constexpr int PAIRS = GROUP_STAGES / 2;
    const Shape shape = shared.shapes[kind];
    const Work work = shared.works[kind][me.warp];
    const int group_units = GROUP_STAGES >> shape.gated;
    int buffer = 0;
    for (int unit = 0; unit * shape.num_sets < shape.num_own; unit += group_units, buffer ^= 1) {
        const int left = (work.num_units - unit) << shape.gated;
        const int num_stages = left < GROUP_STAGES ? left : GROUP_STAGES;
        float sums[PAIRS][2][4] = {};  // two each, so that an addition need not wait for the last
        float squares = 0;
        Output outputs[MAX_SETS];
#pragma unroll
        for (int set = 0; set < MAX_SETS; set++) outputs[set].open(args, operands, shape, set, unit);
        Piece ahead;
        int index = -1;  // of the warp's slices; the next one is on its way while one is used
#pragma unroll 1
        for (; num_stages > 0 && index < work.num_slices; index++) {
            Piece x = ahead;
            if (index + 1 < work.num_slices) {
                const int slice = work.first_slice + (index + 1) * shape.split;
                ahead.load(operands.x, operands.norm, shape.size, args.rows, slice, me);
            }
            if (index < 0) continue;
            if (operands.norm != nullptr) x.weigh(squares, me);
#pragma unroll
            for (int pair = 0; pair < PAIRS; pair++) {
                if (2 * pair >= num_stages) break;
                const bool is_whole = 2 * pair + 1 < num_stages;
                const unsigned char* upper = ring.next(shared, me);
                const unsigned char* lower = is_whole ? ring.next(shared, me) : upper;
                multiply(sums[pair], x.values, upper, lower, me);
                ring.give_back(shared, me);
            }
        }
#pragma unroll
        for (int i = 0; i < GROUP_STAGES; i++) {  // of output `me.row`, rows 2 * quad and the next
            const float(&parts)[2][4] = sums[i / 2];
            const int place = (i * MAX_ROWS + 2 * me.quad) * UNIT + me.row;
            float* to = &shared.product.sums[buffer][me.warp][place];
            to[0] = parts[0][i % 2 * 2] + parts[1][i % 2 * 2];
            to[UNIT] = parts[0][i % 2 * 2 + 1] + parts[1][i % 2 * 2 + 1];
        }
        if (operands.norm != nullptr && unit == 0) {
            squares = add_across(add_across(squares, 1), 2);
            if (me.quad == 0) shared.product.squares[me.warp][me.row] = squares;
        }
        // One is enough: a buffer is written again after the next, which all reach done with it.
        sync_workers();
#pragma unroll
        for (int set = 0; set < MAX_SETS; set++)
            outputs[set].finish(args, operands, shape, shared, set, buffer);
    }
}

}  // namespace
