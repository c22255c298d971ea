// The list of tiles: of each KV head, of each row, its tokens 16 by 16; and the warps' shares of it.
#pragma once

#include "../device.cuh"

#ifndef HEAD_DIM
#error "give HEAD_DIM (64 or 128), GROUP_SIZE (1 to 8 query heads of a KV head) and BLOCK_SIZE"
#endif

namespace {

constexpr int WARPS = 8;
constexpr int TILE = 16;  // tokens
constexpr int ROW_TILES = BLOCK_SIZE / TILE;
static_assert(BLOCK_SIZE % TILE == 0 && GROUP_SIZE <= 8);

struct Args {
    const void* q;              // [rows, kv_heads * GROUP_SIZE, HEAD_DIM]
    const void* cache;          // [pages, 2, BLOCK_SIZE, kv_heads, HEAD_DIM]
    const int32_t* tables;      // [rows, table_stride]
    const int32_t* lengths;     // [rows]; 0 for rows behind the others that are nobody's
    void* out;                  // as q
    void* parts;                // [blocks, 2] of Part (softmax.cuh)
    uint32_t* counts;           // [rows, kv_heads], zero; left zero
    int64_t page_stride, kv_stride;  // elements
    int32_t rows, kv_heads, table_stride;
    float scale;                // of q times k
    int32_t starts_early;       // before the kernel before has ended
};

__device__ __forceinline__ int tiles_of(int length) { return (length + TILE - 1) / TILE; }

// Equal shares: the first of them have a tile more.
struct List {
    int least, num_longer;

    __device__ __forceinline__ int start(int share) const {
        return share * least + (share < num_longer ? share : num_longer);
    }

    // Whose share a tile is.
    __device__ __forceinline__ int share_of(int tile) const {
        const int others = tile - num_longer * (least + 1);
        return others < 0 ? tile / (least + 1) : num_longer + others / least;
    }
};

// A place in the list.
struct Place {
    int kv_head, row, tile, length;

    __device__ __forceinline__ int num_tiles() const { return tiles_of(length); }

    __device__ __forceinline__ void next_row(const Args& args) {
        tile = 0;
        length = ++row < args.rows ? args.lengths[row] : 0;
        if (length > 0) return;
        kv_head++, row = 0;
        length = args.lengths[0];
    }
};

struct Share {
    List list;
    int start, end;  // none: equal
    Place place;     // of `start`
};

// By a whole warp: lane i adds up the i-th part of the rows.
__device__ __forceinline__ Share find_share(const Args& args, int index) {
    const int lane = thread_index() % 32, part = (args.rows + 31) / 32;
    const auto row_tiles = [&](int row) { return row < args.rows ? tiles_of(args.lengths[row]) : 0; };
    int own = 0;
    for (int i = 0; i < part; i++) own += row_tiles(lane * part + i);
    int until = own;  // with those of the lanes before
    for (int step = 1; step < 32; step *= 2) {
        const int before = from_lane(until, lane >= step ? lane - step : lane);
        if (lane >= step) until += before;
    }
    Share share = {};
    const int num_tiles = from_lane(until, 31), num_shares = num_blocks() * WARPS;
    const int least = num_tiles * args.kv_heads / num_shares;
    share.list = {least, num_tiles * args.kv_heads - least * num_shares};
    share.start = share.list.start(index), share.end = share.list.start(index + 1);
    if (share.start == share.end) return share;
    Place& place = share.place;
    place.kv_head = share.start / num_tiles, place.tile = share.start - place.kv_head * num_tiles;
    const int at = count_lanes(until <= place.tile);
    place.row = at * part;
    place.tile -= from_lane(until - own, at);
    for (int tiles = row_tiles(place.row); place.tile >= tiles; tiles = row_tiles(++place.row))
        place.tile -= tiles;
    place.length = args.lengths[place.row];
    return share;
}

}  // namespace
