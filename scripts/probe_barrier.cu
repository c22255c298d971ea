// What a barrier between blocks costs while copies from memory are on their way: the question that
// models/cuda/persistent_decode.cu stands or falls with.
//
//     nvcc -O3 -arch=sm_90 scripts/probe_barrier.cu -o /tmp/probe && /tmp/probe     (a second)
//
// Cycles, mean over the blocks, of one thread's red.release.gpu, of a poll (ld.acquire) and of a
// load that hits the L2, while cp.async of `stages` x 2 KiB per warp are outstanding in no warp, in
// the other warps of its block, in its own too. If the release waits for the copies, every barrier
// costs the refill of a ring, and the copies must become cp.async.bulk, whose end is no
// scoreboard's.
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>

namespace {

constexpr int BLOCKS = 132, WARPS = 8, MAX_STAGES = 11, STAGE_BYTES = 2048;
constexpr size_t COLD_BYTES = size_t{4} << 30, STEP_BYTES = 64 << 20;
enum Who { NOBODY, OTHERS, ALL };
struct Times {
    long long release, poll, load, copies;
};

__device__ __forceinline__ void copy_async(void* to, const void* from) {
    const auto shared = static_cast<uint32_t>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(shared), "l"(from)
                 : "memory");
}

__global__ void __launch_bounds__(WARPS * 32, 1)
probe(const char* cold, char* out, const uint4* hot, uint32_t* word, Times* times, int stages,
      int who) {
    extern __shared__ uint4 memory[];
    char* to = reinterpret_cast<char*>(memory);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const char* from = cold + static_cast<size_t>(blockIdx.x * WARPS + warp) * stages * STAGE_BYTES;
    if (who == ALL || (who == OTHERS && warp != 0))
        for (int i = 0; i < stages * STAGE_BYTES / 512; i++)
            copy_async(to + (warp * MAX_STAGES * STAGE_BYTES + i * 512 + lane * 16),
                       from + i * 512 + lane * 16);
    asm volatile("cp.async.commit_group;" ::: "memory");
    out[blockIdx.x * 4096 + threadIdx.x * 2] = 1;  // what a product's end writes
    __syncthreads();
    long long start = 0;
    if (threadIdx.x == 0) {
        uint32_t value;
        uint4 line;
        start = clock64();
        asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(word) : "memory");
        const long long released = clock64();
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
        if (value == 0x7fffffff) out[1] = 1;  // uses it, so that the clock waits for it
        const long long polled = clock64();
        asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(line.x), "=r"(line.y), "=r"(line.z), "=r"(line.w)
                     : "l"(hot)
                     : "memory");
        if (line.x == 12345) out[3] = 1;
        times[blockIdx.x] = {released - start, polled - released, clock64() - polled, 0};
    }
    __syncwarp();
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    if (threadIdx.x == 0) times[blockIdx.x].copies = clock64() - start;
}

}  // namespace

int main() {
    char *cold, *out;
    uint4* hot;
    uint32_t* word;
    Times* times;
    cudaMalloc(&cold, COLD_BYTES), cudaMemset(cold, 0, COLD_BYTES);
    cudaMalloc(&out, BLOCKS * 4096), cudaMalloc(&hot, 4096), cudaMemset(hot, 0, 4096);
    cudaMalloc(&word, 256), cudaMemset(word, 0, 256);
    cudaMalloc(&times, BLOCKS * sizeof(Times));
    const int bytes = WARPS * MAX_STAGES * STAGE_BYTES;
    cudaFuncSetAttribute(probe, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    const char* names[] = {"nobody", "other warps", "all warps"};
    size_t offset = 0;
    for (int stages : {1, 4, MAX_STAGES})
        for (int who : {NOBODY, OTHERS, ALL})
            for (int again = 0; again < 3; again++) {
                offset = (offset + STEP_BYTES) % (COLD_BYTES - STEP_BYTES);  // not in the L2
                const char* from = cold + offset;
                probe<<<BLOCKS, WARPS * 32, bytes>>>(from, out, hot, word, times, stages, who);
                Times host[BLOCKS], mean = {};
                const auto kind = cudaMemcpyDeviceToHost;
                if (const auto error = cudaMemcpy(host, times, sizeof(host), kind)) {
                    std::printf("%s\n", cudaGetErrorString(error));
                    return 1;
                }
                for (const Times& t : host) {
                    mean.release += t.release, mean.poll += t.poll;
                    mean.load += t.load, mean.copies += t.copies;
                }
                if (again > 0)  // the first run loads the kernel
                    std::printf("%2d stages, copies of %-11s: release %6lld  poll %6lld  load %6lld "
                                " last copy %6lld cycles\n",
                                stages, names[who], mean.release / BLOCKS, mean.poll / BLOCKS,
                                mean.load / BLOCKS, mean.copies / BLOCKS);
            }
    return 0;
}
