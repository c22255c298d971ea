// A warp's weights on their way from memory. Another warp, its feeder, asks for them in the order in
// which they will be needed, whatever the step waits for meanwhile.
#pragma once

#include "shared.cuh"

namespace {

// The next stage that a warp will need.
struct Cursor {
    int product, unit, slice, stage;  // unit counts the set's own
    int num_stages;                   // of the group
    Work work;
    Shape shape;
    const void* weight;

    __device__ __forceinline__ void open(const Args& args, const Shared& shared, int warp) {
        for (; product <= 4 * args.num_layers; product++) {
            shape = shared.shapes[product == 4 * args.num_layers ? HEAD : product % 4];
            work = shared.works[product == 4 * args.num_layers ? HEAD : product % 4][warp];
            if (work.num_units > 0) {
                weight = shared.layers[product / 4].weights[product % 4];
                unit = stage = 0;
                slice = work.first_slice;
                count_stages();
                return;
            }
        }
    }

    __device__ __forceinline__ void count_stages() {
        const int left = (work.num_units - unit) << shape.gated;
        num_stages = left < GROUP_STAGES ? left : GROUP_STAGES;
    }

    __device__ __forceinline__ void advance(const Args& args, const Shared& shared, int warp) {
        if (++stage < num_stages) return;
        stage = 0;
        if ((slice += shape.split) < shape.num_slices()) return;
        slice = work.first_slice;
        unit += GROUP_STAGES >> shape.gated;
        if (unit < work.num_units) return count_stages();
        product++;
        open(args, shared, warp);
    }

    // Where a row of the stage begins: each of its outputs is one.
    __device__ __forceinline__ const void* row(int index) const {
        const int own = work.set + (unit + (stage >> shape.gated)) * shape.num_sets;
        const int part = stage & shape.gated;
        const int first = part * shape.features + (block_index() + own * num_blocks()) * UNIT;
        return at(weight, static_cast<int64_t>(first + index) * shape.size + slice * SLICE);
    }
};

// A feeder's whole life.
__device__ __forceinline__ void feed(const Args& args, Shared& shared, int warp, int lane) {
    Cursor cursor = {};
    cursor.open(args, shared, warp);
    int slot = 0;
    uint32_t turn = 0;
    int num_asked = 0;
    for (; cursor.product <= 4 * args.num_layers; cursor.advance(args, shared, warp)) {
        Signal& full = shared.full[warp][slot];
        wait_signal(shared.empty[warp][slot], turn ^ 1);
        // Two stages on their way and no more: what the workers ask for has to queue behind them.
        const int before = slot < 2 ? slot + DEPTH - 2 : slot - 2;
        if (num_asked++ >= 2) wait_signal(shared.full[warp][before], slot < 2 ? turn ^ 1 : turn);
        if (lane == 0) expect_bytes(full, STAGE_BYTES);
        sync_warp();
        if (lane < UNIT)
            copy_bulk(shared.ring[warp].row(slot, lane), cursor.row(lane), SLICE * 2, full);
        if (++slot == DEPTH) slot = 0, turn ^= 1;
    }
}

// A warp's stages as it uses them.
struct Ring {
    int slot = 0, used = 0;  // the next to use, the next to give back
    uint32_t turn = 0;

    // The lane's row of the next stage, complete.
    __device__ __forceinline__ const unsigned char* next(Shared& shared, const Lane& me) {
        wait_signal(shared.full[me.warp][slot], turn);
        const unsigned char* stage = shared.ring[me.warp].row(slot, me.row);
        if (++slot == DEPTH) slot = 0, turn ^= 1;
        return stage;
    }

    // All lanes have read the stages so far.
    __device__ __forceinline__ void give_back(Shared& shared, const Lane& me) {
        sync_warp();
        for (; used != slot; used = used == DEPTH - 1 ? 0 : used + 1)
            if (me.lane == 0) arrive(shared.empty[me.warp][used]);
    }
};

}  // namespace
