// A block's share of one sequence's attention: which tokens of which row and KV head, and where their
// keys and values are. By positions alone, so that it is planned once for all layers.
#pragma once

#include "shared.cuh"

namespace {

// One token's key and value, 8 entries of each in every lane.
struct Token {
    uint4 key, value;
};

// Two entries of each half of a head: 2i and 2i + 1 in lane i.
struct Pairs {
    uint32_t first, second;
};

// A block's share of one row and KV head, and what it can load before the projection has ended.
struct Share {
    int row, kv_head, split, position;
    int start, end;  // tokens
    int num_active;  // shares of this row and KV head; 0: this one is none of them
    uint16_t* new_key;  // in its page
    float cos0, cos1, sin0, sin1;
    Pairs q_norm, k_norm;
    Token ahead[AHEAD];
};

__device__ __forceinline__ int count_splits(const Args& args) {
    const int splits = num_blocks() / (args.rows * args.kv_heads);
    return splits < 1 ? 1 : splits > MAX_SPLITS ? MAX_SPLITS : splits;
}

__device__ __forceinline__ int64_t place_of(const Args& args, int row, int kv_head, int token) {
    const int page = args.block_tables[row * args.table_stride + token / BLOCK_SIZE];
    const int64_t place = static_cast<int64_t>(token % BLOCK_SIZE) * args.kv_heads + kv_head;
    return page * args.page_stride + place * HEAD_DIM;
}

__device__ __forceinline__ Token load_token_at(const Args& args, const uint16_t* key, int lane) {
    key += lane % TOKEN_LANES * 8;
    return {load_fresh(key), load_fresh(key + args.kv_stride)};
}

__device__ __forceinline__ Token load_token(const Args& args, const Layer& layer,
                                            const Share& share, int token, int lane) {
    if (token >= share.end || token >= share.position) return {{0, 0, 0, 0}, {0, 0, 0, 0}};
    return load_token_at(
        args, at(layer.cache, place_of(args, share.row, share.kv_head, token)), lane);
}

__device__ __forceinline__ int first_token(const Share& share, const Lane& me) {
    return share.start + me.warp * WARP_TOKENS + me.lane / TOKEN_LANES;
}

__device__ __forceinline__ Pairs load_pairs(const void* head, int lane) {
    const int place = 2 * lane < HALF ? 2 * lane : 0;
    return {load_fresh_pair(at(head, place)), load_fresh_pair(at(head, HALF + place))};
}

// Shares by shapes and positions alone. By all threads, between two `sync_workers`.
__device__ __forceinline__ void plan_share(const Args& args, int work, Shared& shared) {
    auto& plan = shared.plan;
    const int thread = thread_index();
    const int num_items = args.rows * args.kv_heads, num_splits = count_splits(args);
    const int split = work / num_items, row = work % num_items / args.kv_heads;
    const int kv_head = work % args.kv_heads;
    int num_active = 0, start = 0, end = 0, position = 0;
    if (split < num_splits) {
        position = args.positions[row];
        const int num_tiles = position / TILE + 1;
        const int tiles = (num_tiles + num_splits - 1) / num_splits;
        num_active = (num_tiles + tiles - 1) / tiles;
        if (split >= num_active) num_active = 0;
        start = split * tiles * TILE;
        end = start + tiles * TILE < position + 1 ? start + tiles * TILE : position + 1;
    }
    if (thread == 0) {
        plan.row = row, plan.kv_head = kv_head, plan.split = split, plan.position = position;
        plan.start = start, plan.end = end, plan.num_active = num_active;
    }
    if (num_active == 0) return;
    if (thread == 0) plan.new_place = place_of(args, row, kv_head, position);
    for (int i = thread; i < AHEAD * TILE; i += THREADS)
        if (start + i < end)
            plan.places[i / TILE][i % TILE] = place_of(args, row, kv_head, start + i);
    for (int i = thread; i < HEAD_DIM; i += THREADS)
        plan.cos_sin[i] = args.cos_sin[static_cast<int64_t>(args.rotary_rows[row]) * HEAD_DIM + i];
}

__device__ __forceinline__ Share open_share(const Args& args, const Layer& layer,
                                            const Shared& shared, const Lane& me) {
    const auto& plan = shared.plan;
    Share share = {};
    share.num_active = plan.num_active;
    if (share.num_active == 0) return share;
    share.row = plan.row, share.kv_head = plan.kv_head, share.split = plan.split;
    share.position = plan.position, share.start = plan.start, share.end = plan.end;
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
        const int token = first_token(share, me) + i * TILE;
        if (token < share.end && token < share.position)
            share.ahead[i] = load_token_at(
                args, at(layer.cache, plan.places[i][token - share.start - i * TILE]), me.lane);
    }
    share.new_key = at(layer.cache, plan.new_place);
    const int place = 2 * me.lane < HALF ? 2 * me.lane : 0;
    share.cos0 = plan.cos_sin[place], share.cos1 = plan.cos_sin[place + 1];
    share.sin0 = plan.cos_sin[HALF + place], share.sin1 = plan.cos_sin[HALF + place + 1];
    if (layer.q_norm != nullptr) {
        share.q_norm = load_pairs(layer.q_norm, me.lane);
        share.k_norm = load_pairs(layer.k_norm, me.lane);
    }
    return share;
}

}  // namespace
