// How a warp takes rows from shared memory as operands of its tensor cores.
//
// Which column a register stands for does not matter as long as it is the same in both operands, so a
// lane has 16 bytes that are neighbours where the instruction's own order would take 4: a warp has 8
// rows' 32 columns at a time, a window.
#pragma once

#include "device.cuh"

namespace {

struct Lane {
    int warp, lane, row, quad;  // row: of the tensor cores' operands, 0 to 7
};

// A lane's part of a window of its row.
__device__ __forceinline__ const unsigned char* window_of(const unsigned char* row, int window,
                                                          const Lane& me) {
    return row + (window * 4 + me.quad) * 16;
}

// Two neighbouring windows, of which odd rows read the second first: rows begin in the same bank,
// and what a warp reads at once is then in different ones.
struct Windows {
    uint4 values[2];

    __device__ __forceinline__ uint4 get(int window, const Lane& me) const {
        const uint4 &v = values[window], &w = values[1 - window];
        const bool swap = me.row % 2;
        return {swap ? w.x : v.x, swap ? w.y : v.y, swap ? w.z : v.z, swap ? w.w : v.w};
    }
};

template <uint4 (*LOAD)(const void*)>
__device__ __forceinline__ Windows load_windows(const unsigned char* row, int first, const Lane& me) {
    const int other = me.row % 2;
    Windows windows;
    windows.values[0] = LOAD(window_of(row, first + other, me));
    windows.values[1] = LOAD(window_of(row, first + 1 - other, me));
    return windows;
}

}  // namespace
