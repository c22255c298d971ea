// Two stages times what is the same for all their rows, by tensor cores.
#pragma once

#include "ring.cuh"

namespace {

constexpr int CHAINS = 4;  // of sums, so that an addition need not wait for the last

__device__ __forceinline__ float add_chains(const float (&sums)[CHAINS][4], int i) {
    return (sums[0][i] + sums[1][i]) + (sums[2][i] + sums[3][i]);
}

// A lane's 16 bytes of 32 columns, a window, of its row.
__device__ __forceinline__ uint4 load_window(const unsigned char* row, int window, const Lane& me) {
    return load_shared_here(row + (window * 4 + me.quad) * 16);
}

// Of two neighbouring windows, of which odd rows read the second first: what a warp reads at once is
// then in different banks.
struct Windows {
    uint4 values[2];

    __device__ __forceinline__ void load(const unsigned char* row, int first, const Lane& me) {
        const int other = me.row % 2;
        values[0] = load_window(row, first + other, me);
        values[1] = load_window(row, first + 1 - other, me);
    }

    __device__ __forceinline__ uint4 get(int window, const Lane& me) const {
        const uint4 &v = values[window], &w = values[1 - window];
        const bool swap = me.row % 2;
        return {swap ? w.x : v.x, swap ? w.y : v.y, swap ? w.z : v.z, swap ? w.w : v.w};
    }
};

// `upper`, `lower`: the lane's row of either stage. No window is asked for ahead: registers are
// scarce, and another warp has work meanwhile.
template <int WINDOWS>
__device__ __forceinline__ void multiply(float (&sums)[CHAINS][4], const uint4 (&x)[WINDOWS],
                                         const unsigned char* upper, const unsigned char* lower,
                                         const Lane& me) {
#pragma unroll
    for (int first = 0; first < WINDOWS; first += 2) {
        Windows p, q;
        p.load(upper, first, me), q.load(lower, first, me);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint4 &v = x[first + i], a = p.get(i, me), b = q.get(i, me);
            multiply_add(sums[i * 2], a.x, b.x, a.y, b.y, v.x, v.y);
            multiply_add(sums[i * 2 + 1], a.z, b.z, a.w, b.w, v.z, v.w);
        }
    }
}

}  // namespace
