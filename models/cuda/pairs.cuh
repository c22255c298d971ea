// Pairs of blocks, clusters of two that reach each other's shared memory, and copies of boxes of a
// matrix to shared memory.
#pragma once

#include "../../attention/cuda/device.cuh"

#ifndef ASYNCLLM_EMULATED
#include <cuda.h>
#include <dlfcn.h>

namespace {

using Matrix = CUtensorMap;

// How a box lies in shared memory: its rows one after another, or, of 64 columns, with chunks of 16
// bytes where the tensor cores look for them.
enum class Order { ROWS, TILES };

// For copies of boxes of so many rows and columns; zeros where a box is beyond the matrix. bf16,
// contiguous. False where the driver cannot.
bool describe(Matrix& matrix, const void* base, uint64_t rows, uint64_t columns, uint32_t box_rows,
              uint32_t box_columns, Order order) {
    using Encode = decltype(&cuTensorMapEncodeTiled);
    static const auto encode = [] {
        void* driver = dlopen("libcuda.so.1", RTLD_NOW);
        return driver ? reinterpret_cast<Encode>(dlsym(driver, "cuTensorMapEncodeTiled")) : nullptr;
    }();
    if (encode == nullptr) return false;
    const cuuint64_t sizes[] = {columns, rows}, strides[] = {columns * 2};
    const cuuint32_t box[] = {box_columns, box_rows}, steps[] = {1, 1};
    const auto swizzle
        = order == Order::TILES ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE;
    return encode(&matrix, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(base), sizes,
                  strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)
        == CUDA_SUCCESS;
}

__device__ __forceinline__ int rank_in_pair() {
    int rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ __forceinline__ void sync_pair() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
}
// The two halves of such a meeting, for who has something to do between them: that this thread has come,
// and until all of both blocks have. Signals that were shown before are open to the other block after; of
// what else was written they say nothing, for a release would wait until it is there.
__device__ __forceinline__ void arrive_in_pair() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void wait_for_pair() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// At the signal in the same place of the shared memory of that block of the pair. Says nothing about
// writes.
__device__ __forceinline__ void arrive_at(Signal& signal, int rank) {
    asm volatile(
        "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n}"
        ::"r"(shared_address(&signal)), "r"(rank)
        : "memory");
}
// 16 bytes to the same place of the shared memory of that block of the pair, whose signal counts them:
// who waits for it sees them. No release is needed, which would wait for all copies that are on their
// way (docs/LOG.md).
__device__ __forceinline__ void send(uint4& to, const float (&values)[4], Signal& signal, int rank) {
    asm volatile(
        "{\n.reg .b32 there, then;\nmapa.shared::cluster.u32 there, %0, %2;\n"
        "mapa.shared::cluster.u32 then, %1, %2;\n"
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [there], "
        "{%3, %4, %5, %6}, [then];\n}"
        ::"r"(shared_address(&to)), "r"(shared_address(&signal)), "r"(rank), "f"(values[0]),
          "f"(values[1]), "f"(values[2]), "f"(values[3])
        : "memory");
}
// A box to this block's shared memory.
__device__ __forceinline__ void copy_box(void* to, const Matrix& matrix, int column, int row,
                                         Signal& signal) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
        "[%1, {%2, %3}], [%4];"
        ::"r"(shared_address(to)), "l"(&matrix), "r"(column), "r"(row),
          "r"(shared_address(&signal))
        : "memory");
}
// A box into the same place of both blocks of the pair, each told by its own signal.
__device__ __forceinline__ void copy_box_to_both(void* to, const Matrix& matrix, int column, int row,
                                                 Signal& signal) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;"
        ::"r"(shared_address(to)), "l"(&matrix), "r"(column), "r"(row),
          "r"(shared_address(&signal)), "h"(static_cast<uint16_t>(3))
        : "memory");
}

}  // namespace
#endif
