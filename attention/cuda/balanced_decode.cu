// Attention of one token per row over paged keys and values: see balanced_decode.py.
//
// The keys and values of all rows, in tiles of 16 tokens, are one list, row after row. Each KV head
// has as many warps as there are, and they take equal shares of the list, whatever the rows'
// lengths: no warp has more to read than another. A warp works alone: it asks for its tiles DEPTH
// - 1 ahead, from one row to the next, and a block is 8 of them because that much is on the way
// at once. A row that ends where it began within one share is done; else the last share of it to be
// done merges all, always in the same order. A share has at most two such rows: its first and last.
//
// Tensor cores take a tile's 16 tokens as their rows and a group's query heads as their 8 columns,
// for the scores and, the weights having been transposed, for the sums of the values.
#include "device.cuh"

#ifndef HEAD_DIM
#error "give HEAD_DIM (64 or 128), GROUP_SIZE (1 to 8 query heads of a KV head) and BLOCK_SIZE"
#endif

namespace {

constexpr int WARPS = 8;
constexpr int TILE = 16;                        // tokens
constexpr int CHUNKS = HEAD_DIM / 8;            // of 16 bytes, of a token's key
constexpr int MATRIX_BYTES = TILE * HEAD_DIM * 2;
constexpr int DEPTH = 3 * 128 / HEAD_DIM;       // tiles of a warp: 24 KiB
constexpr int COPY_TOKENS = 32 / CHUNKS;        // that one copy of all lanes takes
constexpr int WINDOWS = HEAD_DIM / 32;
constexpr int BANDS = HEAD_DIM / 16;
constexpr int ROW_TILES = BLOCK_SIZE / TILE;
constexpr float NO_SCORE = -1e30f;              // below any score, and finite
static_assert(BLOCK_SIZE % TILE == 0 && GROUP_SIZE <= 8);

struct Args {
    const void* q;              // [rows, kv_heads * GROUP_SIZE, HEAD_DIM]
    const void* cache;          // [pages, 2, BLOCK_SIZE, kv_heads, HEAD_DIM]
    const int32_t* tables;      // [rows, table_stride]
    const int32_t* lengths;     // [rows]; 0 for rows behind the others that are nobody's
    void* out;                  // as q
    float* partial;             // [shares, kv_heads, 2, GROUP_SIZE, HEAD_DIM]
    float* weights;             // [shares, kv_heads, 2, GROUP_SIZE, 2]: greatest score, sum
    uint32_t* counts;           // [rows, kv_heads], zero; left zero
    int64_t page_stride, kv_stride;  // elements
    int32_t rows, kv_heads, table_stride;
    float scale;                // of q times k
};

struct Ring {
    unsigned char keys[MATRIX_BYTES], values[MATRIX_BYTES];
};

// A place in the list of tiles.
struct Cursor {
    int left;   // tiles of the share
    int row, tile, num_tiles, length;  // of the row
    int pages;  // lane i: the page of the i-th tile after `first`
    int first;

    __device__ __forceinline__ void open(const Args& args, int at_row, int at_tile) {
        row = at_row, tile = at_tile;
        length = args.lengths[row];
        num_tiles = (length + TILE - 1) / TILE;
        load_pages(args);
    }

    __device__ __forceinline__ void load_pages(const Args& args) {
        first = tile;
        const int wanted = tile + thread_index() % 32;
        const int page = wanted < num_tiles ? wanted / ROW_TILES : 0;
        pages = args.tables[static_cast<int64_t>(row) * args.table_stride + page];
    }

