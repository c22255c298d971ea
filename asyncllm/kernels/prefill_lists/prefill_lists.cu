// The work of FA3's blocks in a step with prompts, assigned on the host: see __init__.py.
//
// As FlashInfer's planner does it (PrefillSM90Plan, 0.6.12): tiles of queries, those of the longest
// rows first and of each the last ones, each for the block that has the least to do so far. The same
// also among equals, by the same heap and the same sort, so the two can be compared word by word.
// It has vectors for each block and list; here blocks are chosen first, and then all is in its place.
#include <algorithm>
#include <vector>

#include "../include/device.cuh"

namespace {

struct Args {
    int32_t* host;    // [LISTS, pitch] to be written, and behind them a step's rows, pinned
    int32_t* device;  // the same
    int32_t pitch, heads, tile, blocks;
    int32_t num_decodes;  // tokens before the prompts'
};

// In the order of memory. Each but the first has an entry for each tile, those of a block together.
enum { BLOCK_ENDS, HEADS, TILES, QUERY_STARTS, PAGE_STARTS, QUERY_LENS, KV_LENS, LISTS };

// The last list's memory goes on: query_indptr, kv_lens, page_indptr and pages.
struct Rows {
    const int32_t *query_indptr, *kv_lens, *page_indptr;
    int num, num_words;

    Rows(const int32_t* begin, int num_rows)
        : query_indptr(begin), kv_lens(query_indptr + num_rows + 1), page_indptr(kv_lens + num_rows),
          num(num_rows), num_words(first_page() + page_indptr[num_rows]) {}
    int first_page() const { return 3 * num + 2; }
    int query_len(int row) const { return query_indptr[row + 1] - query_indptr[row]; }
};

struct Tile {
    int row, index;
    float cost;
};

struct Load {
    int block;
    float cost;
};

// The tiles of one head.
std::vector<Tile> find_tiles(const Rows& rows, int size) {
    std::vector<std::pair<int, int>> order(rows.num);  // row, length
    for (int row = 0; row < rows.num; row++) order[row] = {row, rows.kv_lens[row]};
    std::sort(order.begin(), order.end(), [](auto& a, auto& b) { return a.second > b.second; });
    std::vector<Tile> tiles;
    tiles.reserve(rows.query_indptr[rows.num] / size + rows.num);
    for (auto [row, kv_len] : order) {
        const int query_len = rows.query_len(row), num = (query_len + size - 1) / size;
        for (int index = num - 1; index >= 0; index--) {
            const int seen = std::min(kv_len - query_len + (index + 1) * size, kv_len);
            tiles.push_back({row, index, 2 * static_cast<float>(size) + std::max(seen, 0)});
        }
    }
    return tiles;
}

// The block of each head's tiles.
std::vector<int> assign_blocks(const Args& args, const std::vector<Tile>& tiles) {
    const auto is_lighter = [](const Load& a, const Load& b) { return a.cost > b.cost; };
    std::vector<Load> loads(args.blocks);
    for (int block = 0; block < args.blocks; block++) loads[block] = {block, 0};
    std::vector<int> blocks;
    blocks.reserve(args.heads * tiles.size());
    for (int head = 0; head < args.heads; head++) {
        for (const Tile& tile : tiles) {
            std::pop_heap(loads.begin(), loads.end(), is_lighter);
            blocks.push_back(loads.back().block);
            loads.back().cost += tile.cost;
            std::push_heap(loads.begin(), loads.end(), is_lighter);
        }
    }
    return blocks;
}

// `args` and `rows` of its own: else each word written might have changed them, and they are loaded
// again.
void write(const Args args, const Rows rows, const std::vector<Tile>& tiles,
           const std::vector<int>& blocks) {
    const auto list = [&](int which) { return args.host + which * args.pitch; };
    int32_t* ends = list(BLOCK_ENDS);
    std::fill_n(ends, args.blocks + 1, 0);
    for (int block : blocks) ends[block + 1]++;
    for (int block = 0; block < args.blocks; block++) ends[block + 1] += ends[block];
    std::vector<int> places(ends, ends + args.blocks);
    size_t work = 0;
    for (int head = 0; head < args.heads; head++) {
        for (const Tile& tile : tiles) {
            const int place = places[blocks[work++]]++, row = tile.row;
            list(HEADS)[place] = head;
            list(TILES)[place] = tile.index;
            list(QUERY_STARTS)[place] = args.num_decodes + rows.query_indptr[row];
            list(PAGE_STARTS)[place] = rows.first_page() + rows.page_indptr[row];
            list(QUERY_LENS)[place] = rows.query_len(row);
            list(KV_LENS)[place] = rows.kv_lens[row];
        }
    }
}

// Copies what was written of each list, and as much of the rows; then what is left of these.
int copy(const Args& args, int width, int num_words, void* stream) {
    const size_t word = sizeof(int32_t), rows = static_cast<size_t>(LISTS) * args.pitch;
    int error = copy_columns(args.device, args.host, args.pitch * word, width * word, LISTS + 1, stream);
    if (error == 0 && num_words > width) {
        const size_t bytes = (num_words - width) * word, start = rows + width;
        error = copy_columns(args.device + start, args.host + start, bytes, bytes, 1, stream);
    }
    return error;
}

}  // namespace

EXPORT_LAYOUT(Args, FIELD(host), FIELD(device), FIELD(pitch), FIELD(heads), FIELD(tile), FIELD(blocks),
    FIELD(num_decodes))

// Returns a cudaError_t; that of a wrong value where the lists have no place for so many tiles.
extern "C" int asyncllm_prefill_lists(const void* untyped, int num_rows, void* stream) {
    const Args& args = *static_cast<const Args*>(untyped);
    const Rows rows(args.host + static_cast<size_t>(LISTS) * args.pitch, num_rows);
    const std::vector<Tile> tiles = find_tiles(rows, args.tile);
    const int num_works = static_cast<int>(args.heads * tiles.size());
    const int width = std::max(num_works, args.blocks + 1);
    if (width > args.pitch) return 1;
    write(args, rows, tiles, assign_blocks(args, tiles));
    return copy(args, width, rows.num_words, stream);
}
