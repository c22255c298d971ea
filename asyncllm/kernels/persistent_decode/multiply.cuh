// Two stages times what is the same for all their rows, by tensor cores.
#pragma once

#include "ring.cuh"

namespace {

constexpr int CHAINS = 4;  // of sums, so that an addition need not wait for the last

__device__ __forceinline__ float add_chains(const float (&sums)[CHAINS][4], int i) {
    return (sums[0][i] + sums[1][i]) + (sums[2][i] + sums[3][i]);
}

// `upper`, `lower`: the lane's row of either stage. No window is asked for ahead: registers are
// scarce, and another warp has work meanwhile.
template <int WINDOWS>
__device__ __forceinline__ void multiply(float (&sums)[CHAINS][4], const uint4 (&x)[WINDOWS],
                                         const unsigned char* upper, const unsigned char* lower,
                                         const Lane& me) {
#pragma unroll
    for (int first = 0; first < WINDOWS; first += 2) {
        const Windows p = load_windows<load_shared_here>(upper, first, me);
        const Windows q = load_windows<load_shared_here>(lower, first, me);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint4 &v = x[first + i], a = p.get(i, me), b = q.get(i, me);
            multiply_add(sums[i * 2], a.x, b.x, a.y, b.y, v.x, v.y);
            multiply_add(sums[i * 2 + 1], a.z, b.z, a.w, b.w, v.z, v.w);
        }
    }
}

}  // namespace