    __device__ __forceinline__ void advance(const Args& args) {
        left--;
        if (++tile == num_tiles) {
            if (left > 0) open(args, row + 1, 0);
        } else if (tile == first + 32) {
            load_pages(args);
        }
    }
};

struct Share {
    int index, num_shares, num_tiles;  // its own index; of all rows
    int start, end, row, tile;         // its tiles; where they begin
};

// Which share has a tile: the inverse of `share_start`.
__device__ __forceinline__ int share_of(const Share& share, int tile) {
    return static_cast<int>(((tile + 1LL) * share.num_shares - 1) / share.num_tiles);
}

__device__ __forceinline__ int share_start(const Share& share, int index) {
    return static_cast<int>(static_cast<int64_t>(index) * share.num_tiles / share.num_shares);
}

// By a whole warp: lane i adds up the i-th part of the rows.
__device__ __forceinline__ Share find_share(const Args& args, int index, int num_shares) {
    const int lane = thread_index() % 32, part = (args.rows + 31) / 32;
    const auto tiles_of = [&](int row) {
        return row < args.rows ? (args.lengths[row] + TILE - 1) / TILE : 0;
    };
    int own = 0;
    for (int i = 0; i < part; i++) own += tiles_of(lane * part + i);
    int until = own;  // with those of the lanes before
    for (int step = 1; step < 32; step *= 2) {
        const int before = from_lane(until, lane >= step ? lane - step : lane);
        if (lane >= step) until += before;
    }
    Share share;
    share.num_tiles = from_lane(until, 31);
    share.num_shares = num_shares < share.num_tiles ? num_shares : share.num_tiles;
    share.index = index;
    share.row = share.tile = share.start = share.end = 0;
    if (index >= share.num_shares) return share;
    share.start = share_start(share, index), share.end = share_start(share, index + 1);
    const int at = count_lanes(until <= share.start);
    share.row = at * part;
    share.tile = share.start - from_lane(until - own, at);
    for (int tiles = tiles_of(share.row); share.tile >= tiles; tiles = tiles_of(++share.row))
        share.tile -= tiles;
    return share;
}

// Asks for a tile of a KV head. Keys: 16-byte chunk c of token t at c ^ (t % 2 * 4), so that 4
// chunks of 2 tokens read at once meet in no bank; values: at c ^ (t % 8), one chunk of 8 tokens.
__device__ __forceinline__ void ask(const Args& args, const Cursor& at_tile, int kv_head,
                                    Ring& ring) {
    const int lane = thread_index() % 32, chunk = lane % CHUNKS;
    const int page = from_lane(at_tile.pages, at_tile.tile - at_tile.first);
    const int token_stride = args.kv_heads * HEAD_DIM;
    const int in_page = at_tile.tile % ROW_TILES * TILE;
    const uint16_t* from = at(args.cache, page * args.page_stride
        + static_cast<int64_t>(in_page * args.kv_heads + kv_head) * HEAD_DIM + chunk * 8);
    const int num_tokens = at_tile.length - at_tile.tile * TILE;
#pragma unroll
    for (int i = 0; i < TILE / COPY_TOKENS; i++) {
        const int token = i * COPY_TOKENS + lane / CHUNKS;
        const uint16_t* key = from + token * token_stride;
        const int bytes = token < num_tokens ? 16 : 0;  // what is past the end may be anything
        copy_async_or_zero(ring.keys + (token * CHUNKS + (chunk ^ (token % 2 * 4))) * 16, key, bytes);
        copy_async_or_zero(ring.values + (token * CHUNKS + (chunk ^ (token % 8))) * 16,
                           key + args.kv_stride, bytes);
    }
}

// A warp's softmax over the tiles of a row so far. With quad = lane % 4 and group = lane / 4, a lane
// has the query heads 2 * quad and 2 * quad + 1, and of the sums entries group + 8 * i.
struct Row {
    uint4 q[WINDOWS];  // of query head `group`: 8 entries of each 32
    float best[2], total[2], sums[BANDS][4];

    __device__ __forceinline__ void open(const Args& args, int row, int kv_head) {
        const int lane = thread_index() % 32, head = lane / 4;
        const int64_t first = static_cast<int64_t>(row) * args.kv_heads + kv_head;
#pragma unroll
        for (int i = 0; i < WINDOWS; i++) {
            q[i] = {0, 0, 0, 0};
            if (head < GROUP_SIZE)
                q[i] = load_fresh(
                    at(args.q, (first * GROUP_SIZE + head) * HEAD_DIM + i * 32 + lane % 4 * 8));
        }
#pragma unroll
        for (int h = 0; h < 2; h++) best[h] = NO_SCORE, total[h] = 0;
#pragma unroll
        for (int i = 0; i < BANDS; i++)
            for (int j = 0; j < 4; j++) sums[i][j] = 0;
    }

    __device__ __forceinline__ void add(const Ring& ring, int num_tokens, float scale) {
        const int lane = thread_index() % 32, group = lane / 4, quad = lane % 4;
        float scores[2][4] = {};  // two each, so that an addition need not wait for the last
#pragma unroll
        for (int i = 0; i < WINDOWS; i++) {
            const int chunk = (i * 4 + quad) ^ (group % 2 * 4);
            const uint4 upper = load_shared(ring.keys + (group * CHUNKS + chunk) * 16);
            const uint4 lower = load_shared(ring.keys + ((group + 8) * CHUNKS + chunk) * 16);
            multiply_add(scores[0], upper.x, lower.x, upper.y, lower.y, q[i].x, q[i].y);
            multiply_add(scores[1], upper.z, lower.z, upper.w, lower.w, q[i].z, q[i].w);
        }
        float shrink[2], parts[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const bool is_seen = group + j / 2 * 8 < num_tokens;
            parts[j] = is_seen ? (scores[0][j] + scores[1][j]) * scale : 2 * NO_SCORE;
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float most = parts[h] > parts[h + 2] ? parts[h] : parts[h + 2];
            for (int step = 4; step < 32; step *= 2) most = most_across(most, step);
            most = most > best[h] ? most : best[h];
            shrink[h] = power_of_2(best[h] - most);
            best[h] = most;
            parts[h] = power_of_2(parts[h] - most), parts[h + 2] = power_of_2(parts[h + 2] - most);
            total[h] = total[h] * shrink[h] + parts[h] + parts[h + 2];
        }
        const uint32_t upper = transpose(to_pair(parts[0], parts[1]));
        const uint32_t lower = transpose(to_pair(parts[2], parts[3]));
        const int token = lane % 8 + lane / 16 * 8;
#pragma unroll
        for (int i = 0; i < BANDS; i++) {
            const int chunk = (i * 2 + lane / 8 % 2) ^ (token % 8);
            const uint4 v = load_transposed(ring.values + (token * CHUNKS + chunk) * 16);
#pragma unroll
            for (int j = 0; j < 4; j++) sums[i][j] *= shrink[j % 2];
            multiply_add(sums[i], v.x, v.y, v.z, v.w, upper, lower);
        }
    }

