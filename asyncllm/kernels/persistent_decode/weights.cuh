// Weights in shared memory become the operands of tensor cores, by their bits, and meet the columns of x
// that `place_inputs` has put where their lanes read.
#pragma once

#include "shared.cuh"

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

// A word's four codes of a byte as bfloat16: columns 0 and 2, 1 and 3.
struct Codes {
    uint32_t even, odd;
};

// The value of a code is so many times what `codes_of` makes of it: e4m3 keeps the bias of its exponent.
template <Format FORMAT>
constexpr float UNIT_OF = FORMAT == FP8 ? 0x1p120f : 1;

template <Format FORMAT>
__device__ __forceinline__ Codes codes_of(uint32_t word) {
    if (FORMAT == FP8)  // sign, exponent and mantissa to their places
        return {(word << 8 & 0x80008000u) | (word << 4 & 0x07f007f0u),
                (word & 0x80008000u) | (word >> 4 & 0x07f007f0u)};
    // 128 + the lower bits, less 128, or 256 where the sign is set.
    const auto number_of = [](uint32_t pair) {
        return subtract_pairs(masked_or(pair, 0x007f007fu, 0x43004300u),
                              masked_or(pair, 0x00800080u, 0x43004300u));
    };
    return {number_of(word), number_of(word >> 8)};
}

// 8 columns of x to a row, 32 lanes side by side. A window of codes of a byte is two of x: a quad's 16
// columns are in both, each word's four as `Codes` has them.
template <Format FORMAT>
__device__ __forceinline__ void place_inputs(unsigned char* row, const uint4& v, const Lane& me) {
    auto* to = reinterpret_cast<uint4*>(row);
    if (FORMAT == PLAIN) {
        to[me.lane] = v;
        return;
    }
    const auto even = [](uint32_t a, uint32_t b) { return (a & 0xffffu) | b << 16; };
    const auto odd = [](uint32_t a, uint32_t b) { return a >> 16 | (b & 0xffff0000u); };
    to[(me.lane & ~7) + me.lane % 2 * 4 + me.lane % 8 / 2]
        = {even(v.x, v.y), odd(v.x, v.y), even(v.z, v.w), odd(v.z, v.w)};
}

template <Format FORMAT>
__device__ __forceinline__ void multiply_word(float (&sums)[4], uint32_t upper, uint32_t lower,
                                              uint32_t even_x, uint32_t odd_x) {
    const Codes a = codes_of<FORMAT>(upper), b = codes_of<FORMAT>(lower);
    multiply_add(sums, a.even, b.even, a.odd, b.odd, even_x, odd_x);
}

// As `multiply`, of codes of a byte. `x`: the lane's row of it.
template <Format FORMAT>
__device__ __forceinline__ void multiply_bytes(float (&sums)[CHAINS][4], const unsigned char* x,
                                               const unsigned char* upper,
                                               const unsigned char* lower, const Lane& me) {
#pragma unroll 1
    for (int first = 0; first < COLUMNS / 64; first += 2) {
        const Windows p = load_windows<load_shared_here>(upper, first, me);
        const Windows q = load_windows<load_shared_here>(lower, first, me);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint4 a = p.get(i, me), b = q.get(i, me);
            const uint4 v = load_shared_here(window_of(x, 2 * (first + i), me));
            const uint4 w = load_shared_here(window_of(x, 2 * (first + i) + 1, me));
            multiply_word<FORMAT>(sums[0], a.x, b.x, v.x, v.y);
            multiply_word<FORMAT>(sums[1], a.y, b.y, v.z, v.w);
            multiply_word<FORMAT>(sums[2], a.z, b.z, w.x, w.y);
            multiply_word<FORMAT>(sums[3], a.w, b.w, w.z, w.w);
        }
    }
}

}  // namespace
