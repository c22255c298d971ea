// Pairs of blocks, boxes of matrices and products of tiles, as emulator.h has the rest:
// models/cuda/pairs.cuh, models/cuda/gated/tensor_tiles.cuh.
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
// Where a tile has a number: chunks of 16 bytes are in another order in each of 8 rows.
inline const uint16_t& number(const void* tile, int row, int column) {
    if (reinterpret_cast<uintptr_t>(tile) % Block::ALIGNMENT) std::abort();
    const int byte = row * 128 + ((column * 2) ^ (row % 8 * 16));
    return *reinterpret_cast<const uint16_t*>(static_cast<const unsigned char*>(tile) + byte);
}
}  // namespace emulator

struct Matrix {
    const uint16_t* base;
    int64_t rows, columns;
    int box_rows;
};
inline bool describe(Matrix& matrix, const void* base, uint64_t rows, uint64_t columns,
                     uint32_t box_rows) {
    matrix = {static_cast<const uint16_t*>(base), static_cast<int64_t>(rows),
              static_cast<int64_t>(columns), static_cast<int>(box_rows)};
    return box_rows <= 256 && columns % 8 == 0;
}
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
inline void sync_pair() {
    arrive_in_pair();
    wait_for_pair();
}
inline void arrive_at(Signal& signal, int rank) {
    emulator::change(emulator::in_block(signal, rank), true, 0);
}
inline void send(uint4& to, const float (&values)[4], Signal& signal, int rank) {
    std::memcpy(&emulator::in_block(to, rank), values, 16);
    emulator::change(emulator::in_block(signal, rank), false, -16);
}
inline void copy_box_to(void* to, const Matrix& matrix, int column, int row, Signal& signal, int rank) {
    auto* tile = &emulator::in_block(*static_cast<unsigned char*>(to), rank);
    auto& block = *emulator::blocks_by_index[block_index() / 2 * 2 + rank];
    for (int r = 0; r < matrix.box_rows; r++)
        for (int c = 0; c < 64; c += 8) {
            const bool inside = row + r < matrix.rows && column + c < matrix.columns;
            const uint16_t* from = matrix.base + (row + r) * matrix.columns + column + c;
            auto* chunk = const_cast<uint16_t*>(&emulator::number(tile, r, c));
            block.on_the_way.push_back(
                {chunk, inside ? from : nullptr, 16, &emulator::in_block(signal, rank)});
        }
    while (emulator::shuffle() % 64) emulator::receive();
}
inline void copy_box(void* to, const Matrix& matrix, int column, int row, Signal& signal) {
    copy_box_to(to, matrix, column, row, signal, rank_in_pair());
}
inline void copy_box_to_both(void* to, const Matrix& matrix, int column, int row, Signal& signal) {
    for (int rank = 0; rank < 2; rank++) copy_box_to(to, matrix, column, row, signal, rank);
}
template <size_t SUMS>
void multiply_tiles(float (&d)[SUMS], const void* x, const void* weight) {
    const int lane = thread_index() % 32, first_row = thread_index() % 128 / 32 * 16 + lane / 4;
    emulator::current->products.push_back([&d, x, weight, lane, first_row] {
        for (int half = 0; half < 2; half++) {
            float row[64];
            for (int k = 0; k < 64; k++)
                row[k] = bits_to_float(emulator::number(x, first_row + 8 * half, k) << 16);
            for (size_t i = 0; i < SUMS; i++) {
                if (i / 2 % 2 != static_cast<size_t>(half)) continue;
                const int column = i / 4 * 8 + lane % 4 * 2 + i % 2;
                for (int k = 0; k < 64; k++)
                    d[i] += row[k] * bits_to_float(emulator::number(weight, column, k) << 16);
            }
        }
    });
}
// Four warps multiply together, so what one of them has waited for all have done.
template <int LATER>
void wait_products() {
    auto& products = emulator::current->products;
    while (products.size() > LATER) products.front()(), products.pop_front();
    auto& group = emulator::current->block->warp_groups[thread_index() / 128];
    emulator::meet(group, 128, emulator::WARP, 0);
}
template <size_t SUMS>
void wait_all_products(float (&)[SUMS]) {
    wait_products<0>();
}
