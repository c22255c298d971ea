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

// 8 columns of x to a row, 32 lanes side by side, where their quads read them. A window of codes of a
// byte is two of x: a quad's 16 columns are in both, each word's four as `Codes` has them. Of INT4 a
// window has two of a group's eight planes, a quad's 4 columns of each.
template <Format FORMAT>
__device__ __forceinline__ void place_inputs(unsigned char* row, const uint4& v, const Lane& me) {
    auto* to = reinterpret_cast<uint4*>(row);
    if (FORMAT == PLAIN) {
        to[me.lane] = v;
        return;
    }
    if (FORMAT == INT4) {
        const int plane = me.lane / 2, quad = me.lane % 2 * 2;
        auto* half = reinterpret_cast<uint2*>(to + plane / 2 * 4 + quad) + plane % 2;
        half[0] = {v.x, v.y}, half[2] = {v.z, v.w};
        return;
    }
    to[(me.lane & ~7) + me.lane % 2 * 4 + me.lane % 8 / 2]
        = {lower_halves(v.x, v.y), upper_halves(v.x, v.y), lower_halves(v.z, v.w),
           upper_halves(v.z, v.w)};
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

constexpr uint32_t MINUS_ZERO = 0xc308c308u;  // -136: a code is 128 more than it is, and 8 is zero

// The same 16 bits of two neighbouring words: four planes of two columns.
__device__ __forceinline__ uint32_t planes_of(uint32_t word, uint32_t next, int half) {
    return half == 0 ? lower_halves(word, next) : upper_halves(word, next);
}

__device__ __forceinline__ uint32_t code_of(uint32_t planes, int plane) {
    return masked_or(planes >> plane * 4, 0x000f000fu, 0x43004300u);
}

// A group of the outputs of a stage. `x`: the lane's of the group; `zeros`: MINUS_ZERO times its sum.
__device__ __forceinline__ void multiply_tiles(float (&sums)[4], const uint4 (&x)[4],
                                               const float (&zeros)[4], Stages& stages, int stage,
                                               int group, const Lane& me) {
    const unsigned char* words = stages.row(stage, 0) + group * TILE_BYTES + me.lane * 16;
    const uint4 upper = load_shared_here(words), lower = load_shared_here(words + HALF_STAGE);
    float parts[2][4] = {};
#pragma unroll
    for (int plane = 0; plane < 8; plane++) {
        const int half = plane / 4;
        const uint4& v = x[plane / 2];
        multiply_add(parts[plane % 2], code_of(planes_of(upper.x, upper.y, half), plane % 4),
                     code_of(planes_of(lower.x, lower.y, half), plane % 4),
                     code_of(planes_of(upper.z, upper.w, half), plane % 4),
                     code_of(planes_of(lower.z, lower.w, half), plane % 4),
                     plane % 2 == 0 ? v.x : v.z, plane % 2 == 0 ? v.y : v.w);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const auto part = [&](int first) {
            return to_float(stages.scale(stage, first + i / 2, me.row, group));
        };
        sums[i] += part(0) * (parts[0][i] + parts[1][i] + zeros[i]);
        if (HAS_OFFSETS) sums[i] += part(2) * (zeros[i] * (-1.0f / 136));
    }
}

// Up to two stages of INT4, group by group. `x`: the lane's row of it.
__device__ __forceinline__ void multiply_groups(float (&first_sums)[4], float (&second_sums)[4],
                                                const unsigned char* x, Stages& stages, int first,
                                                int second, const Lane& me) {
#pragma unroll 1
    for (int group = 0; group < GROUPS; group++) {
        uint4 v[4];
        float zeros[4] = {};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            v[i] = load_shared_here(window_of(x, group * 4 + i, me));
            multiply_add(zeros, MINUS_ZERO, MINUS_ZERO, MINUS_ZERO, MINUS_ZERO, v[i].x, v[i].y);
            multiply_add(zeros, MINUS_ZERO, MINUS_ZERO, MINUS_ZERO, MINUS_ZERO, v[i].z, v[i].w);
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (i == 1 && second == first) break;
            multiply_tiles(i == 0 ? first_sums : second_sums, v, zeros, stages,
                           i == 0 ? first : second, group, me);
        }
    }
}

}  // namespace
