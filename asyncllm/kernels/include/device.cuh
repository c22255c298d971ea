// The parts of a CUDA device that our kernels use, by names of our own. tests/cuda/emulator.h has the
// same names for a CPU, so that a kernel which is written in them can be run and checked there.
#pragma once

#include "layout.cuh"

// When a kernel's blocks start: when the kernel before has ended, or before, if it waits for that itself
// (`wait_kernel_before`), or all at once, because they wait for each other.
enum class Order { AFTER, EARLY, TOGETHER };

#ifndef ASYNCLLM_EMULATED
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <type_traits>

namespace {

#define thread_index() static_cast<int>(threadIdx.x)
#define block_index() static_cast<int>(blockIdx.x)
#define num_blocks() static_cast<int>(gridDim.x)

__device__ __forceinline__ unsigned char* shared_memory() {
    extern __shared__ __align__(128) uint4 memory[];
    return reinterpret_cast<unsigned char*>(memory);
}

__device__ __forceinline__ void sync_block() { __syncthreads(); }
// The block's first threads alone.
__device__ __forceinline__ void sync_first(int num_threads) {
    asm volatile("bar.sync 1, %0;" ::"r"(num_threads) : "memory");
}
__device__ __forceinline__ void sync_warp() { __syncwarp(); }
__device__ __forceinline__ float across(float x, int step) {
    return __shfl_xor_sync(~0u, x, step);
}
__device__ __forceinline__ float add_across(float x, int step) { return x + across(x, step); }
__device__ __forceinline__ float most_across(float x, int step) {
    return fmaxf(x, across(x, step));
}

__device__ __forceinline__ int from_lane(int x, int lane) { return __shfl_sync(~0u, x, lane); }
// In how many lanes of the warp.
__device__ __forceinline__ int count_lanes(bool is_valid) {
    return __popc(__ballot_sync(~0u, is_valid));
}

__device__ __forceinline__ void prefetch(const void* p) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

__device__ __forceinline__ uint32_t shared_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// 16 bytes to shared memory, complete once `wait_copies` says so of their group. `bytes`: 16, or 0
// for zeros.
__device__ __forceinline__ void copy_async_or_zero(void* to, const void* from, int bytes) {
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
                 "l"(from), "r"(bytes)
                 : "memory");
}
// 4 or 8 bytes, likewise.
template <int BYTES>
__device__ __forceinline__ void copy_async_few(void* to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(to)), "l"(from),
                 "n"(BYTES)
                 : "memory");
}
__device__ __forceinline__ void end_copies() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int LATER>
__device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory");
}

// An mbarrier: a word in shared memory by which some threads tell others of copies. A phase ends when
// a thread, or as many as it was initialised for, has arrived and the bytes expected have come.
using Barrier = uint64_t;

template <int ARRIVALS = 1>
__device__ __forceinline__ void init_barrier(Barrier& barrier) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "n"(ARRIVALS)
                 : "memory");
}
// Before `sync_block`, after which all may use them.
__device__ __forceinline__ void fence_barrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void arrive(Barrier& barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(&barrier)) : "memory");
}
__device__ __forceinline__ void arrive_and_expect_tx(Barrier& barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)),
                 "r"(bytes)
                 : "memory");
}
// Until the latest phase of this parity has ended; that before the first is of parity 1.
__device__ __forceinline__ void wait_barrier(Barrier& barrier, uint32_t parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n@!done bra again;\n}"
        ::"r"(shared_address(&barrier)), "r"(parity)
        : "memory");
}
__device__ __forceinline__ void copy_bulk(void* to, const void* from, int bytes, Barrier& barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
        ::"r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(&barrier))
        : "memory");
}
// The barrier's phase does not end before this thread's copies so far have come.
__device__ __forceinline__ void arrive_after_copies(Barrier& barrier) {
    asm volatile("cp.async.mbarrier.arrive.shared.b64 [%0];" ::"r"(shared_address(&barrier))
                 : "memory");
}
// This thread's writes to shared memory come before later bulk copies to the same place.
__device__ __forceinline__ void show_to_copies() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// By all threads of four warps.
template <int NUM>
__device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(NUM));
}
template <int NUM>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(NUM));
}

