// The tokens of a split, each warp some of them, as one softmax that goes on as they come.
#pragma once

#include "ring.cuh"
#include "weights.cuh"

namespace {

// Softmax over a warp's tokens so far. A lane has two heads, 2 * quad and the next: the sums of their
// entries i * 16 + row (0 and 1) and 8 further (2 and 3), and its own row's part of their totals.
struct Softmax {
    float best[2] = {NO_SCORE, NO_SCORE}, total[2] = {};
    float sums[HEAD_DIM / 16][4] = {};

    // Scores of the lane's row of two stages, for both heads; they become weights.
    __device__ __forceinline__ void weigh(float (&scores)[4]) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float most = scores[h] > scores[2 + h] ? scores[h] : scores[2 + h];
            for (int step = 4; step < 32; step *= 2) most = most_across(most, step);
            if (most < best[h]) most = best[h];
            const float shrink = power_of_2(best[h] - most);
            best[h] = most;
            scores[h] = power_of_2(scores[h] - most);
            scores[2 + h] = power_of_2(scores[2 + h] - most);
            total[h] = total[h] * shrink + scores[h] + scores[2 + h];
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 16; i++) sums[i][h] *= shrink, sums[i][2 + h] *= shrink;
        }
    }

    // Values of two stages, by the weights of their tokens.
    __device__ __forceinline__ void add(const float (&weights)[4], Stages& stages, int upper,
                                        int lower, const Lane& me) {
        const uint32_t b0 = transpose(to_pair(weights[0], weights[1]));
        const uint32_t b1 = transpose(to_pair(weights[2], weights[3]));
        const int token = me.lane % 8, half = me.lane / 8 % 2;
        const unsigned char* values
            = stages.row(me.lane < 16 ? upper : lower, token) + HEAD_DIM * 2;
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 16; i++) {
            const uint4 v = load_transposed(values + ((2 * i + half) ^ token) * 16);
            multiply_add(sums[i], v.x, v.y, v.z, v.w, b0, b1);
        }
    }

    __device__ __forceinline__ void store(Shared& shared, const Lane& me) {
        auto& own = shared.attention;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            for (int step = 4; step < 32; step *= 2) total[h] = add_across(total[h], step);
            const int head = 2 * me.quad + h;
            if (head >= GROUP_SIZE) continue;
            own.best[me.warp][head] = best[h], own.total[me.warp][head] = total[h];
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 16; i++) {
                own.sums[me.warp][head][i * 16 + me.row] = sums[i][h];
                own.sums[me.warp][head][i * 16 + 8 + me.row] = sums[i][2 + h];
            }
        }
    }
};

// The new token's key and value take their place among those from the pages.
__device__ __forceinline__ void place_new(const Split& split, int first, int stage, Shared& shared,
                                          const Lane& me) {
    constexpr int CHUNKS = HEAD_DIM / 8;
    const int token = split.position - first;
    if (token < 0 || token >= TOKENS || split.end <= split.position) return;
    if (me.lane < 2 * CHUNKS) {
        const int chunk = me.lane % CHUNKS, is_value = me.lane / CHUNKS;
        unsigned char* row = shared.ring[me.warp].row(stage, token) + is_value * HEAD_DIM * 2;
        *reinterpret_cast<uint4*>(row + (is_value ? chunk ^ token : chunk) * 16)
            = load_shared(shared.attention.new_token + me.lane * 8);
    }
    show_to_copies();
    sync_warp();
}

// By a warp that has tokens of the split.
__device__ __forceinline__ void attend_tokens(const Args& args, const Split& split, Shared& shared,
                                              Ring& ring, const Lane& me) {
    Stages& stages = shared.ring[me.warp];
    const float scale = args.scale * LOG2_E;
    uint4 q[HEAD_DIM / 32];
#pragma unroll
    for (int window = 0; window < HEAD_DIM / 32; window++)
        q[window] = load_shared(shared.attention.q[me.row < GROUP_SIZE ? me.row : 0]
                                + (window * 4 + me.quad) * 8);
    Softmax softmax;
#pragma unroll 1
    for (int first = split.start + me.warp * TOKENS; first < split.end; first += 2 * TILE) {
        const bool is_whole = first + TILE < split.end;
        const int upper = ring.next(shared, me), lower = is_whole ? ring.next(shared, me) : upper;
        place_new(split, first, upper, shared, me);
        if (is_whole) place_new(split, first + TILE, lower, shared, me);
        float parts[CHAINS][4] = {};
        multiply(parts, q, stages.row(upper, me.row), stages.row(lower, me.row), me);
        float scores[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int token = first + me.row + (i < 2 ? 0 : TILE);
            scores[i] = token < split.end ? add_chains(parts, i) * scale : 2 * NO_SCORE;
        }
        softmax.weigh(scores);
        softmax.add(scores, stages, upper, lower, me);
        ring.give_back(shared, upper, lower, me);
    }
    softmax.store(shared, me);
}

}  // namespace
