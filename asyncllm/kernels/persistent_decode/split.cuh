// A block's shares of the sequences' attention.
#pragma once

#include "shared.cuh"

namespace {

__device__ __forceinline__ int count_splits(const Args& args) {
    const int splits = num_blocks() / (args.rows * args.kv_heads);
    return splits < 1 ? 1 : splits > MAX_SPLITS ? MAX_SPLITS : splits;
}

// By shapes and positions alone: the same in every layer.
__device__ __forceinline__ Share share_of(const Args& args, int work) {
    const int num_items = args.rows * args.kv_heads, num_splits = count_splits(args);
    Share share = {};
    share.work = work;
    share.split = work / num_items;
    share.row = work % num_items / args.kv_heads;
    share.kv_head = work % args.kv_heads;
    if (share.split >= num_splits) return share;
    share.position = args.positions[share.row];
    const int num_stages = share.position / TOKENS + 1;
    int num = 1;  // a power of 2: others take longer to merge
    while (2 * num <= num_splits && num_stages >= 2 * num * LEAST_STAGES) num *= 2;
    if (share.split >= num) return share;
    static_assert(LEAST_STAGES >= MAX_SPLITS);  // so that none is empty
    const int stages = (num_stages + num - 1) / num;
    share.num_active = num;
    share.first_pair = PAIRS * share.split / num;
    share.end_pair = PAIRS * (share.split + 1) / num;
    share.start = share.split * stages * TOKENS;
    const int end = share.start + stages * TOKENS;
    share.end = end < share.position + 1 ? end : share.position + 1;
    return share;
}

// The `index`th of the block. The last blocks, which have the fewest units of products, come first.
__device__ __forceinline__ Share own_share(const Args& args, int index) {
    return share_of(args, num_blocks() - 1 - block_index() + index * num_blocks());
}

// Those that are none come last: a block has a second only where each row and KV head is one share.
__device__ __forceinline__ bool has_share(const Shared& shared, int index) {
    return index < MAX_SHARES && shared.own_shares[index].num_active > 0;
}

// The first of the tokens that lie side by side in a page, in elements of the layer's cache.
__device__ __forceinline__ int64_t place_of(const Args& args, const Share& share, int token) {
    const int page = args.block_tables[share.row * args.table_stride + token / BLOCK_SIZE];
    const int64_t place = static_cast<int64_t>(token % BLOCK_SIZE) * args.kv_heads + share.kv_head;
    return page * args.page_stride + place * HEAD_DIM;
}

}  // namespace
