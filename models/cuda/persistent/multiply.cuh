// Two stages times what is the same for all their rows, by tensor cores.
#pragma once

#include "ring.cuh"

namespace {

constexpr int CHAINS = 4;  // of sums, so that an addition need not wait for the last

__device__ __forceinline__ float add_chains(const float (&sums)[CHAINS][4], int i) {
    return (sums[0][i] + sums[1][i]) + (sums[2][i] + sums[3][i]);
}

// A lane's 16 bytes of 32 columns of its row.
__device__ __forceinline__ uint4 load_window(const unsigned char* row, int window, const Lane& me) {
    return load_shared_here(row + (window * 4 + me.quad) * 16);
}

// `upper`, `lower`: the lane's row of either stage. The loads are some windows ahead of their use, no
// more: registers are scarce.
template <int WINDOWS>
__device__ __forceinline__ void multiply(float (&sums)[CHAINS][4], const uint4 (&x)[WINDOWS],
                                         const unsigned char* upper, const unsigned char* lower,
                                         const Lane& me) {
    constexpr int LOADED = WINDOWS < 3 ? WINDOWS : 3;
    uint4 p[LOADED], q[LOADED] = {};
    const bool is_two = lower != upper;
#pragma unroll
    for (int window = 0; window < LOADED; window++) {
        p[window] = load_window(upper, window, me);
        if (is_two) q[window] = load_window(lower, window, me);
    }
#pragma unroll
    for (int window = 0; window < WINDOWS; window++) {
        const uint4 &v = x[window], &a = p[window % LOADED], &b = q[window % LOADED];
        multiply_add(sums[window % 2 * 2], a.x, b.x, a.y, b.y, v.x, v.y);
        multiply_add(sums[window % 2 * 2 + 1], a.z, b.z, a.w, b.w, v.z, v.w);
        if (window + LOADED < WINDOWS) {
            p[window % LOADED] = load_window(upper, window + LOADED, me);
            if (is_two) q[window % LOADED] = load_window(lower, window + LOADED, me);
        }
    }
}

}  // namespace
