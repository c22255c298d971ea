// Attention of one token per row. Flash decoding: a row and KV head in splits of its tokens, one to a
// block; each of these blocks then merges all splits of some entries, always in the same order.
#pragma once

#include "heads.cuh"
#include "scores.cuh"

namespace {

// The warps that have tokens become one: two entries of the output, and the log2 of the sum of its
// weights.
__device__ __forceinline__ float merge_warps(const Shared& shared, const Split& split, int member,
                                             int entry, float (&results)[2]) {
    const auto& own = shared.attention;
    const int num_stages = (split.end - split.start + TOKENS - 1) / TOKENS;
    float best[WARPS], most = NO_SCORE, total = 0, sums[2] = {};
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        best[w] = w < num_stages ? own.best[w][member] : 2 * NO_SCORE;
        most = greater(best[w], most);
    }
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        const float weight = power_of_2(best[w] - most);
        total += weight * (w < num_stages ? own.total[w][member] : 0);
        sums[0] += weight * (w < num_stages ? own.sums[w][member][entry] : 0);
        sums[1] += weight * (w < num_stages ? own.sums[w][member][entry + 1] : 0);
    }
    results[0] = divide(sums[0], total), results[1] = divide(sums[1], total);
    return most + log2f(total);
}

// Where the splits of a row and KV head leave their results.
struct Parts {
    float* values;  // [num_blocks, GROUP_SIZE, HEAD_DIM], by the number of the split
    float* lses;    // [num_blocks, GROUP_SIZE]

    __device__ __forceinline__ Parts(unsigned char* exchange, const Shared& shared)
        : values(reinterpret_cast<float*>(exchange + shared.splits)),
          lses(values + num_blocks() * GROUP_SIZE * HEAD_DIM) {}
};

// A lane's two neighbouring entries of a split.
struct Part {
    float lse = 2 * NO_SCORE, values[2] = {};

    // `work`: the split's number.
    __device__ __forceinline__ void load(const Parts& parts, int work, int entry) {
        const float* from = parts.values + work * GROUP_SIZE * HEAD_DIM + entry;
        lse = load_fresh_float(parts.lses + work * GROUP_SIZE + entry / HEAD_DIM);
        values[0] = load_fresh_float(from), values[1] = load_fresh_float(from + 1);
    }

    __device__ __forceinline__ bool is_there() const {
        return !is_empty(to_bits(lse)) && !is_empty(to_bits(values[0]))
            && !is_empty(to_bits(values[1]));
    }

    // All lanes' of `width` neighbours, a power of 2.
    __device__ __forceinline__ uint32_t merge(int width) const {
        float most = lse;
        for (int step = 1; step < width; step *= 2) most = most_across(most, step);
        float total = power_of_2(lse - most);
        float sums[2] = {total * values[0], total * values[1]};
        for (int step = 1; step < width; step *= 2) {
            total = add_across(total, step);
            sums[0] = add_across(sums[0], step), sums[1] = add_across(sums[1], step);
        }
        return to_pair(divide(sums[0], total), divide(sums[1], total));
    }
};

// The splits of a row and KV head become one, a part of its entries in each of their blocks, always
// in the same order: a lane has two entries of a split. `out`: the first head's.
__device__ __forceinline__ void merge_splits(const Args& args, const Parts& parts, const Split& split,
                                             uint16_t* out, Shared& shared, Patience& patience) {
    const int width = split.num_active, thread = thread_index(), number = thread % width;
    const int work = split.work + (number - split.number) * args.rows * args.kv_heads;
    const int pairs_at_once = THREADS / width;
#pragma unroll 1
    for (int first = split.first_pair; first < split.end_pair; first += pairs_at_once) {
        const int pair = first + thread / width;
        const bool is_valid = pair < split.end_pair;
        Part part;
        if (is_valid) part.load(parts, work, 2 * pair);
        while (patience.wait(args, shared, part.is_there()))
            if (is_valid) part.load(parts, work, 2 * pair);
        const uint32_t merged = part.merge(width);
        if (number == 0 && is_valid) store_fresh_pair(out + 2 * pair, merged);
    }
}

// A split of a row and KV head, and the entries of it that this block merges.
__device__ __forceinline__ void run_split(const Args& args, const Layer& layer,
                                          unsigned char* exchange, const Split& split,
                                          Shared& shared, Ring& ring, Patience& patience,
                                          const Lane& me) {
    load_heads(args, layer, exchange, split, shared, patience, me);
    sync_workers();
    if (split.start + me.warp * TOKENS < split.end) attend_tokens(args, split, shared, ring, me);
    sync_workers();
    const int head = split.row * args.heads + split.kv_head * GROUP_SIZE;
    auto* out = reinterpret_cast<uint16_t*>(exchange + shared.shapes[OUTPUT].x) + head * HEAD_DIM;
    const Parts parts(exchange, shared);
#pragma unroll 1
    for (int i = thread_index(); i < PAIRS; i += THREADS) {
        const int member = 2 * i / HEAD_DIM;
        float results[2];
        const float lse = merge_warps(shared, split, member, 2 * i % HEAD_DIM, results);
        if (split.num_active == 1) {
            store_fresh_pair(out + 2 * i, to_pair(results[0], results[1]));
            continue;
        }
        float* to = parts.values + split.work * GROUP_SIZE * HEAD_DIM + 2 * i;
        store_fresh_float(to, results[0]), store_fresh_float(to + 1, results[1]);
        if (2 * i % HEAD_DIM == 0)
            store_fresh_float(parts.lses + split.work * GROUP_SIZE + member, lse);
    }
    if (split.num_active > 1) merge_splits(args, parts, split, out, shared, patience);
}

// The block's splits.
__device__ __forceinline__ void attention(const Args& args, const Layer& layer,
                                          unsigned char* exchange, Shared& shared, Ring& ring,
                                          Patience& patience, const Lane& me) {
#pragma unroll 1
    for (int s = 0; has_split(shared, s); s++) {
        sync_workers();  // nobody still reads the product's sums, or the last split's
        const Split split = shared.own_splits[s];  // by value: read once
        run_split(args, layer, exchange, split, shared, ring, patience, me);
    }
}

}  // namespace