    // After the last tile: the sums of the weights are each lane's tokens' until here.
    __device__ __forceinline__ void close() {
#pragma unroll
        for (int h = 0; h < 2; h++)
            for (int step = 4; step < 32; step *= 2) total[h] = add_across(total[h], step);
    }

    // f(head, entry, sum, h): all that the lane has of the group.
    template <typename F>
    __device__ __forceinline__ void each(const F& f) const {
        const int lane = thread_index() % 32;
#pragma unroll
        for (int i = 0; i < BANDS; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int head = lane % 4 * 2 + j % 2;
                if (head < GROUP_SIZE)
                    f(head, i * 16 + j / 2 * 8 + lane / 4, sums[i][j], j % 2);
            }
    }
};

__device__ __forceinline__ int64_t partial_place(const Args& args, int share, int kv_head,
                                                 bool begins) {
    return ((static_cast<int64_t>(share) * args.kv_heads + kv_head) * 2 + begins) * GROUP_SIZE;
}

__device__ __forceinline__ void store_partial(const Args& args, const Row& sums, int64_t place) {
    const int lane = thread_index() % 32;
    sums.each([&](int head, int entry, float sum, int) {
        args.partial[(place + head) * HEAD_DIM + entry] = sum;
    });
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int head = lane % 4 * 2 + h;
        if (lane < 4 && head < GROUP_SIZE) {
            args.weights[(place + head) * 2] = sums.best[h];
            args.weights[(place + head) * 2 + 1] = sums.total[h];
        }
    }
}

__device__ __forceinline__ void store_row(const Args& args, const Row& sums, int row, int kv_head) {
    const int64_t first = static_cast<int64_t>(row) * args.kv_heads + kv_head;
    const float factor[2] = {1 / sums.total[0], 1 / sums.total[1]};
    sums.each([&](int head, int entry, float sum, int h) {
        *at(args.out, (first * GROUP_SIZE + head) * HEAD_DIM + entry) = to_half(sum * factor[h]);
    });
}

// The shares `first` to `last` of a row become one; MERGED of them are on their way at once.
__device__ __forceinline__ void merge(const Args& args, int row, int kv_head, int first, int last) {
    constexpr int OWN = HEAD_DIM / 32;  // entries of a lane
    constexpr int MERGED = GROUP_SIZE <= 4 ? 4 : 2;
    const int lane = thread_index() % 32;
    float most[GROUP_SIZE], total[GROUP_SIZE], sums[GROUP_SIZE][OWN];
#pragma unroll
    for (int head = 0; head < GROUP_SIZE; head++) {
        most[head] = NO_SCORE, total[head] = 0;
        for (int i = 0; i < OWN; i++) sums[head][i] = 0;
    }
    for (int share = first; share <= last; share += MERGED) {
        float best[MERGED][GROUP_SIZE], part[MERGED][GROUP_SIZE], values[MERGED][GROUP_SIZE][OWN];
#pragma unroll
        for (int s = 0; s < MERGED; s++) {
            const bool is_one = share + s <= last;
            const int64_t place
                = partial_place(args, is_one ? share + s : first, kv_head, !is_one || share + s == first);
#pragma unroll
            for (int head = 0; head < GROUP_SIZE; head++) {
                best[s][head] = load_fresh_float(args.weights + (place + head) * 2);
                part[s][head] = load_fresh_float(args.weights + (place + head) * 2 + 1);
                if (!is_one) best[s][head] = 2 * NO_SCORE;  // weighs nothing
#pragma unroll
                for (int i = 0; i < OWN; i++)
                    values[s][head][i]
                        = load_fresh_float(args.partial + (place + head) * HEAD_DIM + i * 32 + lane);
            }
        }
#pragma unroll
        for (int s = 0; s < MERGED; s++)
#pragma unroll
            for (int head = 0; head < GROUP_SIZE; head++) {
                const float new_most = best[s][head] > most[head] ? best[s][head] : most[head];
                const float shrink = power_of_2(most[head] - new_most);
                const float weight = power_of_2(best[s][head] - new_most);
                most[head] = new_most;
                total[head] = total[head] * shrink + part[s][head] * weight;
#pragma unroll
                for (int i = 0; i < OWN; i++)
                    sums[head][i] = sums[head][i] * shrink + values[s][head][i] * weight;
            }
    }
    const int64_t place = (static_cast<int64_t>(row) * args.kv_heads + kv_head) * GROUP_SIZE;
#pragma unroll
    for (int head = 0; head < GROUP_SIZE; head++)
#pragma unroll
        for (int i = 0; i < OWN; i++)
            *at(args.out, (place + head) * HEAD_DIM + i * 32 + lane)
                = to_half(sums[head][i] / total[head]);
}

