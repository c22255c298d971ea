// A warp's softmax over the tiles of a row, on tensor cores: a tile's 16 tokens are their rows and a
// group's query heads their 8 columns, for the scores and, the weights having been transposed, for
// the sums of the values.
#pragma once

#include "heads.cuh"

namespace {

constexpr int BANDS = HEAD_DIM / 16;
constexpr float NO_SCORE = -1e30f;  // below any score, and finite

// The sums over some tiles of a row and KV head, for each query head: what their tokens' values add up
// to, by weights of which the greatest is 1.
struct Part {
    struct Head {
        float sums[HEAD_DIM];
        float best, total;  // greatest score, sum of the weights
        float unused[2];    // so that heads begin 4 banks apart, and 16 bytes have the last two
    } heads[GROUP_SIZE];
};

// The tiles so far. With quad = lane % 4 and group = lane / 4, a lane has the query heads 2 * quad
// and 2 * quad + 1, and of the sums entries group + 8 * i.
struct Softmax {
    Entries q;  // of query head `group`
    float best[2], total[2], sums[BANDS][4];

    __device__ __forceinline__ void open(const Args& args, const Place& place) {
        const int head = thread_index() % 32 / 4;
#pragma unroll
        for (int i = 0; i < WINDOWS; i++) q[i] = {0, 0, 0, 0};
        if (head < GROUP_SIZE) load_head(args, place.row, place.kv_head * GROUP_SIZE + head, q);
#pragma unroll
        for (int h = 0; h < 2; h++) best[h] = NO_SCORE, total[h] = 0;
#pragma unroll
        for (int i = 0; i < BANDS; i++)
            for (int j = 0; j < 4; j++) sums[i][j] = 0;
    }

    __device__ __forceinline__ void add(const Tile& tile, int num_tokens, float scale) {
        const int lane = thread_index() % 32, group = lane / 4, quad = lane % 4;
        float scores[2][4] = {};  // two each, so that an addition need not wait for the last
#pragma unroll
        for (int i = 0; i < WINDOWS; i++) {
            const int chunk = (i * 4 + quad) ^ (group % 2 * 4);
            const uint4 upper = load_shared(tile.keys + (group * CHUNKS + chunk) * 16);
            const uint4 lower = load_shared(tile.keys + ((group + 8) * CHUNKS + chunk) * 16);
            multiply_add(scores[0], upper.x, lower.x, upper.y, lower.y, q[i].x, q[i].y);
            multiply_add(scores[1], upper.z, lower.z, upper.w, lower.w, q[i].z, q[i].w);
        }
        float shrink[2], parts[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const bool is_seen = group + j / 2 * 8 < num_tokens;
            parts[j] = is_seen ? (scores[0][j] + scores[1][j]) * scale : 2 * NO_SCORE;
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float most = greater(greater(parts[h], parts[h + 2]), best[h]);
            for (int step = 4; step < 32; step *= 2) most = most_across(most, step);
            shrink[h] = power_of_2(best[h] - most);
            best[h] = most;
            parts[h] = power_of_2(parts[h] - most), parts[h + 2] = power_of_2(parts[h + 2] - most);
            total[h] = total[h] * shrink[h] + parts[h] + parts[h + 2];
        }
        const uint32_t upper = transpose(to_pair(parts[0], parts[1]));
        const uint32_t lower = transpose(to_pair(parts[2], parts[3]));
        const int token = lane % 8 + lane / 16 * 8;
#pragma unroll
        for (int i = 0; i < BANDS; i++) {
            const int chunk = (i * 2 + lane / 8 % 2) ^ (token % 8);
            const uint4 v = load_transposed(tile.values + (token * CHUNKS + chunk) * 16);
#pragma unroll
            for (int j = 0; j < 4; j++) sums[i][j] *= shrink[j % 2];
            multiply_add(sums[i], v.x, v.y, v.z, v.w, upper, lower);
        }
    }

    // After the last tile: the sums of the weights are each lane's tokens' until here.
    __device__ __forceinline__ void close() {
#pragma unroll
        for (int h = 0; h < 2; h++)
            for (int step = 4; step < 32; step *= 2) total[h] = add_across(total[h], step);
    }

    // f(head, h): the query heads of the lane.
    template <typename F>
    __device__ __forceinline__ void each_head(const F& f) const {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int head = thread_index() % 4 * 2 + h;
            if (head < GROUP_SIZE) f(head, h);
        }
    }

    // f(entry, sum): all that the lane has of its head h.
    template <typename F>
    __device__ __forceinline__ void each_entry(int h, const F& f) const {
        const int group = thread_index() % 32 / 4;
#pragma unroll
        for (int i = 0; i < BANDS; i++) {
            f(i * 16 + group, sums[i][h]);
            f(i * 16 + 8 + group, sums[i][2 + h]);
        }
    }

    __device__ __forceinline__ void store(Part& to) const {
        each_head([&](int head, int h) {
            Part::Head& of_head = to.heads[head];
            each_entry(h, [&](int entry, float sum) { of_head.sums[entry] = sum; });
            if (thread_index() % 32 < 4) of_head.best = best[h], of_head.total = total[h];
        });
    }

    // A whole row's.
    __device__ __forceinline__ void store_out(const Args& args, const Place& place) const {
        const int64_t first = static_cast<int64_t>(place.row) * args.kv_heads + place.kv_head;
        each_head([&](int head, int h) {
            uint16_t* to = at(args.out, (first * GROUP_SIZE + head) * HEAD_DIM);
            const float factor = divide(1, total[h]);
            each_entry(h, [&](int entry, float sum) { to[entry] = to_half(sum * factor); });
        });
    }
};

}  // namespace
