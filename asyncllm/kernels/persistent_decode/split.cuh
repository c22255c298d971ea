// A block's splits of the sequences' attention.
#pragma once

#include "shared.cuh"

namespace {

__device__ __forceinline__ int count_splits(const Args& args) {
    const int splits = num_blocks() / (args.rows * args.kv_heads);
    return splits < 1 ? 1 : splits > MAX_SPLITS ? MAX_SPLITS : splits;
}

// By shapes and positions alone: the same in every layer.
__device__ __forceinline__ Split split_of(const Args& args, int work) {
    const int num_items = args.rows * args.kv_heads, num_splits = count_splits(args);
    Split split = {};
    split.work = work;
    split.number = work / num_items;
    split.row = work % num_items / args.kv_heads;
    split.kv_head = work % args.kv_heads;
    if (split.number >= num_splits) return split;
    split.position = args.positions[split.row];
    const int num_stages = split.position / TOKENS + 1;
    int num = 1;  // a power of 2: others take longer to merge
    while (2 * num <= num_splits && num_stages >= 2 * num * LEAST_STAGES) num *= 2;
    if (split.number >= num) return split;
    static_assert(LEAST_STAGES >= MAX_SPLITS);  // so that none is empty
    const int stages = (num_stages + num - 1) / num;
    split.num_active = num;
    split.first_pair = PAIRS * split.number / num;
    split.end_pair = PAIRS * (split.number + 1) / num;
    split.start = split.number * stages * TOKENS;
    const int end = split.start + stages * TOKENS;
    split.end = end < split.position + 1 ? end : split.position + 1;
    return split;
}

// The `index`th of the block. The last blocks, which have the fewest units of products, come first.
__device__ __forceinline__ Split own_split(const Args& args, int index) {
    return split_of(args, num_blocks() - 1 - block_index() + index * num_blocks());
}

// Those that are none come last: a block has a second only where each row and KV head is one split.
__device__ __forceinline__ bool has_split(const Shared& shared, int index) {
    return index < MAX_BLOCK_SPLITS && shared.own_splits[index].num_active > 0;
}

// The first of the tokens that lie side by side in a page, in elements of the layer's cache.
__device__ __forceinline__ int64_t place_of(const Args& args, const Split& split, int token) {
    const int page = args.block_tables[split.row * args.table_stride + token / BLOCK_SIZE];
    const int64_t place = static_cast<int64_t>(token % BLOCK_SIZE) * args.kv_heads + split.kv_head;
    return page * args.page_stride + place * HEAD_DIM;
}

}  // namespace
