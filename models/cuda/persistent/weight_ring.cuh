// A warp's weights on their way from memory: it asks for them in the order in which it will need
// them, whatever the step waits for meanwhile.
#pragma once

#include "shared.cuh"

namespace {

// The next stage that a warp asks for. A block's warps walk the same units, each its own slices.
struct Cursor {
    int product, unit, slice, stage;  // unit counts the block's own
    int num_stages;                   // of the group
    Shape shape;
    const void* weight;

    __device__ __forceinline__ void open(const Args& args, const Shared& shared, int warp) {
        for (; product <= 4 * args.num_layers; product++) {
            shape = shared.shapes[product == 4 * args.num_layers ? HEAD : product % 4];
            if (shape.num_own > 0 && warp < shape.size / SLICE) {
                weight = shared.layers[product / 4].weights[product % 4];
                unit = stage = 0;
                slice = warp;
                count_stages();
                return;
            }
        }
    }

    __device__ __forceinline__ void count_stages() {
        const int left = (shape.num_own - unit) << shape.gated;
        num_stages = left < GROUP_STAGES ? left : GROUP_STAGES;
    }

    __device__ __forceinline__ void advance(const Args& args, const Shared& shared, int warp) {
        if (++stage < num_stages) return;
        stage = 0;
        if ((slice += WARPS) < shape.size / SLICE) return;
        slice = warp;
        unit += GROUP_STAGES >> shape.gated;
        if (unit < shape.num_own) return count_stages();
        product++;
        open(args, shared, warp);
    }
};

// A warp's stages on their way. Slots of a stage: row r, 16-byte chunk c at r * 16 + (c ^ swap(r)),
// so that neither a row's copies nor 4 chunks of 2 rows read at once meet in a bank.
struct Ring {
    Cursor cursor;
    int slot;  // of the next stage to use

    __device__ __forceinline__ void start(const Args& args, Shared& shared, const Lane& me) {
        cursor.product = 0;
        cursor.open(args, shared, me.warp);
        slot = 0;
        for (int i = 0; i < DEPTH - 1; i++) ask(args, shared, me, i);
    }

    __device__ __forceinline__ void ask(const Args& args, Shared& shared, const Lane& me, int to) {
        if (cursor.product <= 4 * args.num_layers) {
            const Shape& shape = cursor.shape;
            const int own = cursor.unit + (cursor.stage >> shape.gated);
            const int part = cursor.stage & shape.gated;
            const int first
                = part * shape.features + (block_index() + own * num_blocks()) * UNIT;
            const int chunk = me.lane % 16;
            unsigned char* stage = shared.ring[me.warp][to];
#pragma unroll
            for (int i = 0; i < UNIT / 2; i++) {
                const int row = 2 * i + me.lane / 16;
                const int column = cursor.slice * SLICE + chunk * 8;
                const auto place = static_cast<int64_t>(first + row) * shape.size + column;
                copy_async(stage + (row * 16 + (chunk ^ (row % 2 * 4))) * 16,
                           at(cursor.weight, place));
            }
            cursor.advance(args, shared, me.warp);
        }
        end_copies();  // an empty group too, so that groups and stages count alike
    }

    // The next stage, complete.
    __device__ __forceinline__ const unsigned char* next(Shared& shared, const Lane& me) {
        wait_copies<DEPTH - 2>();
        sync_warp();  // all lanes' copies have come, and all have read the stage before
        const unsigned char* stage = shared.ring[me.warp][slot];
        slot = slot == DEPTH - 1 ? 0 : slot + 1;
        return stage;
    }

    // After `next`: the stage before it makes room for the one that is DEPTH - 1 ahead of it.
    __device__ __forceinline__ void ask_ahead(const Args& args, Shared& shared, const Lane& me) {
        ask(args, shared, me, slot < 2 ? slot + DEPTH - 2 : slot - 2);
    }
};

}  // namespace
