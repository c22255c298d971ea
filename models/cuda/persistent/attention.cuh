// Attention of one token per row. Flash decoding: a row and KV head in shares of its tokens, one to a
// block; each of these blocks then merges all shares of some entries, always in the same order.
#pragma once

#include "heads.cuh"
#include "scores.cuh"

namespace {

// The warps that have tokens become one: an entry of the output, and the log2 of its weights' sum.
__device__ __forceinline__ float merge_warps(const Shared& shared, const Share& share, int member,
                                             int entry, float& lse) {
    const auto& own = shared.attention;
    const int num_stages = (share.end - share.start + TOKENS - 1) / TOKENS;
    float most = NO_SCORE, total = 0, sum = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++)
        if (w < num_stages && own.best[w][member] > most) most = own.best[w][member];
#pragma unroll
    for (int w = 0; w < WARPS; w++)
        if (w < num_stages) {
            const float weight = power_of_2(own.best[w][member] - most);
            total += weight * own.total[w][member];
            sum += weight * own.sums[w][member][entry];
        }
    lse = most + log2f(total);
    return sum / total;
}

// Neighbouring entries are one word.
__device__ __forceinline__ void store_entry(uint16_t* out, int entry, bool is_one, float value) {
    const uint32_t half = to_half(value);
    const uint32_t other = from_lane(static_cast<int>(half), thread_index() % 32 ^ 1);
    if (is_one && entry % 2 == 0) store_fresh_pair(out + entry, half | other << 16);
}

// Where the shares of a row and KV head leave their results.
struct Parts {
    float* values;  // [num_blocks, GROUP_SIZE, HEAD_DIM], by the block whose share it is
    float* lses;    // [num_blocks, GROUP_SIZE]

    __device__ __forceinline__ Parts(const Exchange& exchange)
        : values(reinterpret_cast<float*>(at(exchange.base, exchange.shares))),
          lses(values + num_blocks() * GROUP_SIZE * HEAD_DIM) {}
};

// An entry of all shares of a row and KV head, always in the same order. By all lanes of a warp.
// `first_block`: of the first share; the next ones' are `step` apart.
__device__ __forceinline__ float merge_entry(const Args& args, const Parts& parts, int entry,
                                             int first_block, int step, int num_active,
                                             Shared& shared, Patience& patience) {
    float most = NO_SCORE, total = 0, sum = 0;
#pragma unroll 1
    for (int first = 0; first < num_active; first += MERGED) {
        float lses[MERGED], values[MERGED];  // all on their way at once
        bool is_there;
        do {
            is_there = true;
#pragma unroll
            for (int s = 0; s < MERGED; s++) {
                const int block = first_block + (first + s) * step;
                const bool is_one = first + s < num_active;
                const int place = block * GROUP_SIZE + entry / HEAD_DIM;
                lses[s] = is_one ? load_fresh_float(parts.lses + place) : 2 * NO_SCORE;
                values[s] = is_one ? load_fresh_float(
                    parts.values + block * GROUP_SIZE * HEAD_DIM + entry) : 0;
            }
#pragma unroll
            for (int s = 0; s < MERGED; s++)
                is_there = is_there && !is_empty(to_bits(lses[s])) && !is_empty(to_bits(values[s]));
        } while (patience.wait(args, shared, is_there));
        float new_most = most;
#pragma unroll
        for (int s = 0; s < MERGED; s++) new_most = lses[s] > new_most ? lses[s] : new_most;
        const float shrink = power_of_2(most - new_most);
        total *= shrink, sum *= shrink;
        most = new_most;
#pragma unroll
        for (int s = 0; s < MERGED; s++) {
            const float weight = power_of_2(lses[s] - most);
            total += weight, sum += weight * values[s];
        }
    }
    return sum / total;
}

// A share of a row and KV head, and the entries of it that this block merges.
__device__ __forceinline__ void run_share(const Args& args, const Layer& layer,
                                          const Exchange& exchange, const Share& share, int work,
                                          Shared& shared, Ring& ring, Patience& patience,
                                          const Lane& me) {
    constexpr int ENTRIES = GROUP_SIZE * HEAD_DIM;
    load_heads(args, layer, exchange, share, shared, patience, me);
    sync_workers();
    if (share.start + me.warp * TOKENS < share.end) attend_tokens(args, share, shared, ring, me);
    sync_workers();
    const int64_t head = static_cast<int64_t>(share.row) * args.heads + share.kv_head * GROUP_SIZE;
    uint16_t* out = at(exchange.base, exchange.attended + head * HEAD_DIM);
    const Parts parts(exchange);
#pragma unroll 1
    for (int first = 0; first < ENTRIES; first += THREADS) {
        const int i = first + thread_index();
        const bool is_one = i < ENTRIES;
        float lse = 0, result = 0;
        if (is_one) result = merge_warps(shared, share, i / HEAD_DIM, i % HEAD_DIM, lse);
        if (share.num_active == 1) {
            store_entry(out, i, is_one, result);
        } else if (is_one) {
            store_fresh_float(parts.values + work * ENTRIES + i, result);
            if (i % HEAD_DIM == 0)
                store_fresh_float(parts.lses + work * GROUP_SIZE + i / HEAD_DIM, lse);
        }
    }
    if (share.num_active == 1) return;
    const int step = args.rows * args.kv_heads;
    const int begin = ENTRIES / 2 * share.split / share.num_active * 2;
    const int end = ENTRIES / 2 * (share.split + 1) / share.num_active * 2;
#pragma unroll 1
    for (int first = begin + me.warp * 32; first < end; first += THREADS) {
        const int i = first + me.lane;
        const float result = merge_entry(args, parts, i < end ? i : begin, work % step, step,
                                         share.num_active, shared, patience);
        store_entry(out, i, i < end, result);
    }
}

// All shares of the block; `first`: of them.
__device__ __forceinline__ void attention(const Args& args, const Layer& layer,
                                          const Exchange& exchange, const Share& first,
                                          Shared& shared, Ring& ring, Patience& patience,
                                          const Lane& me) {
    const int num_shares = count_shares(args);
#pragma unroll 1
    for (int work = block_index(); work < num_shares; work += num_blocks()) {
        const Share share = work == block_index() ? first : share_of(args, work);
        sync_workers();  // nobody still reads the product's sums, or the last share's
        if (share.num_active > 0)
            run_share(args, layer, exchange, share, work, shared, ring, patience, me);
    }
}

}  // namespace
