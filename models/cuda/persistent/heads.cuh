// The heads of the new token: normalised, rotated, the key and value also written to their page.
#pragma once

#include "exchange.cuh"
#include "share.cuh"

namespace {

// A head of q or k, normalised and rotated, in the roundings of the other kernels.
__device__ __forceinline__ Pairs rotate_head(const Args& args, const Share& share, const Pairs& raw,
                                             const Pairs& norm, bool has_norm, int lane) {
    float a0 = low(raw.first), a1 = high(raw.first), b0 = low(raw.second), b1 = high(raw.second);
    if (has_norm) {
        float squares = 2 * lane < HALF ? a0 * a0 + a1 * a1 + b0 * b0 + b1 * b1 : 0;
        for (int step = 16; step > 0; step /= 2) squares = add_across(squares, step);
        const float factor = inverse_root(squares / HEAD_DIM + args.head_eps);
        a0 *= factor * low(norm.first), a1 *= factor * high(norm.first);
        b0 *= factor * low(norm.second), b1 *= factor * high(norm.second);
    }
    return {to_pair(a0 * share.cos0 - b0 * share.sin0, a1 * share.cos1 - b1 * share.sin1),
            to_pair(b0 * share.cos0 + a0 * share.sin0, b1 * share.cos1 + a1 * share.sin1)};
}

__device__ __forceinline__ void store_floats(float* to, const Pairs& pairs, int lane) {
    if (2 * lane >= HALF) return;
    to[2 * lane] = low(pairs.first), to[2 * lane + 1] = high(pairs.first);
    to[HALF + 2 * lane] = low(pairs.second), to[HALF + 2 * lane + 1] = high(pairs.second);
}

__device__ __forceinline__ void store_pairs(uint16_t* to, const Pairs& pairs, int lane) {
    if (2 * lane >= HALF) return;
    *reinterpret_cast<uint32_t*>(to + 2 * lane) = pairs.first;
    *reinterpret_cast<uint32_t*>(to + HALF + 2 * lane) = pairs.second;
}

__device__ __forceinline__ bool is_there(const Pairs& pairs) {
    return !is_empty(pairs.first) && !is_empty(pairs.second);
}

// The heads of q for the block; and where its share holds the new token, that one's key and value,
// also to their page.
__device__ __forceinline__ void load_heads(const Args& args, const Layer& layer,
                                           const Exchange& exchange, const Share& share,
                                           Shared& shared, Patience& patience, const Lane& me) {
    auto& own = shared.attention;
    const bool has_norm = layer.q_norm != nullptr;
    const int64_t width = static_cast<int64_t>(args.heads + 2 * args.kv_heads) * HEAD_DIM;
    const uint16_t* qkv = at(exchange.base, exchange.qkv + share.row * width);
    for (int member = me.warp; member < GROUP_SIZE; member += WARPS) {
        const uint16_t* source = qkv + (share.kv_head * GROUP_SIZE + member) * HEAD_DIM;
        Pairs raw = load_pairs(source, me.lane);
        while (patience.wait(args, shared, is_there(raw))) raw = load_pairs(source, me.lane);
        store_floats(own.q[member], rotate_head(args, share, raw, share.q_norm, has_norm, me.lane),
                     me.lane);
    }
    if (share.end <= share.position || me.warp != WARPS - 1) return;
    const uint16_t* source = qkv + (args.heads + share.kv_head) * HEAD_DIM;
    const uint16_t* values = source + args.kv_heads * HEAD_DIM;
    Pairs raw = load_pairs(source, me.lane), value = load_pairs(values, me.lane);
    while (patience.wait(args, shared, is_there(raw) && is_there(value)))
        raw = load_pairs(source, me.lane), value = load_pairs(values, me.lane);
    const Pairs key = rotate_head(args, share, raw, share.k_norm, has_norm, me.lane);
    store_floats(own.new_key, key, me.lane);
    store_floats(own.new_value, value, me.lane);
    store_pairs(share.new_key, key, me.lane);
    store_pairs(share.new_key + args.kv_stride, value, me.lane);
}

}  // namespace
