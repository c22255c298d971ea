// Attention of one token per row. Flash decoding: a row and KV head in shares of its tokens, one to a
// block; the last of them to be done merges all, always in the same order.
#pragma once

#include "barrier.cuh"
#include "heads.cuh"
#include "softmax.cuh"

namespace {

// The warps become one: an entry of the output, and the log2 of its weights' sum.
__device__ __forceinline__ float merge_warps(const Shared& shared, int member, int entry,
                                             float& lse) {
    const auto& own = shared.attention;
    float most = NO_SCORE, total = 0, sum = 0;
    for (int w = 0; w < WARPS; w++) most = own.best[w][member] > most ? own.best[w][member] : most;
    for (int w = 0; w < WARPS; w++) {
        const float weight = power_of_2(own.best[w][member] - most);
        total += weight * own.total[w][member];
        sum += weight * own.sums[w][member][entry];
    }
    lse = most + log2f(total);
    return sum / total;
}

// The shares of a row and KV head become one, always in the same order. `part`: the first head's.
__device__ __forceinline__ void merge_shares(const Args& args, int64_t part, int num_active,
                                             uint16_t* out) {
    for (int i = thread_index(); i < GROUP_SIZE * HEAD_DIM; i += THREADS) {
        const float* lse = args.partial_lse + part + i / HEAD_DIM * MAX_SPLITS;
        const float* from
            = args.partial + (part + i / HEAD_DIM * MAX_SPLITS) * HEAD_DIM + i % HEAD_DIM;
        float most = NO_SCORE, total = 0, sum = 0;
        for (int first = 0; first < num_active; first += MERGED) {
            float lses[MERGED], values[MERGED];  // all on their way at once
#pragma unroll
            for (int s = 0; s < MERGED; s++) {
                const bool is_one = first + s < num_active;
                lses[s] = is_one ? load_fresh_float(lse + first + s) : 2 * NO_SCORE;
                values[s] = is_one ? load_fresh_float(from + (first + s) * HEAD_DIM) : 0;
            }
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
        out[i] = to_half(sum / total);
    }
}

// The last share of a row and KV head to be done merges them.
__device__ __forceinline__ void run_share(const Args& args, const Layer& layer, Share& share,
                                          Shared& shared, const Lane& me) {
    auto& own = shared.attention;
    load_heads(args, layer, share, shared, me);
    sync_workers();
    attend_tokens(args, layer, share, shared, me);
    sync_workers();
    const int64_t head = static_cast<int64_t>(share.row) * args.heads + share.kv_head * GROUP_SIZE;
    uint16_t* out = at(args.attended, head * HEAD_DIM);
    for (int i = thread_index(); i < GROUP_SIZE * HEAD_DIM; i += THREADS) {
        float lse;
        const float result = merge_warps(shared, i / HEAD_DIM, i % HEAD_DIM, lse);
        if (share.num_active == 1) {
            out[i] = to_half(result);
        } else {
            const int64_t part = (head + i / HEAD_DIM) * MAX_SPLITS + share.split;
            args.partial[part * HEAD_DIM + i % HEAD_DIM] = result;
            if (i % HEAD_DIM == 0) args.partial_lse[part] = lse;
        }
    }
    if (share.num_active == 1) return;
    uint32_t* count = args.counts + share.row * args.kv_heads + share.kv_head;
    sync_workers();
    if (thread_index() == 0) own.arrived = add_and_see(count, 1);
    sync_workers();
    if (own.arrived != static_cast<uint32_t>(share.num_active - 1)) return;
    if (thread_index() == 0) *count = 0;  // for the next layer
    merge_shares(args, head * MAX_SPLITS, share.num_active, out);
}

// Rows and KV heads, each in shares. Between `arrive` and `wait`: what needs no projection.
__device__ __forceinline__ void attention(const Args& args, const Layer& layer, Barrier& barrier,
                                          Shared& shared, const Lane& me) {
    int work = block_index();
    const int num_work = shared.num_work;
    if (num_work > num_blocks()) {  // the plan of the start is another's now
        plan_share(args, work, shared);
        sync_workers();
    }
    Share share = open_share(args, layer, shared, me);
    barrier.wait();
    while (work < num_work) {
        if (share.num_active > 0) run_share(args, layer, share, shared, me);
        work += num_blocks();
        if (work >= num_work) break;
        sync_workers();  // before the next share's q
        plan_share(args, work, shared);
        sync_workers();
        share = open_share(args, layer, shared, me);
    }
}

}  // namespace
