// The ring of what a warp reads from memory and multiplies: weights, and keys and values. Another warp,
// its producer, asks for them in the order in which they will be needed, whatever the step waits for.
#pragma once

#include "split.cuh"

namespace {

// The warp that asks for another's stages: its own life is to go through the whole step.
struct Producer {
    const Args& args;
    Shared& shared;
    int warp, lane;
    int slot = 0, num_asked = 0;
    int of_product = 0;  // asked for since its first; the attention counts on
    uint32_t phase = 0;

    // Until there is place for a stage, and few enough are on their way.
    __device__ __forceinline__ Barrier& begin() {
        wait_barrier(shared.empty[warp][slot], phase ^ 1);
        const int most = of_product++ < DEPTH ? EARLY : LATE;
        const bool wraps = slot < most;
        const int before = wraps ? slot + DEPTH - most : slot - most;
        if (num_asked++ >= EARLY) wait_barrier(shared.full[warp][before], phase ^ wraps);
        return shared.full[warp][slot];
    }

    __device__ __forceinline__ void end() {
        if (++slot == DEPTH) slot = 0, phase ^= 1;
    }

    template <Format FORMAT>
    __device__ __forceinline__ void copy_product(const void* weight, const void* scales,
                                                 const void* offsets, int kind) {
        const Shape& shape = shared.shapes[kind];
        const Work work = shared.works[kind][warp];
        const int num_stages = work.num_units << shape.gated;
        of_product = 0;
        const auto copy = [&](int stage, int after, int slice) {
            if constexpr (FORMAT == INT4)
                copy_tiles(weight, scales, offsets, shape, work.set, stage, after, slice);
            else
                copy_weights<FORMAT>(weight, shape, work.set, stage, slice);
        };
        for (int first = 0; first < num_stages; first += GROUP_STAGES) {
            const int after = first + GROUP_STAGES < num_stages ? first + GROUP_STAGES : num_stages;
            for (int slice = work.first_slice; slice < shape.num_slices; slice += shape.split)
                if constexpr (LAYERS == PLAIN)
                    for (int stage = first; stage < after; stage++) copy(stage, after, slice);
                else  // short code: there is that of the head, too
#pragma unroll 1
                    for (int stage = first; stage < after; stage += FORMAT == INT4 ? 2 : 1)
                        copy(stage, after, slice);
        }
    }

    // The first output of a stage.
    __device__ __forceinline__ int output_of(const Shape& shape, int set, int stage) const {
        const int own = set + (stage >> shape.gated) * shape.num_sets;
        return (stage & shape.gated) * shape.features + (block_index() + own * num_blocks()) * UNIT;
    }

    // Of one or two units the tiles of a slice, which are neighbours, and the scales of their groups,
    // by a lane for each output.
    __device__ __forceinline__ void copy_tiles(const void* weight, const void* scales,
                                               const void* offsets, const Shape& shape, int set,
                                               int stage, int after, int slice) {
        Barrier& full = begin();
        const int part = lane / UNIT, half = part % 2, row = lane % UNIT;
        const int num = after - stage > 1 ? 2 : 1;
        const int64_t place = static_cast<int64_t>(output_of(shape, set, stage + half)) * shape.size;
        if (half < num && (HAS_OFFSETS || part == half))
            copy_async_few<GROUPS * 2>(shared.ring[warp].scale(slot, part, row, 0),
                                       at(part == half ? scales : offsets,
                                          (place + row * shape.size) / GROUP + slice * GROUPS));
        arrive_after_copies(full);
        sync_warp();
        if (lane == 0) arrive_and_expect_tx(full, num * GROUPS * TILE_BYTES);
        sync_warp();
        if (half < num && lane == half * UNIT)
            copy_bulk(shared.ring[warp].row(slot, 0) + half * HALF_STAGE,
                      static_cast<const unsigned char*>(weight) + place / 2
                          + slice * GROUPS * TILE_BYTES,
                      GROUPS * TILE_BYTES, full);
        end();
    }