// Clusters of two blocks that reach each other's shared memory.
__device__ __forceinline__ int cluster_rank() {
    int rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
// The two halves of a cluster barrier, for who has something to do between them: that this thread has
// come, and until all of both blocks have. The other block may use mbarriers initialised before; of
// what else was written they say nothing, for a release would wait until it is there.
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// 16 bytes to the same place of the shared memory of that block of the cluster, whose barrier counts
// them: who waits for it sees them. No release is needed, which would wait for all copies in flight
// (docs/log/gemm.md).
__device__ __forceinline__ void store_remote(uint4& to, const float (&values)[4], Barrier& barrier,
                                             int rank) {
    asm volatile(
        "{\n.reg .b32 there, then;\nmapa.shared::cluster.u32 there, %0, %2;\n"
        "mapa.shared::cluster.u32 then, %1, %2;\n"
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [there], "
        "{%3, %4, %5, %6}, [then];\n}"
        ::"r"(shared_address(&to)), "r"(shared_address(&barrier)), "r"(rank), "f"(values[0]),
          "f"(values[1]), "f"(values[2]), "f"(values[3])
        : "memory");
}

// Loads of what other blocks write during this kernel: past the first cache, which may hold the old,
// and in this place of the program. Each word is whole, and says nothing about others.
__device__ __forceinline__ uint4 load_fresh(const void* p) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ uint32_t load_fresh_pair(const void* p) {
    uint32_t v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ float load_fresh_float(const float* p) {
    float v;
    asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ void store_fresh_pair(void* p, uint32_t v) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ void store_fresh_float(float* p, float v) {
    asm volatile("st.relaxed.gpu.global.f32 [%0], %1;" ::"l"(p), "f"(v) : "memory");
}
// The same for what other GPUs or the host write, or read, during this kernel.
__device__ __forceinline__ uint32_t load_anywhere(const void* p) {
    uint32_t v;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ void store_anywhere(void* p, uint32_t v) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
// Before what was not there is looked for again.
__device__ __forceinline__ void poll_again() {}
__device__ __forceinline__ uint4 load_constant(const void* p) {
    return __ldg(static_cast<const uint4*>(p));
}

__device__ __forceinline__ uint4 load_shared(const void* p) {
    return *static_cast<const uint4*>(p);
}
// In this place of the program.
__device__ __forceinline__ uint4 load_shared_here(const void* p) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(shared_address(p)) : "memory");
    return v;
}

// Who sees the sum need not see anything else.
__device__ __forceinline__ void add_relaxed(uint32_t* p, uint32_t value) {
    asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}
// By one thread between two `sync_block`: its block sees what those wrote before whose sums it saw.
__device__ __forceinline__ uint32_t add_and_see(uint32_t* p, uint32_t value) {
    uint32_t old;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
                 : "=r"(old) : "l"(p), "r"(value) : "memory");
    return old;
}
// c [16, 8] += a [16, 16] times b [16, 8].
__device__ __forceinline__ void multiply_add(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                             uint32_t a3, uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Four matrices of 8 x 8 numbers, transposed: lane i gives a row of 16 bytes, of matrix i / 8; of
// matrix x, y, z and w it gets row i / 4, columns i % 4 * 2 and the next.
__device__ __forceinline__ uint4 load_transposed(const void* row) {
    uint4 v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(shared_address(row)) : "memory");
    return v;
}
// A matrix of 8 x 8 numbers in a warp: lane i has row i / 4, columns i % 4 * 2 and the next.
__device__ __forceinline__ uint32_t transpose(uint32_t pair) {
    uint32_t transposed;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(pair));
    return transposed;
}

