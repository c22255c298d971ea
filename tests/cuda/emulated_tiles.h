// Clusters of two blocks (models/cuda/pairs.cuh), as emulator.h has the rest.
#pragma once

namespace emulator {
template <typename T>
T& in_block(T& mine, int rank) {
    Block& block = *blocks_by_index[current->block->index / 2 * 2 + rank];
    if (block.has_ended) {
        std::fprintf(stderr, "the shared memory of a block that has ended\n");
        std::_Exit(3);
    }
    auto* place = reinterpret_cast<unsigned char*>(&mine);
    return *reinterpret_cast<T*>(block.memory() + (place - current->block->memory()));
}
}  // namespace emulator

inline int rank_in_pair() { return block_index() % 2; }
inline void arrive_in_pair() {
    emulator::Block& first = *emulator::blocks_by_index[block_index() / 2 * 2];
    emulator::current->pair_turns++;
    if (++first.pair_arrivals % (2 * emulator::num_threads)) return;
    auto& waiting = first.pair_waiting;
    emulator::ready.insert(emulator::ready.end(), waiting.begin(), waiting.end());
    waiting.clear();
    emulator::idle_polls = 0;
}
inline void wait_for_pair() {
    emulator::Block& first = *emulator::blocks_by_index[block_index() / 2 * 2];
    if (first.pair_arrivals >= emulator::current->pair_turns * 2 * emulator::num_threads) return;
    first.pair_waiting.push_back(emulator::current);
    emulator::stop();
}
inline void send(uint4& to, const float (&values)[4], Signal& signal, int rank) {
    std::memcpy(&emulator::in_block(to, rank), values, 16);
    emulator::change(emulator::in_block(signal, rank), false, -16);
}
