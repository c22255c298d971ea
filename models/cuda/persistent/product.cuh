// A matrix product by all blocks, with what comes before and after it: the norm's weights and
// factor, SiLU, the addition to the residual.
#pragma once

#include "weight_ring.cuh"

namespace {

// A lane's share of one slice of x: of its row, 8 columns of each 32.
template <bool NORM>
struct Piece {
    uint4 values[SLICE / 32];
    uint4 norm[NORM ? SLICE / 32 : 1];

    __device__ __forceinline__ void load(const void* x, const void* norm_weight, int size, int rows,
                                         int slice, const Lane& me) {
#pragma unroll
        for (int i = 0; i < SLICE / 32; i++) {
            const int column = slice * SLICE + i * 32 + me.quad * 8;
            values[i] = {0, 0, 0, 0};
            if (me.row < rows)
                values[i] = load_fresh(at(x, static_cast<int64_t>(me.row) * size + column));
            if (NORM) norm[i] = load_constant(at(norm_weight, column));
        }
    }

    static __device__ __forceinline__ uint32_t weigh(uint32_t pair, uint32_t by, float& squares) {
        squares += low(pair) * low(pair) + high(pair) * high(pair);
        return to_pair(low(pair) * low(by), high(pair) * high(by));
    }

    // Times the norm's weights, rounded as everywhere; the factor of a row comes at the end.
    __device__ __forceinline__ void weigh(float& squares) {
#pragma unroll
        for (int i = 0; i < (NORM ? SLICE / 32 : 0); i++) {
            uint4& v = values[i];
            const uint4& w = norm[i];
            v = {weigh(v.x, w.x, squares), weigh(v.y, w.y, squares), weigh(v.z, w.z, squares),
                 weigh(v.w, w.w, squares)};
        }
    }
};

struct Operands {
    const void *x, *norm, *bias;
    void* out;
};

// A thread's output of a group: where it goes and what is added to it, known before the sums.
template <int KIND>
struct Output {
    static constexpr bool ADDS = KIND == OUTPUT || KIND == DOWN;
    static constexpr int PARTS = KIND == GATE_UP ? 2 : 1;
    uint16_t* to;  // null: this thread has none
    int unit, row, column;
    uint16_t bias[PARTS], residual;  // as read: to make them floats is to wait for them

    __device__ __forceinline__ Output(const Args& args, const Operands& operands,
                                      const Shape& shape, int first_unit, int num_stages) {
        const int thread = thread_index();
        unit = thread / (MAX_ROWS * UNIT);
        row = thread / UNIT % MAX_ROWS;
        column = (block_index() + (first_unit + unit) * num_blocks()) * UNIT + thread % UNIT;
        to = nullptr;
        if (unit * PARTS >= num_stages || row >= args.rows) return;
        to = at(operands.out, static_cast<int64_t>(row) * shape.features + column);
        if (ADDS) residual = load_fresh_half(to);
        for (int part = 0; part < PARTS && operands.bias != nullptr; part++)
            bias[part] = *at(operands.bias, part * shape.features + column);
    }

    // From the sums of all warps.
    __device__ __forceinline__ void finish(const Args& args, const Operands& operands,
                                           const Shape& shape, const Shared& shared,
                                           int buffer) const {
        if (to == nullptr) return;
        float factor = 1;
        if (operands.norm != nullptr) {
            float squares = 0;
            for (int w = 0; w < WARPS; w++) squares += shared.product.squares[w][row];
            factor = inverse_root(squares * (1.0f / shape.size) + args.eps);
        }
        float result[PARTS];
        for (int part = 0; part < PARTS; part++) {
            const int place
                = (unit * PARTS + part) * MAX_ROWS * UNIT + thread_index() % (MAX_ROWS * UNIT);
            float sum = 0;
            for (int w = 0; w < WARPS; w++) sum += shared.product.sums[buffer][w][place];
            sum *= factor;
            if (operands.bias != nullptr) sum += from_half(bias[part]);
            result[part] = sum;
        }
        float value = result[0];
        if (PARTS == 2) value = value / (1 + power_of_2(-value * LOG2_E)) * result[PARTS - 1];
        if (ADDS) value += from_half(residual);
        *to = to_half(value);
    }
};

// A lane's 16 bytes of each 32 columns of its row of a stage.
struct Weights {
    uint4 windows[SLICE / 32];

