// The heads of the new token: normalised, rotated, the key and value also written to their page.
#pragma once

#include "exchange.cuh"
#include "split.cuh"

namespace {

// Two entries of each half of a head: 2i and 2i + 1 in lane i.
struct Pairs {
    uint32_t first, second;
};

__device__ __forceinline__ Pairs load_pairs(const void* head, int lane) {
    const int place = 2 * lane < HALF ? 2 * lane : 0;
    return {load_fresh_pair(at(head, place)), load_fresh_pair(at(head, HALF + place))};
}

__device__ __forceinline__ void store_pairs(uint16_t* to, const Pairs& pairs, int lane) {
    if (2 * lane >= HALF) return;
    *reinterpret_cast<uint32_t*>(to + 2 * lane) = pairs.first;
    *reinterpret_cast<uint32_t*>(to + HALF + 2 * lane) = pairs.second;
}

__device__ __forceinline__ bool is_there(const Pairs& pairs) {
    return !is_empty(pairs.first) && !is_empty(pairs.second);
}

// The angles by which a lane rotates a head, loaded while the head is.
struct Rotation {
    float cos0, cos1, sin0, sin1;
    Pairs norm;

    // `norm_weight`: may be null.
    __device__ __forceinline__ Rotation(const Args& args, const void* norm_weight, int row, int lane)
        : norm{} {
        const float* angles
            = args.cos_sin + static_cast<int64_t>(args.rotary_rows[row]) * HEAD_DIM;
        const int place = 2 * lane < HALF ? 2 * lane : 0;
        cos0 = angles[place], cos1 = angles[place + 1];
        sin0 = angles[HALF + place], sin1 = angles[HALF + place + 1];
        if (norm_weight != nullptr) norm = load_pairs(norm_weight, lane);
    }

    // A head of q or k, normalised and rotated, in the roundings of the other kernels.
    __device__ __forceinline__ Pairs apply(const Args& args, const Pairs& raw, bool has_norm,
                                           int lane) const {
        float a0 = low(raw.first), a1 = high(raw.first), b0 = low(raw.second), b1 = high(raw.second);
        if (has_norm) {
            float squares = 2 * lane < HALF ? a0 * a0 + a1 * a1 + b0 * b0 + b1 * b1 : 0;
            for (int step = 16; step > 0; step /= 2) squares = add_across(squares, step);
            const float factor = inverse_root(squares / HEAD_DIM + args.head_eps);
            a0 *= factor * low(norm.first), a1 *= factor * high(norm.first);
            b0 *= factor * low(norm.second), b1 *= factor * high(norm.second);
        }
        return {to_pair(a0 * cos0 - b0 * sin0, a1 * cos1 - b1 * sin1),
                to_pair(b0 * cos0 + a0 * sin0, b1 * cos1 + a1 * sin1)};
    }
};

// The heads of q for the block, a warp each; and where its split holds the new token, that one's key
// and value, also to their page.
__device__ __forceinline__ void load_heads(const Args& args, const Layer& layer,
                                           unsigned char* exchange, const Split& split,
                                           Shared& shared, Patience& patience, const Lane& me) {
    auto& own = shared.attention;
    const int64_t width = static_cast<int64_t>(args.heads + 2 * args.kv_heads) * HEAD_DIM;
    const uint16_t* qkv = at(exchange + shared.shapes[QKV].out, split.row * width);
    const bool has_key = me.warp == WARPS - 1 && split.end > split.position;
    if (me.warp < GROUP_SIZE) {
        const uint16_t* source = qkv + (split.kv_head * GROUP_SIZE + me.warp) * HEAD_DIM;
        const Rotation rotation(args, layer.q_norm, split.row, me.lane);
        Pairs raw = load_pairs(source, me.lane);
        while (patience.wait(args, shared, is_there(raw))) raw = load_pairs(source, me.lane);
        store_pairs(own.q[me.warp], rotation.apply(args, raw, layer.q_norm != nullptr, me.lane),
                    me.lane);
    }
    if (!has_key) return;
    const uint16_t* source = qkv + (args.heads + split.kv_head) * HEAD_DIM;
    const uint16_t* values = source + args.kv_heads * HEAD_DIM;
    const Rotation rotation(args, layer.k_norm, split.row, me.lane);
    uint16_t* page = at(layer.cache, place_of(args, split, split.position));
    Pairs raw = load_pairs(source, me.lane), value = load_pairs(values, me.lane);
    while (patience.wait(args, shared, is_there(raw) && is_there(value)))
        raw = load_pairs(source, me.lane), value = load_pairs(values, me.lane);
    const Pairs key = rotation.apply(args, raw, layer.k_norm != nullptr, me.lane);
    store_pairs(own.new_token, key, me.lane);
    store_pairs(own.new_token + HEAD_DIM, value, me.lane);
    store_pairs(page, key, me.lane);
    store_pairs(page + args.kv_stride, value, me.lane);
}

}  // namespace
