// The tokens of a share, each warp some of them, as one softmax that goes on as they come.
#pragma once

#include "share.cuh"

namespace {

__device__ __forceinline__ void unpack(const uint4& v, float (&to)[8]) {
    const uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) to[2 * i] = low(pairs[i]), to[2 * i + 1] = high(pairs[i]);
}

// Softmax over a warp's tokens so far. A lane has 8 entries of the sums, of the tokens it takes.
struct Softmax {
    float best[GROUP_SIZE], total[GROUP_SIZE], sums[GROUP_SIZE][8];

    __device__ __forceinline__ Softmax() {
#pragma unroll
        for (int h = 0; h < GROUP_SIZE; h++) {
            best[h] = NO_SCORE;
            total[h] = 0;
            for (int i = 0; i < 8; i++) sums[h][i] = 0;
        }
    }

    __device__ __forceinline__ void add(int h, float score, const float (&value)[8]) {
        const float new_best = score > best[h] ? score : best[h];
        const float shrink = power_of_2(best[h] - new_best);
        const float weight = power_of_2(score - new_best);
        best[h] = new_best;
        total[h] = total[h] * shrink + weight;
        for (int i = 0; i < 8; i++) sums[h][i] = sums[h][i] * shrink + weight * value[i];
    }

    // The tokens that a warp takes at a time become one; to shared memory.
    __device__ __forceinline__ void store(Shared& shared, const Lane& me) {
        auto& own = shared.attention;
#pragma unroll
        for (int h = 0; h < GROUP_SIZE; h++) {
            float most = best[h];
            for (int step = TOKEN_LANES; step < 32; step *= 2) most = most_across(most, step);
            const float shrink = power_of_2(best[h] - most);
            total[h] *= shrink;
            for (int step = TOKEN_LANES; step < 32; step *= 2)
                total[h] = add_across(total[h], step);
            for (int i = 0; i < 8; i++) {
                sums[h][i] *= shrink;
                for (int step = TOKEN_LANES; step < 32; step *= 2)
                    sums[h][i] = add_across(sums[h][i], step);
                if (me.lane < TOKEN_LANES) own.sums[me.warp][h][me.lane * 8 + i] = sums[h][i];
            }
            if (me.lane == 0) {
                own.best[me.warp][h] = most;
                own.total[me.warp][h] = total[h];
            }
        }
    }
};

// The scores of a warp's tokens of the share.
__device__ __forceinline__ void attend_tokens(const Args& args, const Layer& layer, Share& share,
                                              Shared& shared, const Lane& me) {
    auto& own = shared.attention;
    const int entry = me.lane % TOKEN_LANES * 8;
    const float scale = args.scale * LOG2_E;
    float q[GROUP_SIZE][8];
#pragma unroll
    for (int h = 0; h < GROUP_SIZE; h++)
        for (int i = 0; i < 8; i++) q[h][i] = own.q[h][entry + i];
    Softmax softmax;
    int token = first_token(share, me);
    for (int first = share.start; first < share.end; first += AHEAD * TILE) {
#pragma unroll
        for (int a = 0; a < AHEAD; a++, token += TILE) {
            if (first + a * TILE >= share.end) break;
            float key[8], value[8];
            unpack(share.ahead[a].key, key);
            unpack(share.ahead[a].value, value);
            share.ahead[a] = load_token(args, layer, share, token + AHEAD * TILE, me.lane);
            if (token == share.position) {
                for (int i = 0; i < 8; i++) key[i] = own.new_key[entry + i];
                for (int i = 0; i < 8; i++) value[i] = own.new_value[entry + i];
            }
#pragma unroll
            for (int h = 0; h < GROUP_SIZE; h++) {
                float score = 0;
                for (int i = 0; i < 8; i++) score += q[h][i] * key[i];
                for (int step = TOKEN_LANES / 2; step > 0; step /= 2)
                    score = add_across(score, step);
                softmax.add(h, token < share.end ? score * scale : 2 * NO_SCORE, value);
            }
        }
    }
    softmax.store(shared, me);
}

}  // namespace