    __device__ __forceinline__ void load(const unsigned char* stage, const Lane& me) {
#pragma unroll
        for (int i = 0; i < SLICE / 32; i++) {
            const int chunk = (i * 4 + me.quad) ^ (me.row % 2 * 4);
            windows[i] = *reinterpret_cast<const uint4*>(stage + (me.row * 16 + chunk) * 16);
        }
    }
};

template <int KIND>
__device__ __forceinline__ void product(const Args& args, const Operands& operands, Shared& shared,
                                        Ring& ring, const Lane& me) {
    constexpr bool NORM = KIND == QKV || KIND == GATE_UP || KIND == HEAD;
    constexpr int PARTS = KIND == GATE_UP ? 2 : 1;
    constexpr int GROUP_UNITS = GROUP_STAGES / PARTS;
    constexpr int PAIRS = GROUP_STAGES / 2;
    constexpr int PIECES = NORM ? 1 : 3;  // of x on their way; a norm's weights take their room
    const Shape shape = shared.shapes[KIND];
    const int num_slices = shape.size / SLICE;
    const int num_own_slices = (num_slices - me.warp + WARPS - 1) / WARPS;
    Piece<NORM> ahead[PIECES];
    const auto ask = [&](Piece<NORM>& piece, int own_slice) {
        const int slice = me.warp + own_slice * WARPS;
        piece.load(operands.x, operands.norm, shape.size, args.rows, slice, me);
    };
#pragma unroll
    for (int i = 0; i < PIECES; i++)
        if (shape.num_own > 0 && i < num_own_slices) ask(ahead[i], i);
    int buffer = 0;
    for (int unit = 0; unit < shape.num_own; unit += GROUP_UNITS, buffer ^= 1) {
        const int left = (shape.num_own - unit) * PARTS;
        const int num_stages = left < GROUP_STAGES ? left : GROUP_STAGES;
        const bool is_last = unit + GROUP_UNITS >= shape.num_own;
        float sums[PAIRS][2][4] = {};  // two each, so that an addition need not wait for the last
        float squares = 0;
        const Output<KIND> output(args, operands, shape, unit, num_stages);
        for (int first = 0; first < num_own_slices; first += PIECES) {
#pragma unroll
            for (int i = 0; i < PIECES; i++) {
                if (first + i >= num_own_slices) break;
                Piece<NORM> x = ahead[i];
                if (first + i + PIECES < num_own_slices)
                    ask(ahead[i], first + i + PIECES);
                else if (!is_last)
                    ask(ahead[i], i);  // of the next group
                x.weigh(squares);
#pragma unroll
                for (int pair = 0; pair < PAIRS; pair++) {
                    if (2 * pair >= num_stages) break;
                    Weights a = {}, b = {};
                    a.load(ring.next(shared, me), me);
                    ring.ask_ahead(args, shared, me);
                    if (2 * pair + 1 < num_stages) {
                        b.load(ring.next(shared, me), me);
                        ring.ask_ahead(args, shared, me);
                    }
#pragma unroll
                    for (int window = 0; window < SLICE / 32; window++) {
                        const uint4 &v = x.values[window], &p = a.windows[window],
                                    &q = b.windows[window];
                        multiply_add(sums[pair][0], p.x, q.x, p.y, q.y, v.x, v.y);
                        multiply_add(sums[pair][1], p.z, q.z, p.w, q.w, v.z, v.w);
                    }
                }
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
        if (NORM && unit == 0) {
            squares = add_across(add_across(squares, 1), 2);
            if (me.quad == 0) shared.product.squares[me.warp][me.row] = squares;
        }
        // One is enough: a buffer is written again after the next, which all reach done with it.
        sync_block();
        output.finish(args, operands, shape, shared, buffer);
    }
}

}  // namespace
