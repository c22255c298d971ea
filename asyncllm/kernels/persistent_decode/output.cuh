// The outputs of a product: from the warps' sums to the words that other blocks wait for.
#pragma once

#include "piece.cuh"
#include "ranks.cuh"

namespace {

// A thread's two neighbouring outputs of a group, one word.
struct Place {
    bool is_valid;  // false: this thread has none
    int set, unit, row, column;
    int place;                   // bytes

    // `first_unit`: the group's, of those of its set.
    __device__ __forceinline__ Place(const Args& args, const Shape& shape, int first_unit) {
        static_assert(MAX_SETS * GROUP_STAGES * MAX_ROWS * UNIT / 2 == THREADS);
        const int thread = thread_index();
        set = thread / (THREADS / MAX_SETS);
        unit = thread / (MAX_ROWS * UNIT / 2) % GROUP_STAGES;
        row = thread / (UNIT / 2) % MAX_ROWS;
        const int own = set + (first_unit + unit) * shape.num_sets;
        column = (block_index() + own * num_blocks()) * UNIT + thread % (UNIT / 2) * 2;
        place = (row * shape.features + column) * 2;
        is_valid = set < shape.num_sets && unit < GROUP_STAGES >> shape.gated && own < shape.num_own
            && row < args.rows;
    }

    // Bytes from the beginning of a rank's words of the product.
    __device__ __forceinline__ int sent() const {
        return (column / UNIT * MAX_ROWS + row) * UNIT * 2 + column % UNIT * 2;
    }
};

// Where its outputs go and what is added to them, known before the sums.
template <Format FORMAT>
struct Output : Place {
    static constexpr bool HAS_SCALES = FORMAT == FP8 || FORMAT == INT8;
    uint32_t bias[2] = {}, addend = 0;  // as read: to make them floats is to wait for them
    uint32_t scales[2][2] = {};

    __device__ __forceinline__ Output(const Args& args, const Operands& operands,
                                      const Shape& shape, int first_unit)
        : Place(args, shape, first_unit) {
        if (!is_valid) return;
        if (RANKS == 1 && operands.addend != nullptr) load_addend(operands);
        if (HAS_SCALES)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const auto* from = static_cast<const uint32_t*>(operands.scales) + column + i;
                scales[0][i] = load_fresh_pair(from);
                if (shape.gated) scales[1][i] = load_fresh_pair(from + shape.features);
            }
        if (operands.bias == nullptr) return;
        bias[0] = load_fresh_pair(at(operands.bias, column));
        if (shape.gated) bias[1] = load_fresh_pair(at(operands.bias, shape.features + column));
    }

    __device__ __forceinline__ void load_addend(const Operands& operands) {
        addend = load_fresh_pair(operands.addend + place);
    }

    __device__ __forceinline__ void wait(const Args& args, const Operands& operands, Shared& shared,
                                         Patience& patience) {
        if constexpr (RANKS > 1) return;
        if (operands.addend == nullptr) return;
        while (patience.wait(args, shared, !is_valid || !is_empty(addend)))
            if (is_valid) load_addend(operands);
    }

    // From the sums of the set's warps.
    __device__ __forceinline__ void store(const Args& args, const Operands& operands,
                                          const Shape& shape, const Shared& shared,
                                          int buffer) const {
        if (!is_valid) return;
        const int stage = unit << shape.gated, warp = set * shape.split;
        const float factor = operands.norm == nullptr ? 1 : factor_of(args, shape, shared, warp);
        float sums[2] = {};
        add_warps(shape, shared, buffer, warp, stage, sums);
        multiply_by(factor, scales[0], sums);
        if (operands.bias != nullptr) sums[0] += low(bias[0]), sums[1] += high(bias[0]);
        if (shape.gated) {
            float others[2] = {};
            add_warps(shape, shared, buffer, warp, stage + 1, others);
            multiply_by(factor, scales[1], others);
            if (operands.bias != nullptr) others[0] += low(bias[1]), others[1] += high(bias[1]);
#pragma unroll
            for (int i = 0; i < 2; i++)
                sums[i] = divide(sums[i], 1 + power_of_2(-sums[i] * LOG2_E)) * others[i];
        }
        if (RANKS > 1 && operands.addend != nullptr)
            return send_pair(args, operands.sent + sent(), to_pair(sums[0], sums[1]));
        if (operands.addend != nullptr) sums[0] += low(addend), sums[1] += high(addend);
        store_fresh_pair(operands.out + place, to_pair(sums[0], sums[1]));
    }

    static __device__ __forceinline__ void multiply_by(float factor, const uint32_t (&scales)[2],
                                                       float (&sums)[2]) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (HAS_SCALES) sums[i] *= UNIT_OF<FORMAT>, sums[i] *= bits_to_float(scales[i]);
            sums[i] *= factor;
        }
    }

    // For the warps that have one unit.
    __device__ __forceinline__ void add_warps(const Shape& shape, const Shared& shared, int buffer,
                                              int warp, int stage, float (&sums)[2]) const {
        const float* from
            = shared.product.sums[buffer][warp] + (stage * MAX_ROWS + row) * UNIT + column % UNIT;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            sums[0] += w < shape.split ? from[w * SUMS] : 0;
            sums[1] += w < shape.split ? from[w * SUMS + 1] : 0;
        }
    }

    __device__ __forceinline__ float factor_of(const Args& args, const Shape& shape,
                                               const Shared& shared, int warp) const {
        const float* from = &shared.product.squares[warp][row];
        float squares = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) squares += w < shape.split ? from[w * MAX_ROWS] : 0;
        return inverse_root(squares * shape.inverse_size + args.eps);
    }
};

// The outputs of a group that all ranks have sent summands of.
__device__ __forceinline__ void add_ranks(const Args& args, const Operands& operands,
                                          const Shape& shape, int first_unit, Shared& shared,
                                          Patience& patience) {
    const Place own(args, shape, first_unit);
    const int64_t sent = operands.sent + own.sent();
    Summands summands = {};
    uint32_t addend = 0;
    do
        if (own.is_valid)
            summands.load(args, sent), addend = load_fresh_pair(operands.addend + own.place);
    while (patience.wait(args, shared,
                         !own.is_valid || (summands.are_there() && !is_empty(addend))));
    if (!own.is_valid) return;
    const uint32_t sum = summands.sum();
    store_fresh_pair(operands.out + own.place,
                     to_pair(low(sum) + low(addend), high(sum) + high(addend)));
    Summands::empty(args, sent);
}

}  // namespace
