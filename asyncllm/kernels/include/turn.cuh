#pragma once

#include <cstdint>

namespace {

// A place of a ring after another, round and round.
template <int PLACES>
struct Turn {
    int place = 0;
    uint32_t parity = 0;

    __device__ __forceinline__ void next() {
        if (++place == PLACES) place = 0, parity ^= 1;
    }
};

}  // namespace
