// A decode step of a dense decoder, from the embeddings to the logits, in one kernel: see
// __init__.py.
//
// One block per SM stays for the whole step. Weights, and the keys and values of earlier
// tokens, depend on nothing that the step computes, so each warp has a producer, a warp that does
// nothing but ask for them, in the order in which they will be needed, DEPTH stages ahead of their
// use and across every point where blocks wait for each other. What blocks compute for each other
// passes through memory in words that say by themselves whether they are there (exchange.cuh).
//
// A product of few rows is a chain of latencies, not of work: what a step costs beyond reading memory
// is the number of instructions between a word's arrival and the words that follow from it.
//
//   stage     8 rows x 256 columns of a weight matrix, by a bulk copy per row; or the keys and values
//             of 8 tokens
//   slice     256 columns of a product; a set of warps splits the slices of its units
//   unit      8 outputs of a product (8 gates and their 8 ups); blocks split the units, and in a
//             block its sets of warps, of which there are several where slices are few
//   group     up to 4 stages of one slice, whose units take the same piece of x
//
// Products use the tensor cores with the weights of two stages as the 16 rows and the batch as the
// 8 columns. Which column of x a register stands for does not matter as long as it is the same in
// both operands, so a thread takes 16 neighbouring bytes where the instruction's own order would be
// 4. All sums are added in an order that depends on shapes and lengths alone.
#include "attention.cuh"
#include "product.cuh"

namespace {

constexpr uint16_t NAN_HALF = 0x7fff;

// Fills what all of a block's threads read in its shared memory.
__device__ __forceinline__ void prepare(const Args& args, Shared& shared) {
    const int thread = thread_index();
#pragma unroll 1
    for (int i = thread; i < args.num_layers; i += 2 * THREADS) shared.layers[i] = args.layers[i];
    if (thread <= HEAD) shared.shapes[thread] = shape_of(args, thread);
    if (thread < (HEAD + 1) * WARPS)
        shared.works[thread / WARPS][thread % WARPS]
            = work_of(shape_of(args, thread / WARPS), thread % WARPS);
    if (thread < MAX_BLOCK_SPLITS) shared.own_splits[thread] = own_split(args, thread);
    if (thread < WARPS * DEPTH) {
        init_barrier((&shared.full[0][0])[thread]);
        init_barrier((&shared.empty[0][0])[thread]);
    }
    if (thread == 0) {
        shared.layers[args.num_layers].weights[0] = args.head;
        shared.layers[args.num_layers].norms[0] = args.final_norm;
        shared.layers[args.num_layers].biases[0] = nullptr;
        shared.splits = Places(args).splits;
        shared.set = *args.phase >> 31;
        shared.is_stuck = 0;
        if constexpr (RANKS > 1) shared.was_stuck = *args.stuck;
    }
    fence_barrier_init();
    sync_block();
}

// Norms are 2 to 16 KiB of a layer's hundreds of MiB, and everyone waits for them.
__device__ __forceinline__ void prefetch_norms(const Args& args, const Shared& shared, int index) {
    const int column = (block_index() * THREADS + thread_index()) * 64;
    if (column >= args.hidden) return;
    prefetch(at(shared.layers[index].norms[GATE_UP], column));
    prefetch(at(shared.layers[index + 1].norms[QKV], column));
}

// At the end. What a block computed that had given up waiting may be wrong, in all rows: each gets a
// NaN among the block's own logits, and fails by it. The next step uses the other set once every
// block has added: the top bit turns then, and needs no reset.
__device__ __forceinline__ void finish(const Args& args, const Shared& shared) {
    sync_workers();  // the logits are written
    if (thread_index() == 0)
        add_relaxed(args.phase, block_index() == 0 ? (1u << 31) - (num_blocks() - 1) : 1);
    if (!shared.is_stuck) return;
    for (int row = thread_index(); row < args.rows; row += THREADS)
        *at(args.logits, static_cast<int64_t>(row) * args.vocab + block_index() * UNIT) = NAN_HALF;
}

// ROWS: most that the step may have.
template <int ROWS>
__global__ void __launch_bounds__(2 * THREADS, 1) persistent_decode(const Args args) {
    Shared& shared = *reinterpret_cast<Shared*>(shared_memory());
    const int thread = thread_index(), lane = thread % 32;
    prepare(args, shared);
    if (thread >= THREADS) {
        give_registers<PRODUCER_REGISTERS>();
        return produce(args, shared, (thread - THREADS) / 32, lane);
    }
    take_registers<CONSUMER_REGISTERS>();
    const Lane me = {thread / 32, lane, lane / 4, lane % 4};
    Patience patience;
    Ring ring;
    const int set = shared.set;
    unsigned char* exchange = exchange_of(args, set, 0);
    const void* input = args.embeddings;
#pragma unroll 1
    for (int i = 0; i <= 4 * args.num_layers; i++) {
        const Layer& layer = shared.layers[i / 4];
        const int kind = i == 4 * args.num_layers ? HEAD : i % 4;
        const Shape shape = shared.shapes[kind];
        Operands operands = operands_of(args, layer, kind, shape, exchange, input);
        if constexpr (RANKS > 1) operands.sent = sent_of(args, set, i / 4, kind);
        if (LAYERS != PLAIN && kind == HEAD)
            product<ROWS, PLAIN>(args, operands, shape, kind, shared, ring, patience, me);
        else
            product<ROWS, LAYERS>(args, operands, shape, kind, shared, ring, patience, me);
        if (kind == QKV) {
            prefetch_norms(args, shared, i / 4);
            // A step empties what the one before it used.
            empty(exchange_of(args, set ^ 1, i / 4), args.layer_bytes);
            if constexpr (RANKS > 1)
                if (shared.was_stuck) empty_received(args, set ^ 1, i / 4);
            attention(args, layer, exchange, shared, ring, patience, me);
        }
        if (kind == DOWN) input = exchange, exchange += args.layer_bytes;
    }
    finish(args, shared);
}

}  // namespace