struct Part {
    int row, start, end;  // tiles of the whole row, in the list; none: start == end
};

// A row of several shares, this one done: the last to be done merges.
__device__ __forceinline__ void finish_part(const Args& args, const Share& share, const Part& part,
                                            int kv_head) {
    const int first = share_of(share, part.start), last = share_of(share, part.end - 1);
    uint32_t* count = args.counts + part.row * args.kv_heads + kv_head;
    uint32_t arrived = 0;
    if (thread_index() % 32 == 0) arrived = add_and_see(count, 1);
    arrived = from_lane(static_cast<int>(arrived), 0);
    if (arrived != static_cast<uint32_t>(last - first)) return;
    if (thread_index() % 32 == 0) *count = 0;  // for the next layer
    merge(args, part.row, kv_head, first, last);
}

__global__ void __launch_bounds__(WARPS * 32, 1) balanced_decode(const Args args) {
    start_kernel_after();
    wait_kernel_before();
    const int warp = thread_index() / 32;
    Ring* rings = reinterpret_cast<Ring*>(shared_memory()) + warp * DEPTH;
    const int worker = block_index() * WARPS + warp;
    const int kv_head = worker % args.kv_heads;
    const int num_shares = num_blocks() * WARPS / args.kv_heads;
    if (worker / args.kv_heads >= num_shares) return;
    const Share share = find_share(args, worker / args.kv_heads, num_shares);
    if (share.start == share.end) return;
    Cursor asked;
    asked.left = share.end - share.start;
    asked.open(args, share.row, share.tile);
    int slot = 0;
    const auto ask_next = [&](int to) {
        if (asked.left > 0) {
            ask(args, asked, kv_head, rings[to]);
            asked.advance(args);
        }
        end_copies();  // an empty group too, so that groups and tiles count alike
    };
    for (int i = 0; i < DEPTH - 1; i++) ask_next(i);

    const float scale = args.scale * 1.4426950408889634f;
    Part first_part = {}, last_part = {};  // of rows that other shares have a part of too
    Row sums;
    int row = share.row, tile = share.tile, length = args.lengths[row];
    sums.open(args, row, kv_head);
    for (int place = share.start; place < share.end; place++) {
        wait_copies<DEPTH - 2>();
        sync_warp();  // all lanes' copies have come, and all have read the tile before
        ask_next(slot == 0 ? DEPTH - 1 : slot - 1);
        sums.add(rings[slot], length - tile * TILE, scale);
        slot = slot == DEPTH - 1 ? 0 : slot + 1;
        const int num_tiles = (length + TILE - 1) / TILE;
        const bool is_last = ++tile == num_tiles;
        if (!is_last && place + 1 < share.end) continue;
        sums.close();
        const int begin = place + 1 - tile, end = begin + num_tiles;  // of the row
        if (begin >= share.start && is_last) {
            store_row(args, sums, row, kv_head);
        } else {
            const bool begins = begin >= share.start;
            store_partial(args, sums, partial_place(args, share.index, kv_head, begins));
            (begins ? last_part : first_part) = {row, begin, end};
        }
        if (place + 1 == share.end) break;
        row++, tile = 0, length = args.lengths[row];
        sums.open(args, row, kv_head);
    }
    wait_copies<0>();
    sync_warp();  // all lanes' stores of parts come before the first lane's count
    if (first_part.start < first_part.end) finish_part(args, share, first_part, kv_head);
    if (last_part.start < last_part.end) finish_part(args, share, last_part, kv_head);
}

}  // namespace

// Returns a cudaError_t. `args` is untyped because a function that names a type of the unnamed
// namespace is not exported.
extern "C" int asyncllm_balanced_decode(const void* args, int num_blocks, void* stream) {
    const int bytes = WARPS * DEPTH * static_cast<int>(sizeof(Ring));
    return launch_after(balanced_decode, *static_cast<const Args*>(args), num_blocks, WARPS * 32, bytes,
                        stream);
}
