// Attention of one token per row over paged keys and values: see __init__.py.
//
// The keys and values of all KV heads and rows, in tiles of 16 tokens, are one list, and all warps
// take equal splits of it, whatever the rows' lengths: no warp has more to read than another. A warp
// works alone: it asks for its tiles DEPTH - 1 ahead, from one row to the next, and a block is 8 of
// them because that much is on the way at once. Their splits are neighbours, so that a row that
// several warps have is mostly one block's; there is little to merge between blocks, and that is
// slow.
//
// Positions, tables and the keys of earlier steps were there before any kernel that may still run, so
// all that is asked for before the kernel before has ended. If this one rotates, that includes the first
// tiles: the new key and value come from the projection, and the row's last tile takes them from
// registers.
#include "merge.cuh"

namespace {

// The split's tiles: rows that are its own are done, of its first and its last it may have a part.
__device__ __forceinline__ void attend(const Args& args, const Split& split, Shared& shared) {
    const int lane = thread_index() % 32, warp = thread_index() / 32;
    Tile* ring = shared.rings[warp];
    Cursor asked(args, split);
    int slot = 0;
    if (!args.rotates()) wait_kernel_before();  // which writes newest keys
    for (int i = 0; i < DEPTH - 1; i++) asked.ask(args, ring[i]);
    wait_kernel_before();
    if (split.start == split.end) return;

    const float scale = args.scale * 1.4426950408889634f;
    Softmax sums;
    NewToken newest;
    Place place = split.place;
    const auto open_row = [&](int i) {
        sums.open(args, place);
        if (!args.rotates()) return;
        const bool ends = i - place.tile + place.num_tiles() <= split.end;
        if (ends) newest.load(args, place);
        Angles angles;
        angles.load(args, place.angle);
        rotate(args, angles, args.q_weight, sums.q);
        if (ends) newest.rotate(args, angles);
    };
    open_row(split.start);
    for (int i = split.start; i < split.end; i++) {
        wait_copies<DEPTH - 2>();
        sync_warp();  // all lanes' copies have come, and all have read the tile before
        asked.ask(args, ring[slot == 0 ? DEPTH - 1 : slot - 1]);
        const int begin = i - place.tile, end = begin + place.num_tiles();  // of the row
        if (args.rotates() && i + 1 == end) newest.put(args, place, ring[slot]);
        sums.add(ring[slot], place.length - place.tile * TILE, scale);
        slot = slot == DEPTH - 1 ? 0 : slot + 1;
        if (i + 1 < end && i + 1 < split.end) {
            place.tile++;
            continue;
        }
        sums.close();
        const bool begins = begin >= split.start;
        if (begins && i + 1 == end) {
            sums.store_out(args, place);
        } else {
            sync_warp();  // all have read the last tile, whose place the part may take
            sums.store(begins ? shared.last_part(warp) : shared.firsts[warp]);
            if (lane == 0 && (begins || warp == 0))
                shared.runs[begins ? 1 + warp : 0]
                    = {place.kv_head, place.row, split.list.split_of(begin),
                       split.list.split_of(end - 1)};
        }
        if (i + 1 == split.end) break;
        place.next_row(args);
        open_row(i + 1);
    }
}

__global__ void __launch_bounds__(WARPS * 32, 1) balanced_decode(const Args args) {
    start_kernel_after();
    Shared& shared = *reinterpret_cast<Shared*>(shared_memory());
    const int thread = thread_index();
    if (thread <= WARPS) shared.runs[thread] = {};
    if (thread < 2) shared.ended[thread] = {};
    sync_block();
    attend(args, find_split(args, block_index() * WARPS + thread / 32), shared);
    sync_block();
    merge(args, shared);
}

}  // namespace

EXPORT_LAYOUT(Args, FIELD(q), FIELD(cache), FIELD(tables), FIELD(positions), FIELD(out), FIELD(parts),
    FIELD(counts), FIELD(angles), FIELD(cos_sin), FIELD(q_weight), FIELD(k_weight), FIELD(page_stride),
    FIELD(kv_stride), FIELD(rows), FIELD(kv_heads), FIELD(table_stride), FIELD(eps), FIELD(scale),
    FIELD(starts_early))

// Returns a cudaError_t. `untyped` because a function that names a type of the unnamed namespace is
// not exported.
extern "C" int asyncllm_balanced_decode(const void* untyped, int num_blocks, void* stream) {
    const Args& args = *static_cast<const Args*>(untyped);
    return launch_kernel(balanced_decode, args, num_blocks, WARPS * 32, static_cast<int>(sizeof(Shared)),
                         stream, args.starts_early ? Order::EARLY : Order::AFTER);
}
