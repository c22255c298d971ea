// The outputs of a product: from what the warps of both blocks add up to what the next kernel takes.
#pragma once

#include "shared.cuh"

namespace {

struct alignas(8) Four {
    uint32_t pairs[2];

    __device__ __forceinline__ float get(int i) const {
        return i % 2 ? high(pairs[i / 2]) : low(pairs[i / 2]);
    }
    static __device__ __forceinline__ Four of(const float (&x)[4]) {
        return {to_pair(x[0], x[1]), to_pair(x[2], x[3])};
    }
    static __device__ __forceinline__ const Four& at(const uint16_t* p) {
        return *reinterpret_cast<const Four*>(p);
    }
};

// A thread's four neighbouring outputs of a group. What is added to them is on its way before they are
// there.
template <int ROWS, int TILES, int PARTS, bool ADD>
struct Output {
    using Own = Tiling<ROWS, TILES>;
    static constexpr int OWN_UNITS = Own::OWN_TILES / PARTS, FOURS = FEATURES / 4;
    static constexpr int ALL = OWN_UNITS * ROWS * FOURS;
    static constexpr int NUM = ALL < THREADS ? 1 : ALL / THREADS;  // of a thread
    static_assert(NUM <= 2);
    int own, unit, row, feature;  // own: which of this block's units
    bool is_valid;                  // false: there is none
    int64_t place;
    Four addend = {}, norm = {};

    // The `number`-th of a thread.
    __device__ __forceinline__ Output(const Args& args, int first_unit, int num_units, int number) {
        const int four = number * THREADS + thread_index();
        own = four / (ROWS * FOURS);
        row = four / FOURS % ROWS;
        const int index = cluster_rank() * OWN_UNITS + own;
        unit = first_unit + index;
        feature = unit * FEATURES + four % FOURS * 4;
        place = static_cast<int64_t>(row) * args.features + feature;
        is_valid = own < OWN_UNITS && index < num_units && row < args.rows && feature < args.features;
        if (!ADD || !is_valid) return;
        addend = Four::at(args.out + place);
        norm = Four::at(args.next_norm + feature);
    }

    // Always in the same order.
    __device__ __forceinline__ void add_up(const Args& args, const Shared<ROWS, TILES>& shared, int buffer,
                                           int part, float (&sums)[4]) const {
        const int lane = feature % 8 * 4 + row % 8 / 2, number = feature % FEATURES / 8 * 2 + row % 2;
#pragma unroll
        for (int i = 0; i < 4; i++) sums[i] = 0;
#pragma unroll
        for (int rank = 0; rank < 2; rank++)
#pragma unroll
            for (int columns = 0; columns < Own::PARTS_OF_SLICE; columns++) {
                const auto& from
                    = shared.sums[buffer][rank][columns][own * PARTS + part][row / 8];
#pragma unroll
                for (int i = 0; i < 4; i++)
                    sums[i] += reinterpret_cast<const float*>(&from[lane + i * 4])[number];
            }
#pragma unroll
        for (int i = 0; i < 4; i++) sums[i] *= args.squares == nullptr ? 1 : shared.factors[row];
        if (args.bias == nullptr) return;
        const Four bias = Four::at(args.bias + part * args.features + feature);
#pragma unroll
        for (int i = 0; i < 4; i++) sums[i] += bias.get(i);
    }

    __device__ __forceinline__ void find(const Args& args, const Shared<ROWS, TILES>& shared, int buffer,
                                         float (&result)[4]) const {
        add_up(args, shared, buffer, 0, result);
        if constexpr (PARTS == 1) return;
        float ups[4];
        add_up(args, shared, buffer, 1, ups);
#pragma unroll
        for (int i = 0; i < 4; i++)
            result[i] = divide(result[i], 1 + power_of_2(-1.4426950408889634f * result[i])) * ups[i];
    }

    // By all threads.
    __device__ __forceinline__ void store(const Args& args, const Shared<ROWS, TILES>& shared,
                                          int buffer) const {
        float square = 0;
        if (is_valid) {
            float result[4];
            find(args, shared, buffer, result);
            if constexpr (ADD)
#pragma unroll
                for (int i = 0; i < 4; i++) result[i] += addend.get(i);
            const Four rounded = Four::of(result);
            *reinterpret_cast<Four*>(args.out + place) = rounded;
            if constexpr (ADD) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    square += rounded.get(i) * rounded.get(i);
                    result[i] = rounded.get(i) * norm.get(i);
                }
                *reinterpret_cast<Four*>(args.scaled + place) = Four::of(result);
            }
        }
        if constexpr (ADD) {
            for (int step = FOURS / 2; step > 0; step /= 2) square = add_across(square, step);
            if (is_valid && feature % FEATURES == 0)
                args.next_squares[static_cast<int64_t>(row) * args.num_units() + unit] = square;
        }
    }
};

}  // namespace
