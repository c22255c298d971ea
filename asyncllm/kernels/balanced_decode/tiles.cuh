// The list of tiles: of each KV head, of each row, its tokens 16 by 16; and the warps' splits of it.
#pragma once

#include "../include/device.cuh"

#ifndef HEAD_DIM
#error "give HEAD_DIM (64 or 128), GROUP_SIZE (1 to 8 query heads of a KV head) and BLOCK_SIZE"
#endif

namespace {

constexpr int WARPS = 8;
constexpr int TILE = 16;  // tokens
constexpr int ROW_TILES = BLOCK_SIZE / TILE;
static_assert(BLOCK_SIZE % TILE == 0 && GROUP_SIZE <= 8);

struct Args {
    // [rows, kv_heads * GROUP_SIZE, HEAD_DIM]: rotated. If it `rotates` the projection's
    // [rows, kv_heads * (GROUP_SIZE + 2), HEAD_DIM]: the heads of q, of k, of v.
    const void* q;
    void* cache;                // [pages, 2, BLOCK_SIZE, kv_heads, HEAD_DIM]
    const int32_t* tables;      // [rows, table_stride]
    const int32_t* positions;   // [rows]; -1 for padding rows, behind the others
    void* out;                  // [rows, kv_heads * GROUP_SIZE, HEAD_DIM]
    void* parts;                // [blocks, 2] of Part (softmax.cuh)
    uint32_t* counts;           // [rows, kv_heads], zero; left zero
    const int32_t* angles;      // [rows], of cos_sin; or null
    const float* cos_sin;       // [angles, HEAD_DIM]: the cosines of half a head, its sines
    const void *q_weight, *k_weight;  // [HEAD_DIM], of the norm before the rotation, or null
    int64_t page_stride, kv_stride;   // elements
    int32_t rows, kv_heads, table_stride;
    float eps;                  // the norm's
    float scale;                // of q times k
    int32_t starts_early;       // before the kernel before has ended

    // The newest keys and values are not in the cache yet.
    __device__ __forceinline__ bool rotates() const { return angles != nullptr; }
    __device__ __forceinline__ int heads() const {
        return kv_heads * (rotates() ? GROUP_SIZE + 2 : GROUP_SIZE);
    }
    __device__ __forceinline__ int length(int row) const {
        return row < rows ? positions[row] + 1 : 0;
    }
    __device__ __forceinline__ int angle(int row) const { return rotates() ? angles[row] : 0; }
};

__device__ __forceinline__ int tiles_of(int length) { return (length + TILE - 1) / TILE; }

// Equal splits: the first of them have a tile more.
struct List {
    int least, num_longer;

    __device__ __forceinline__ int start(int split) const {
        return split * least + (split < num_longer ? split : num_longer);
    }

    // Whose split a tile is.
    __device__ __forceinline__ int split_of(int tile) const {
        const int others = tile - num_longer * (least + 1);
        return others < 0 ? tile / (least + 1) : num_longer + others / least;
    }
};

// A place in the list.
struct Place {
    int kv_head, row, tile, length, angle;

    __device__ __forceinline__ int num_tiles() const { return tiles_of(length); }

    __device__ __forceinline__ void next_row(const Args& args) {
        tile = 0;
        length = args.length(++row);
        if (length == 0) kv_head++, row = 0, length = args.length(0);
        angle = args.angle(row);
    }

    // The offset of a chunk of 8 entries of a token's key, in the row's page.
    __device__ __forceinline__ int64_t in_cache(const Args& args, int page, int token, int chunk) const {
        return page * args.page_stride
               + static_cast<int64_t>(token % BLOCK_SIZE * args.kv_heads + kv_head) * HEAD_DIM + chunk * 8;
    }
};

struct Split {
    List list;
    int start, end;  // none: equal
    Place place;     // of `start`
};

// By a whole warp: lane i adds up the i-th part of the rows.
__device__ __forceinline__ Split find_split(const Args& args, int index) {
    const int lane = thread_index() % 32, part = (args.rows + 31) / 32;
    const auto row_tiles = [&](int row) { return tiles_of(args.length(row)); };
    int own = 0;
    for (int i = 0; i < part; i++) own += row_tiles(lane * part + i);
    int until = own;  // with those of the lanes before
    for (int step = 1; step < 32; step *= 2) {
        const int before = from_lane(until, lane >= step ? lane - step : lane);
        if (lane >= step) until += before;
    }
    Split split = {};
    const int num_tiles = from_lane(until, 31), num_splits = num_blocks() * WARPS;
    const int least = num_tiles * args.kv_heads / num_splits;
    split.list = {least, num_tiles * args.kv_heads - least * num_splits};
    split.start = split.list.start(index), split.end = split.list.start(index + 1);
    if (split.start == split.end) return split;
    Place& place = split.place;
    place.kv_head = split.start / num_tiles, place.tile = split.start - place.kv_head * num_tiles;
    const int at = count_lanes(until <= place.tile);
    place.row = at * part;
    place.tile -= from_lane(until - own, at);
    for (int tiles = row_tiles(place.row); place.tile >= tiles; tiles = row_tiles(++place.row))
        place.tile -= tiles;
    place.length = args.length(place.row), place.angle = args.angle(place.row);
    return split;
}

}  // namespace
