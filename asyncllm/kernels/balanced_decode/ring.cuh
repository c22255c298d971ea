// A warp's tiles on their way from memory.
#pragma once

#include "tiles.cuh"

namespace {

constexpr int CHUNKS = HEAD_DIM / 8;       // of 16 bytes, of a token's key
constexpr int DEPTH = 3 * 128 / HEAD_DIM;  // tiles of a warp: 24 KiB
constexpr int COPY_TOKENS = 32 / CHUNKS;   // that one copy of all lanes takes

// Keys: 16-byte chunk c of token t is at c ^ (t % 2 * 4), so that 4 chunks of 2 tokens read at
// once meet in no bank; of the values at c ^ (t % 8), one chunk of 8 tokens.
struct Tile {
    unsigned char keys[TILE * HEAD_DIM * 2], values[TILE * HEAD_DIM * 2];

    __device__ __forceinline__ unsigned char* key(int token, int chunk) {
        return keys + (token * CHUNKS + (chunk ^ (token % 2 * 4))) * 16;
    }
    __device__ __forceinline__ unsigned char* value(int token, int chunk) {
        return values + (token * CHUNKS + (chunk ^ (token % 8))) * 16;
    }
};

// The tile that a warp asks for next.
struct Cursor {
    Place place;
    int left;   // tiles of the split
    int pages;  // lane i: the page of the i-th tile after `first`
    int first;

    __device__ __forceinline__ Cursor(const Args& args, const Split& split)
        : place(split.place), left(split.end - split.start) {
        if (left > 0) load_pages(args);
    }

    __device__ __forceinline__ void load_pages(const Args& args) {
        first = place.tile;
        const int wanted = first + thread_index() % 32;
        const int page = wanted < place.num_tiles() ? wanted / ROW_TILES : 0;
        pages = args.tables[static_cast<int64_t>(place.row) * args.table_stride + page];
    }

    __device__ __forceinline__ void advance(const Args& args) {
        if (--left == 0) return;
        if (++place.tile == place.num_tiles()) place.next_row(args);
        if (place.tile == 0 || place.tile == first + 32) load_pages(args);
    }

    // The next tile, if there is one; without a token that is not in the cache yet, and is put there.
    __device__ __forceinline__ void ask(const Args& args, Tile& to) {
        if (left > 0) {
            const int lane = thread_index() % 32, chunk = lane % CHUNKS;
            const int page = from_lane(pages, place.tile - first);
            const int token_stride = args.kv_heads * HEAD_DIM;
            const uint16_t* from
                = at(args.cache, place.in_cache(args, page, place.tile * TILE, chunk));
            const int num_tokens = place.length - args.rotates() - place.tile * TILE;
#pragma unroll
            for (int i = 0; i < TILE / COPY_TOKENS; i++) {
                const int token = i * COPY_TOKENS + lane / CHUNKS;
                const uint16_t* key = from + token * token_stride;
                const int bytes = token < num_tokens ? 16 : 0;  // past the end may be anything
                copy_async_or_zero(to.key(token, chunk), key, bytes);
                copy_async_or_zero(to.value(token, chunk), key + args.kv_stride, bytes);
            }
            advance(args);
        }
        end_copies();  // an empty group too, so that groups and tiles count alike
    }
};

}  // namespace