// Programmatic launch: the kernel after this one may start, the one before it has ended.
__device__ __forceinline__ void start_kernel_after() {
    asm volatile("griddepcontrol.launch_dependents;");
}
__device__ __forceinline__ void wait_kernel_before() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

__device__ __forceinline__ float bits_to_float(uint32_t bits) { return __uint_as_float(bits); }
__device__ __forceinline__ uint32_t to_bits(float x) { return __float_as_uint(x); }
__device__ __forceinline__ uint32_t to_pair(float low, float high) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
// (x & mask) | bits, by one instruction.
__device__ __forceinline__ uint32_t masked_or(uint32_t x, uint32_t mask, uint32_t bits) {
    uint32_t result;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(x), "r"(mask), "r"(bits));
    return result;
}
// Of two words, the first's in the lower bits.
__device__ __forceinline__ uint32_t lower_halves(uint32_t a, uint32_t b) {
    return __byte_perm(a, b, 0x5410);
}
__device__ __forceinline__ uint32_t upper_halves(uint32_t a, uint32_t b) {
    return __byte_perm(a, b, 0x7632);
}
// bfloat16s, of which both differences are.
__device__ __forceinline__ uint32_t subtract_pairs(uint32_t pair, uint32_t by) {
    uint32_t difference;
    asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(difference) : "r"(pair), "r"(by));
    return difference;
}
// For a number below 2^126.
__device__ __forceinline__ float divide(float x, float by) { return __fdividef(x, by); }
// 0 where that is below 2^-126.
__device__ __forceinline__ float power_of_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float greater(float x, float y) { return fmaxf(x, y); }
__device__ __forceinline__ float inverse_root(float x) { return rsqrtf(x); }

// Returns a cudaError_t. `cluster`: blocks that copy for each other.
template <typename Args>
int launch_kernel(void (*kernel)(Args), const std::remove_const_t<Args>& args, int num_blocks,
                  int num_threads, int shared_bytes, void* stream, Order order, int cluster = 1) {
    const cudaError_t error = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (error != cudaSuccess) return error;
    cudaLaunchAttribute attributes[2];
    if (order == Order::TOGETHER) {
        attributes[0].id = cudaLaunchAttributeCooperative;
        attributes[0].val.cooperative = 1;
    } else {
        attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[0].val.programmaticStreamSerializationAllowed = order == Order::EARLY;
    }
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
    const cudaLaunchConfig_t config
        = {dim3(num_blocks), dim3(num_threads), static_cast<size_t>(shared_bytes),
           static_cast<cudaStream_t>(stream), attributes, cluster > 1 ? 2u : 1u};
    return cudaLaunchKernelEx(&config, kernel, args);
}

// To the device: of `num_rows` rows, `pitch` bytes apart here and there, the first `width` bytes each.
// From pinned memory, which is read later. Returns a cudaError_t.
inline int copy_columns(void* to, const void* from, size_t pitch, size_t width, size_t num_rows,
                        void* stream) {
    return cudaMemcpy2DAsync(to, pitch, from, pitch, width, num_rows, cudaMemcpyHostToDevice,
                             static_cast<cudaStream_t>(stream));
}

}  // namespace
#endif

namespace {

__device__ __forceinline__ float low(uint32_t pair) { return bits_to_float(pair << 16); }
__device__ __forceinline__ float high(uint32_t pair) { return bits_to_float(pair & 0xffff0000u); }
__device__ __forceinline__ float to_float(const void* half) {
    return low(*static_cast<const uint16_t*>(half));
}
__device__ __forceinline__ uint16_t to_half(float x) {
    return static_cast<uint16_t>(to_pair(x, 0) & 0xffff);
}
// Address arithmetic in bf16 elements.
__device__ __forceinline__ const uint16_t* at(const void* base, int64_t element) {
    return static_cast<const uint16_t*>(base) + element;
}
__device__ __forceinline__ uint16_t* at(void* base, int64_t element) {
    return static_cast<uint16_t*>(base) + element;
}

}  // namespace