    // Each of a stage's outputs is a row of it.
    template <Format FORMAT>
    __device__ __forceinline__ void copy_weights(const void* weight, const Shape& shape, int set,
                                                 int stage, int slice) {
        constexpr int WEIGHT_BYTES = FORMAT == PLAIN ? 2 : 1;
        Barrier& full = begin();
        if (lane == 0) arrive_and_expect_tx(full, UNIT * SLICE<FORMAT> * WEIGHT_BYTES);
        sync_warp();
        const int output = output_of(shape, set, stage) + lane;
        if (lane < UNIT)
            copy_bulk(shared.ring[warp].row(slot, lane),
                      static_cast<const unsigned char*>(weight)
                          + (static_cast<int64_t>(output) * shape.size + slice * SLICE<FORMAT>)
                                * WEIGHT_BYTES,
                      SLICE<FORMAT> * WEIGHT_BYTES, full);
        end();
    }

    // The warp's tokens of a split.
    __device__ __forceinline__ void copy_split(const Layer& layer, const Split& split) {
        for (int token = split.start + warp * TOKENS; token < split.end; token += TILE)
            copy_tokens(layer, split, token);
    }

    // Each is a row: its key, then its value, whose chunks of 16 bytes are in an order by which those
    // of eight tokens are in different banks. Zeros where there is no token or where it is the new one.
    __device__ __forceinline__ void copy_tokens(const Layer& layer, const Split& split, int first) {
        constexpr int CHUNKS = HEAD_DIM / 8;
        Barrier& full = begin();
        const int chunk = lane % CHUNKS, is_value = lane / CHUNKS % 2;
        const int num = (split.end < split.position ? split.end : split.position) - first;
        const uint16_t* from = at(layer.cache, place_of(args, split, first)
                                                   + is_value * args.kv_stride + chunk * 8);
        for (int t = lane / (2 * CHUNKS); t < TOKENS; t += 32 / (2 * CHUNKS)) {
            const int place = is_value ? chunk ^ t : chunk;
            unsigned char* row = shared.ring[warp].row(slot, t) + is_value * HEAD_DIM * 2;
            copy_async_or_zero(row + place * 16,
                               from + static_cast<int64_t>(t) * args.kv_heads * HEAD_DIM,
                               t < num ? 16 : 0);
        }
        arrive_after_copies(full);
        sync_warp();
        if (lane == 0) arrive(full);
        end();
    }
};

__device__ __forceinline__ void produce(const Args& args, Shared& shared, int warp, int lane) {
    Producer producer = {args, shared, warp, lane};
#pragma unroll 1
    for (int i = 0; i <= 4 * args.num_layers; i++) {
        const Layer& layer = shared.layers[i / 4];
        const int kind = i == 4 * args.num_layers ? HEAD : i % 4;
        if (LAYERS != PLAIN && kind == HEAD)
            producer.copy_product<PLAIN>(layer.weights[HEAD % 4], nullptr, nullptr, kind);
        else
            producer.copy_product<LAYERS>(layer.weights[i % 4], layer.scales[i % 4],
                                          HAS_OFFSETS ? args.offsets[i] : nullptr, kind);
        if (kind != QKV) continue;
#pragma unroll 1
        for (int s = 0; has_split(shared, s); s++) producer.copy_split(layer, shared.own_splits[s]);
    }
}

// A warp's stages as it uses them.
struct Ring {
    int slot = 0;  // the next to use
    uint32_t phase = 0;

    // The next stage, complete.
    __device__ __forceinline__ int next(Shared& shared, const Lane& me) {
        wait_barrier(shared.full[me.warp][slot], phase);
        const int stage = slot;
        if (++slot == DEPTH) slot = 0, phase ^= 1;
        return stage;
    }

    // All lanes have read these two, which may be one.
    __device__ __forceinline__ void give_back(Shared& shared, int upper, int lower,
                                              const Lane& me) const {
        sync_warp();
        if (me.lane < (upper == lower ? 1 : 2))
            arrive(shared.empty[me.warp][me.lane == 0 ? upper : lower]);
    }
};

}  // namespace
