// From the projection's heads to those that attention takes: normalised, where the layer does so, and
// rotated; and the row's new token, which is in no cache before.
#pragma once

#include "ring.cuh"

namespace {

constexpr int WINDOWS = HEAD_DIM / 32;

// A lane's entries of a head: 8 of each 32, quad * 8 and the next.
using Entries = uint4[WINDOWS];

__device__ __forceinline__ void to_floats(const uint4& x, float (&floats)[8]) {
    floats[0] = low(x.x), floats[1] = high(x.x), floats[2] = low(x.y), floats[3] = high(x.y);
    floats[4] = low(x.z), floats[5] = high(x.z), floats[6] = low(x.w), floats[7] = high(x.w);
}
__device__ __forceinline__ uint4 to_halves(const float (&x)[8]) {
    return {to_pair(x[0], x[1]), to_pair(x[2], x[3]), to_pair(x[4], x[5]), to_pair(x[6], x[7])};
}
__device__ __forceinline__ void load_floats(const float* p, float (&floats)[8]) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint4 four = load_constant(p + i * 4);
        floats[i * 4] = bits_to_float(four.x), floats[i * 4 + 1] = bits_to_float(four.y);
        floats[i * 4 + 2] = bits_to_float(four.z), floats[i * 4 + 3] = bits_to_float(four.w);
    }
}

__device__ __forceinline__ void load_head(const Args& args, int row, int head, Entries& entries) {
    const int64_t first = (static_cast<int64_t>(row) * args.heads() + head) * HEAD_DIM;
#pragma unroll
    for (int i = 0; i < WINDOWS; i++)
        entries[i] = load_fresh(at(args.q, first + i * 32 + thread_index() % 4 * 8));
}

// Half a head: a lane has the same entries of both halves.
struct Angles {
    float cosines[WINDOWS / 2][8], sines[WINDOWS / 2][8];

    __device__ __forceinline__ void load(const Args& args, int row) {
        const float* from
            = args.cos_sin + static_cast<int64_t>(row) * HEAD_DIM + thread_index() % 4 * 8;
#pragma unroll
        for (int i = 0; i < WINDOWS / 2; i++) {
            load_floats(from + i * 32, cosines[i]);
            load_floats(from + HEAD_DIM / 2 + i * 32, sines[i]);
        }
    }
};

// By the root mean square of the head, whose entries four lanes have, and times the weight.
__device__ __forceinline__ void normalise(const Args& args, const void* weight,
                                          float (&x)[WINDOWS][8]) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < WINDOWS; i++)
        for (int j = 0; j < 8; j++) sum += x[i][j] * x[i][j];
    sum = add_across(add_across(sum, 1), 2);
    const float factor = inverse_root(sum / HEAD_DIM + args.eps);
#pragma unroll
    for (int i = 0; i < WINDOWS; i++) {
        float weights[8];
        to_floats(load_constant(at(weight, i * 32 + thread_index() % 4 * 8)), weights);
#pragma unroll
        for (int j = 0; j < 8; j++) x[i][j] *= factor * weights[j];
    }
}

__device__ __forceinline__ void rotate(const Args& args, const Angles& angles, const void* weight,
                                       Entries& entries) {
    float x[WINDOWS][8];
#pragma unroll
    for (int i = 0; i < WINDOWS; i++) to_floats(entries[i], x[i]);
    if (weight != nullptr) normalise(args, weight, x);
#pragma unroll
    for (int i = 0; i < WINDOWS / 2; i++) {
        float(&first)[8] = x[i], (&second)[8] = x[i + WINDOWS / 2];
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const float before = first[j], cosine = angles.cosines[i][j], sine = angles.sines[i][j];
            first[j] = before * cosine - second[j] * sine;
            second[j] = second[j] * cosine + before * sine;
        }
        entries[i] = to_halves(first), entries[i + WINDOWS / 2] = to_halves(second);
    }
}

// The last token of a row: the first four lanes have its key, others its value.
struct NewToken {
    Entries entries;
    int page;

    __device__ __forceinline__ void load(const Args& args, const Place& place) {
        const int group = thread_index() % 32 / 4, first = args.kv_heads * GROUP_SIZE;
        page = args.tables[static_cast<int64_t>(place.row) * args.table_stride
                           + (place.length - 1) / BLOCK_SIZE];
        load_head(args, place.row, first + place.kv_head + (group == 0 ? 0 : args.kv_heads), entries);
    }

    __device__ __forceinline__ void rotate(const Args& args, const Angles& angles) {
        Entries rotated;
#pragma unroll
        for (int i = 0; i < WINDOWS; i++) rotated[i] = entries[i];
        ::rotate(args, angles, args.k_weight, rotated);
#pragma unroll
        for (int i = 0; i < WINDOWS; i++)
            if (thread_index() % 32 < 4) entries[i] = rotated[i];
    }

    // To the row's last tile, and to the cache.
    __device__ __forceinline__ void put(const Args& args, const Place& place, Tile& tile) const {
        const int group = thread_index() % 32 / 4, token = place.length - 1;
        if (group < 2)
#pragma unroll
            for (int i = 0; i < WINDOWS; i++) {
                const int chunk = i * 4 + thread_index() % 4;
                unsigned char* to = group == 0 ? tile.key(token % TILE, chunk)
                                               : tile.value(token % TILE, chunk);
                *reinterpret_cast<uint4*>(to) = entries[i];
                uint16_t* kept = at(args.cache, place.in_cache(args, page, token, chunk));
                *reinterpret_cast<uint4*>(kept + group * args.kv_stride) = entries[i];
            }
        sync_warp();
    }
};

}  // namespace
