// What Hopper's tensor cores take from shared memory, and how it comes there: tiles of 64 columns, 128
// bytes, whose chunks of 16 bytes lie where the hardware looks for them. A tile of any number of rows
// begins at a multiple of 1024 bytes. Blocks come in pairs, clusters of two, and copy for each other.
#pragma once

#include "../pairs.cuh"

#ifndef ASYNCLLM_EMULATED
#include <cuda.h>
#include <dlfcn.h>
#endif

namespace {

constexpr int TILE_COLUMNS = 64;
constexpr int ROW_BYTES = 2 * TILE_COLUMNS;
constexpr int FEATURES = 112;  // of a block's tile of outputs: each is a row of gate and one of up
constexpr int WEIGHT_ROWS = 2 * FEATURES;
constexpr int GROUP_ROWS = 64;  // of x, that four warps multiply

}  // namespace

#ifndef ASYNCLLM_EMULATED
namespace {

using Matrix = CUtensorMap;

// For copies of boxes of so many rows; zeros where a box is beyond the matrix. bf16, contiguous.
// False where the driver cannot.
bool describe(Matrix& matrix, const void* base, uint64_t rows, uint64_t columns, uint32_t box_rows) {
    using Encode = decltype(&cuTensorMapEncodeTiled);
    static const auto encode = [] {
        void* driver = dlopen("libcuda.so.1", RTLD_NOW);
        return driver ? reinterpret_cast<Encode>(dlsym(driver, "cuTensorMapEncodeTiled")) : nullptr;
    }();
    if (encode == nullptr) return false;
    const cuuint64_t sizes[] = {columns, rows}, strides[] = {columns * 2};
    const cuuint32_t box[] = {TILE_COLUMNS, box_rows}, steps[] = {1, 1};
    return encode(&matrix, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(base), sizes,
                  strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)
        == CUDA_SUCCESS;
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

// A tile's place and order, as the tensor cores are told: groups of 8 rows follow each other.
__device__ __forceinline__ uint64_t describe_tile(const void* tile) {
    constexpr uint64_t GROUP = 8 * ROW_BYTES >> 4, SWIZZLED = 1;
    return (shared_address(tile) & 0x3ffff) >> 4 | 1ull << 16 | GROUP << 32 | SWIZZLED << 62;
}
__device__ __forceinline__ void multiply_16_columns(float (&d)[FEATURES], uint64_t a, uint64_t b) {
#define EIGHT(i) \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
        "+f"(d[i + 6]), "+f"(d[i + 7])
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n224k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "
        "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, "
        "%36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, "
        "%53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, "
        "%70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, "
        "%87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, "
        "%104, %105, %106, %107, %108, %109, %110, %111"
        "}, %112, %113, 1, 1, 1, 0, 0;"
        : EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24), EIGHT(32), EIGHT(40), EIGHT(48), EIGHT(56),
          EIGHT(64), EIGHT(72), EIGHT(80), EIGHT(88), EIGHT(96), EIGHT(104)
        : "l"(a), "l"(b));
#undef EIGHT
}
// By all threads of four warps: sums [64, 224] += x [64, 64] times weight [224, 64] transposed, in
// the background. Of 8 columns a thread of warp w has, in rows 16 w + lane / 4 and 8 further, columns
// lane % 4 * 2 and the next: d[4 * i ..] of columns 8 i to 8 i + 7.
__device__ __forceinline__ void multiply_tiles(float (&d)[FEATURES], const void* x,
                                               const void* weight) {
    const uint64_t a = describe_tile(x), b = describe_tile(weight);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int i = 0; i < TILE_COLUMNS / 16; i++)
        multiply_16_columns(d, a + (i * 32 >> 4), b + (i * 32 >> 4));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Until no more than so many of the latest are on their way.
template <int LATER>
__device__ __forceinline__ void wait_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LATER) : "memory");
}
__device__ __forceinline__ void wait_all_products(float (&d)[FEATURES]) {
    wait_products<0>();
#pragma unroll
    for (int i = 0; i < FEATURES; i++) asm volatile("" : "+f"(d[i])::"memory");  // not before
}

}  // namespace
#endif
