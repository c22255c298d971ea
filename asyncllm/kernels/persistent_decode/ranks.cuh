// Sums over tensor-parallel ranks, inside the kernel. Each rank has some columns of the layers' second and fourth
// product, so what its blocks have of their outputs is a summand. A thread rounds its two, one word, and
// writes them to every rank's memory, where a thread of each rank waits for all ranks' words of two
// outputs. All ranks add them up in the same order, in the roundings of the other kernels.
//
//   [set][layer][product][source rank][unit of outputs][row][output]   of a rank's memory
//
// The sets are those of the exchange. Who has read words empties them. No rank begins a step before all
// have ended the last one: in between they gather the logits. So nobody writes to a set before it is
// empty, unless words came when who waited for them had given up: from then on each step empties the
// other set, until the engine starts again.
#pragma once

#include "exchange.cuh"

namespace {

static_assert(RANKS <= MAX_RANKS);

// Bytes from one rank's words of a product to the next one's.
__device__ __forceinline__ int64_t source_bytes(const Args& args) {
    return static_cast<int64_t>(MAX_ROWS) * args.hidden * 2;
}

__device__ __forceinline__ int64_t sent_of(const Args& args, int set, int layer, int kind) {
    const int product = 2 * (set * args.num_layers + layer) + (kind == DOWN);
    return product * RANKS * source_bytes(args);
}

__device__ __forceinline__ void empty_received(const Args& args, int set, int layer) {
    empty(static_cast<unsigned char*>(args.received) + sent_of(args, set, layer, OUTPUT),
          2 * RANKS * source_bytes(args));
}

// `place`: bytes, as is `sent`, where the first rank's word is.
__device__ __forceinline__ void send_pair(const Args& args, int64_t place, uint32_t pair) {
    place += args.rank * source_bytes(args);
#pragma unroll
    for (int rank = 0; rank < RANKS; rank++)
        store_anywhere(static_cast<unsigned char*>(args.peers[rank]) + place, pair);
}

// All ranks' words, in their order.
struct Summands {
    uint32_t words[RANKS];

    __device__ __forceinline__ void load(const Args& args, int64_t place) {
#pragma unroll
        for (int rank = 0; rank < RANKS; rank++)
            words[rank] = load_anywhere(static_cast<const unsigned char*>(args.received) + place
                                        + rank * source_bytes(args));
    }

    static __device__ __forceinline__ void empty(const Args& args, int64_t place) {
#pragma unroll
        for (int rank = 0; rank < RANKS; rank++)
            store_anywhere(static_cast<unsigned char*>(args.received) + place
                               + rank * source_bytes(args),
                           EMPTY);
    }

    __device__ __forceinline__ bool are_there() const {
        bool are_there = true;
#pragma unroll
        for (int rank = 0; rank < RANKS; rank++) are_there = are_there && !is_empty(words[rank]);
        return are_there;
    }

    __device__ __forceinline__ uint32_t sum() const {
        float sums[2] = {};
#pragma unroll
        for (int rank = 0; rank < RANKS; rank++)
            sums[0] += low(words[rank]), sums[1] += high(words[rank]);
        return to_pair(sums[0], sums[1]);
    }
};

}  // namespace
