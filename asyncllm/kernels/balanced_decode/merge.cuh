// The sums of a block's warps become one, in shared memory, and of a row that several blocks have
// the last of them to be done merges what they left. Always in the list's order, whoever is last.
#pragma once

#include "softmax.cuh"

namespace {

constexpr int QUADS = GROUP_SIZE * HEAD_DIM / 4;  // of neighbouring entries, of a row and KV head
constexpr int THREADS = WARPS * 16;               // that merge a run: half of a block's
constexpr int MERGED = 8;                         // parts on their way at once

// A row and KV head that several splits have, of warps in a block or of blocks.
struct Run {
    int kv_head, row;
    int first, last;  // splits

    __device__ __forceinline__ bool exists() const { return first < last; }
    __device__ __forceinline__ int first_block() const { return first / WARPS; }
    __device__ __forceinline__ int last_block() const { return last / WARPS; }
};

struct Shared {
    Tile rings[WARPS][DEPTH];
    Part firsts[WARPS];   // of the row in which a split begins
    Run runs[1 + WARPS];  // in which the block's tiles begin, and that begin in a warp's split
    Run ended[2];         // of all of whose blocks this is the last: the first, one that begins here

    // The part of the row in which a split ends: by then the warp's ring is empty.
    __device__ __forceinline__ Part& last_part(int warp) {
        return *reinterpret_cast<Part*>(&rings[warp][0]);
    }
};
static_assert(sizeof(Part) <= sizeof(Tile) && sizeof(Shared) <= 227 << 10);

// 4 neighbouring entries of a head, in a part or in several.
struct Quad {
    float best = NO_SCORE, total = 0, values[4] = {};

    __device__ __forceinline__ void set(const uint4& sums, const uint4& weights) {
        best = bits_to_float(weights.x), total = bits_to_float(weights.y);
        values[0] = bits_to_float(sums.x), values[1] = bits_to_float(sums.y);
        values[2] = bits_to_float(sums.z), values[3] = bits_to_float(sums.w);
    }

    template <int NUM>
    __device__ __forceinline__ void add(const Quad (&parts)[NUM]) {
        float most = best;
#pragma unroll
        for (int i = 0; i < NUM; i++) most = greater(most, parts[i].best);
        const float shrink = power_of_2(best - most);
        best = most, total *= shrink;
#pragma unroll
        for (int j = 0; j < 4; j++) values[j] *= shrink;
#pragma unroll
        for (int i = 0; i < NUM; i++) {
            const float weight = power_of_2(parts[i].best - most);
            total += parts[i].total * weight;
#pragma unroll
            for (int j = 0; j < 4; j++) values[j] += parts[i].values[j] * weight;
        }
    }

    __device__ __forceinline__ void store(Part::Head& to, int entry) const {
        const uint4 sums
            = {to_bits(values[0]), to_bits(values[1]), to_bits(values[2]), to_bits(values[3])};
        *reinterpret_cast<uint4*>(to.sums + entry) = sums;
        if (entry == 0) to.best = best, to.total = total;
    }

    __device__ __forceinline__ void store_out(const Args& args, const Run& run, int quad) const {
        const int64_t first = static_cast<int64_t>(run.row) * args.kv_heads + run.kv_head;
        auto* to = reinterpret_cast<uint32_t*>(at(args.out, first * GROUP_SIZE * HEAD_DIM + quad * 4));
        const float factor = divide(1, total);
        to[0] = to_pair(values[0] * factor, values[1] * factor);
        to[1] = to_pair(values[2] * factor, values[3] * factor);
    }
};

// Where a block leaves its part of a run that others have parts of.
__device__ __forceinline__ Part& left_by(const Args& args, int block, bool begins) {
    return static_cast<Part*>(args.parts)[block * 2 + begins];
}

// By the `member`-th of THREADS.
__device__ __forceinline__ void merge_warps(const Args& args, Shared& shared, const Run& run,
                                            int member) {
    const int begin = run.first - block_index() * WARPS, end = run.last - block_index() * WARPS;
#pragma unroll 1
    for (int quad = member; quad < QUADS; quad += THREADS) {
        const int head = quad * 4 / HEAD_DIM, entry = quad * 4 % HEAD_DIM;
        Quad sum, parts[WARPS];
        if (begin >= 0) {
            const auto& part = shared.last_part(begin).heads[head];
            sum.set(load_shared(part.sums + entry), load_shared(&part.best));
        }
#pragma unroll
        for (int i = 0; i < WARPS; i++) {
            const auto& part = shared.firsts[i].heads[head];
            if (i > begin && i <= end)
                parts[i].set(load_shared(part.sums + entry), load_shared(&part.best));
        }
        sum.add(parts);
        if (begin >= 0 && end < WARPS)
            sum.store_out(args, run, quad);
        else
            sum.store(left_by(args, block_index(), begin >= 0).heads[head], entry);
    }
}

// Whether all other blocks that have a part of the run have left theirs.
__device__ __forceinline__ bool arrive_last(const Args& args, const Run& run) {
    const int num_others = run.last_block() - run.first_block();
    if (num_others == 0) return false;
    uint32_t* count = args.counts + run.row * args.kv_heads + run.kv_head;
    if (add_and_see(count, 1) != static_cast<uint32_t>(num_others)) return false;
    *count = 0;  // for the next layer
    return true;
}

// By the `member`-th of THREADS.
__device__ __forceinline__ void merge_blocks(const Args& args, const Run& run, int member) {
#pragma unroll 1
    for (int quad = member; quad < QUADS; quad += THREADS) {
        const int head = quad * 4 / HEAD_DIM, entry = quad * 4 % HEAD_DIM;
        const auto& begun = left_by(args, run.first_block(), true).heads[head];
        Quad sum;
        sum.set(load_fresh(begun.sums + entry), load_fresh(&begun.best));
        const int num_others = run.last_block() - run.first_block();
        const Part* others = &left_by(args, run.first_block() + 1, false);
#pragma unroll 1
        for (int first = 0; first < num_others; first += MERGED) {
            Quad parts[MERGED];
#pragma unroll
            for (int i = 0; i < MERGED; i++) {
                const auto& part = others[(first + i) * 2].heads[head];
                if (first + i < num_others)
                    parts[i].set(load_fresh(part.sums + entry), load_fresh(&part.best));
            }
            sum.add(parts);
        }
        sum.store_out(args, run, quad);
    }
}

// All runs of a block, once all of its warps have left their parts. Each half of the block takes some.
__device__ __forceinline__ void merge(const Args& args, Shared& shared) {
    const int thread = thread_index(), half = thread / THREADS, member = thread % THREADS;
    uint32_t own = 0;  // bit i: whether there is run half + 2 * i
#pragma unroll
    for (int i = 0; 2 * i <= WARPS; i++)
        if (half + 2 * i <= WARPS && shared.runs[half + 2 * i].exists()) own |= 1 << i;
#pragma unroll 1
    for (int i = half; own != 0; i += 2, own >>= 1)
        if (own % 2 == 1) merge_warps(args, shared, shared.runs[i], member);
    sync_block();
    if (thread <= WARPS && arrive_last(args, shared.runs[thread]))
        shared.ended[thread > 0] = shared.runs[thread];
    sync_block();
    if (shared.ended[half].exists()) merge_blocks(args, shared.ended[half], member);
}

}  // namespace