EXPORT_LAYOUT(Layer, FIELD(weights), FIELD(scales), FIELD(biases), FIELD(norms), FIELD(q_norm), FIELD(k_norm), FIELD(cache))
EXPORT_LAYOUT(Args, FIELD(layers), FIELD(final_norm), FIELD(head), FIELD(offsets), FIELD(embeddings), FIELD(logits),
    FIELD(exchange), FIELD(phase), FIELD(stuck), FIELD(block_tables), FIELD(positions), FIELD(rotary_rows),
    FIELD(cos_sin), FIELD(table_stride), FIELD(page_stride), FIELD(kv_stride), FIELD(layer_bytes),
    FIELD(num_layers), FIELD(rows), FIELD(hidden), FIELD(heads), FIELD(kv_heads), FIELD(intermediate),
    FIELD(vocab), FIELD(eps), FIELD(head_eps), FIELD(scale), FIELD(rank), FIELD(peers), FIELD(received),
    FIELD(closed))

// Returns a cudaError_t. `untyped`: Args. All sizes are multiples: hidden, intermediate and heads * HEAD_DIM
// of 256, vocab of 8, and it is at least 8 for each block.
extern "C" int asyncllm_persistent_decode(const void* untyped, int num_blocks, void* stream) {
    const Args& args = *static_cast<const Args*>(untyped);
    // One row, the commonest, has its own code, without what there is for others.
    const auto kernel = args.rows == 1 ? persistent_decode<1> : persistent_decode<MAX_ROWS>;
    const size_t shared_bytes = sizeof(Shared) + args.num_layers * sizeof(Layer);
    return launch_kernel(kernel, args, num_blocks, 2 * THREADS, static_cast<int>(shared_bytes),
                         stream, Order::TOGETHER);
}
