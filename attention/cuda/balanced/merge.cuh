// What the warps of a block have become one, in shared memory, and of a row that several blocks have
// the last of them to be done merges what they left. Always in the list's order, whoever is last.
#pragma once

#include "softmax.cuh"

namespace {

#ifndef TEAM
#define TEAM 8
#endif
constexpr int TEAMS = WARPS / TEAM;
constexpr int QUADS = GROUP_SIZE * HEAD_DIM / 4;  // of neighbouring entries, of a row and KV head
constexpr int THREADS = TEAM * 16;                // that merge a run: half of a block's
constexpr int OWN = (QUADS + THREADS - 1) / THREADS;  // quads of a thread, at most
constexpr int MERGED = OWN >= 8 ? 2 : 16 / OWN;   // parts on their way at once

// A row and KV head that several warps have. `begin`, `end`: of the whole row, in the list; none: equal.
struct Run {
    int kv_head, row, begin, end;
};

struct Shared {
    Tile rings[WARPS][DEPTH];
    Part firsts[WARPS];  // of the row in which a share begins
    Run runs[TEAMS][1 + TEAM];  // that a block begins in, and that begin in a warp's share
    bool is_last[TEAMS][1 + TEAM];

    // Where a warp leaves its part of a run: its ring is empty by the time when a row that ends in
    // others' shares does in its own.
    __device__ __forceinline__ Part& part_of(int warp, bool begins) {
        return begins ? *reinterpret_cast<Part*>(&rings[warp][0]) : firsts[warp];
    }
};
static_assert(sizeof(Part) <= sizeof(Tile) && sizeof(Shared) <= 227 << 10);

// Some parts of 4 neighbouring entries of a head, and what they become.
struct Sum {
    float best = NO_SCORE, total = 0, values[4] = {};

    template <int NUM>
    __device__ __forceinline__ void add(const Sum (&parts)[NUM]) {
        float most = best;
#pragma unroll
        for (int i = 0; i < NUM; i++) most = parts[i].best > most ? parts[i].best : most;
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

    __device__ __forceinline__ void set_values(const uint4& v) {
        values[0] = bits_to_float(v.x), values[1] = bits_to_float(v.y);
        values[2] = bits_to_float(v.z), values[3] = bits_to_float(v.w);
    }

    __device__ __forceinline__ void store_out(const Args& args, const Run& run, int quad) const {
        const int64_t first = static_cast<int64_t>(run.row) * args.kv_heads + run.kv_head;
        auto* to = reinterpret_cast<uint32_t*>(at(args.out, first * GROUP_SIZE * HEAD_DIM + quad * 4));
        const float factor = 1 / total;
        to[0] = to_pair(values[0] * factor, values[1] * factor);
        to[1] = to_pair(values[2] * factor, values[3] * factor);
    }
};

// Where a block leaves its part of a run that others have parts of: [GROUP_SIZE] heads.
__device__ __forceinline__ int64_t partial_place(int block, bool begins) {
    return (static_cast<int64_t>(block) * 2 + begins) * GROUP_SIZE;
}

// By the `member`-th of THREADS. `block`: in the list's order.
__device__ __forceinline__ void merge_warps(const Args& args, Shared& shared, const List& list,
                                            const Run& run, int block, int first_warp, int member) {
    const int begin = list.share_of(run.begin) - block * TEAM;
    const int end = list.share_of(run.end - 1) - block * TEAM;
#pragma unroll 1
    for (int quad = member; quad < QUADS; quad += THREADS) {
        const int head = quad * 4 / HEAD_DIM;
        Sum parts[TEAM], sum;
#pragma unroll
        for (int i = 0; i < TEAM; i++) {
            if (i < begin || i > end) continue;
            const Part& part = shared.part_of(first_warp + i, i == begin);
            parts[i].best = part.best[head], parts[i].total = part.total[head];
            parts[i].set_values(load_shared(&part.sums[head][quad * 4 % HEAD_DIM]));
        }
        sum.add(parts);
        if (begin >= 0 && end < TEAM) {
            sum.store_out(args, run, quad);
            continue;
        }
        const int64_t place = partial_place(block, begin >= 0) + head;
        if (quad * 4 % HEAD_DIM == 0)
            args.weights[place * 2] = sum.best, args.weights[place * 2 + 1] = sum.total;
        *reinterpret_cast<uint4*>(args.partial + place * HEAD_DIM + quad * 4 % HEAD_DIM)
            = {to_bits(sum.values[0]), to_bits(sum.values[1]), to_bits(sum.values[2]),
               to_bits(sum.values[3])};
    }
}

// Whether all other blocks that have a part of the run have left theirs.
__device__ __forceinline__ bool arrive_last(const Args& args, const List& list, const Run& run) {
    const int first = list.share_of(run.begin) / TEAM, last = list.share_of(run.end - 1) / TEAM;
    if (first == last) return false;
    uint32_t* count = args.counts + run.row * args.kv_heads + run.kv_head;
    if (add_and_see(count, 1) != static_cast<uint32_t>(last - first)) return false;
    *count = 0;  // for the next layer
    return true;
}

// By the `member`-th of THREADS.
__device__ __forceinline__ void merge_blocks(const Args& args, const List& list, const Run& run,
                                             int member) {
    const int first = list.share_of(run.begin) / TEAM, last = list.share_of(run.end - 1) / TEAM;
    Sum sums[OWN];
#pragma unroll 1
    for (int block = first; block <= last; block += MERGED) {
        Sum parts[OWN][MERGED];
#pragma unroll
        for (int own = 0; own < OWN; own++)
#pragma unroll
            for (int i = 0; i < MERGED; i++) {
                const int quad = own * THREADS + member;
                parts[own][i].best = 2 * NO_SCORE;  // weighs nothing
                if (block + i > last || quad >= QUADS) continue;
                const int64_t place
                    = partial_place(block + i, block + i == first) + quad * 4 / HEAD_DIM;
                parts[own][i].best = load_fresh_float(args.weights + place * 2);
                parts[own][i].total = load_fresh_float(args.weights + place * 2 + 1);
                parts[own][i].set_values(
                    load_fresh(args.partial + place * HEAD_DIM + quad * 4 % HEAD_DIM));
            }
#pragma unroll
        for (int own = 0; own < OWN; own++) sums[own].add(parts[own]);
    }
#pragma unroll
    for (int own = 0; own < OWN; own++) {
        const int quad = own * THREADS + member;
        if (quad < QUADS) sums[own].store_out(args, run, quad);
    }
}

// All runs of a block. Once all of its warps have left their parts.
__device__ __forceinline__ void merge(const Args& args, Shared& shared, const List& list, int team,
                                      int block) {
    const int thread = thread_index() % (TEAM * 32);
    const int half = thread / THREADS, member = thread % THREADS;
    const Run* runs = shared.runs[team];
#pragma unroll 1
    for (int i = half; i <= TEAM; i += 2)
        if (runs[i].begin < runs[i].end)
            merge_warps(args, shared, list, runs[i], block, team * TEAM, member);
    sync_block();
    if (thread <= TEAM)
        shared.is_last[team][thread]
            = runs[thread].begin < runs[thread].end && arrive_last(args, list, runs[thread]);
    sync_block();
    // Two at most are others' too.
#pragma unroll 1
    for (int i = half; i <= (half == 0 ? 0 : TEAM); i++)
        if (shared.is_last[team][i]) merge_blocks(args, list, runs[i], member);
}

}  // namespace
