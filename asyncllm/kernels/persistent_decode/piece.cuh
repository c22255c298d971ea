// The inputs of a product: where its operands are, and a warp's slices of x on their way from the blocks
// that made them to the tensor cores.
#pragma once

#include "exchange.cuh"
#include "weights.cuh"

namespace {

struct Operands {
    const unsigned char* x;
    const void *norm, *bias, *scales;  // may be null
    const unsigned char* addend;  // may be null: of the outputs' shape
    unsigned char* out;
    int64_t sent = 0;  // of several ranks' summands: where they go in each rank's memory
};

// `exchange`: the layer's; `input`: [rows, hidden], what the layer before it left.
__device__ __forceinline__ Operands operands_of(const Args& args, const Layer& layer, int kind,
                                                const Shape& shape, unsigned char* exchange,
                                                const void* input) {
    const auto* given = static_cast<const unsigned char*>(input);
    return {shape.x == INPUT ? given : exchange + shape.x, layer.norms[kind % 4],
            layer.biases[kind % 4], layer.scales[kind % 4],
            shape.addend == INPUT ? given : shape.addend == NONE ? nullptr : exchange + shape.addend,
            shape.out == NONE ? static_cast<unsigned char*>(args.logits) : exchange + shape.out};
}

// A warp's slice of x, of each row a lane's 8 columns of every 256, and of the norm's weights; on their
// way.
template <int ROWS, Format FORMAT>
struct Piece {
    static constexpr int PARTS = SLICE<FORMAT> / 256, PART_BYTES = 512;
    uint4 values[PARTS][ROWS] = {};
    uint4 norm[PARTS] = {};

    static __device__ __forceinline__ int place_of(int slice, const Lane& me) {
        return (slice * SLICE<FORMAT> + me.lane * 8) * 2;
    }

    __device__ __forceinline__ void load(const Operands& operands, int size, int rows, int slice,
                                         const Lane& me) {
        const int place = place_of(slice, me);
#pragma unroll
        for (int p = 0; p < PARTS; p++) {
            if (operands.norm != nullptr)
                norm[p] = load_constant(static_cast<const unsigned char*>(operands.norm) + place
                                        + p * PART_BYTES);
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                if (r >= rows) break;
                values[p][r] = load_fresh(operands.x + place + p * PART_BYTES + r * size * 2);
            }
        }
    }

    __device__ __forceinline__ bool is_there(int rows) const {
        bool is_there = true;
#pragma unroll
        for (int p = 0; p < PARTS; p++)
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                if (r >= rows) break;
                is_there = is_there && !is_empty(values[p][r]);
            }
        return is_there;
    }

    // If there are many rows, only the first is looked at until it is there: all are made at once.
    __device__ __forceinline__ void load_missing(const Operands& operands, int size, int rows,
                                                 int slice, const Lane& me) {
        const int place = place_of(slice, me);
        const int num = rows > 2 && is_empty(values[0][0]) ? 1 : rows;
#pragma unroll
        for (int p = 0; p < PARTS; p++)
#pragma unroll
            for (int r = 0; r < ROWS; r++)
                if (r < num && is_empty(values[p][r]))
                    values[p][r] = load_fresh(operands.x + place + p * PART_BYTES + r * size * 2);
    }

    static __device__ __forceinline__ uint32_t weigh(uint32_t pair, uint32_t by, float& squares) {
        squares += low(pair) * low(pair) + high(pair) * high(pair);
        return to_pair(low(pair) * low(by), high(pair) * high(by));
    }

    // To shared memory, times the norm's weights, rounded as everywhere; the factor of a row comes
    // at the end. One part after the other takes the first one's place: the code for both would be too
    // long.
    __device__ __forceinline__ void store(bool has_norm, int rows, float (&squares)[ROWS],
                                          Inputs& to, const Lane& me) {
#pragma unroll 1
        for (int p = 0; p < PARTS; p++) {
            const uint4& by = norm[0];
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                if (r >= rows) break;
                uint4 v = values[0][r];
                if (has_norm)
                    v = {weigh(v.x, by.x, squares[r]), weigh(v.y, by.y, squares[r]),
                         weigh(v.z, by.z, squares[r]), weigh(v.w, by.w, squares[r])};
                place_inputs<FORMAT>(to.row(r) + p * PART_BYTES, v, me);
            }
            if (PARTS == 1) break;
            norm[0] = norm[PARTS - 1];
#pragma unroll
            for (int r = 0; r < ROWS; r++) values[0][r] = values[PARTS - 1][r];
        }
    }
};

}  // namespace
