// Pairs of blocks: clusters of two that reach each other's shared memory.
#pragma once

#include "../../attention/cuda/device.cuh"

#ifndef ASYNCLLM_EMULATED
namespace {

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
// way (docs/log/gemm.md).
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

}  // namespace
#endif
