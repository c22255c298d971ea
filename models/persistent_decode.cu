// A decode step of a dense decoder, from the embeddings to the logits, in one kernel: see
// persistent_decode.py.
//
// One block per multiprocessor stays for the whole step. Weights depend on nothing that the step
// computes, so each warp asks for its own, in the order in which it will need them, DEPTH stages
// ahead of their use and across every barrier: memory goes on being read while blocks wait for each
// other, for the attention, and for the last of them to end.
//
//   stage     8 rows x 128 columns of a weight matrix, by 4 cp.async of 16 bytes per lane. One warp
//             asks for it and the same warp uses it, so that no other warp ever waits for it.
//   slice     128 columns of a product; a block's warps share out the slices of all of its units
//   unit      8 outputs of a product (8 gates and their 8 ups); blocks share out the units
//   group     up to 4 stages of one slice, whose units take the same piece of x
//
// Products use the tensor cores with the weights of two stages as the 16 rows and the batch as the
// 8 columns. Which column of x a register stands for does not matter as long as it is the same in
// both operands, so a thread takes 16 neighbouring bytes where the instruction's own order would be
// 4. All sums are added in an order that depends on shapes and lengths alone.
#ifndef ASYNCLLM_EMULATED
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#endif

#ifndef HEAD_DIM
#error "give HEAD_DIM (64 or 128), GROUP_SIZE (1 to 8 query heads of a KV head) and BLOCK_SIZE"
#endif

namespace {

constexpr int WARPS = 8;
constexpr int THREADS = WARPS * 32;
constexpr int MAX_ROWS = 8;
constexpr int UNIT = 8;             // outputs of a unit
constexpr int SLICE = 128;          // columns of a slice
constexpr int GROUP_STAGES = 4;     // of one slice
constexpr int STAGE_BYTES = UNIT * SLICE * 2;
// Stages of a warp that are asked for or not yet used: all the shared memory there is.
constexpr int DEPTH = GROUP_SIZE <= 4 ? 12 : 10;
constexpr int MAX_SPLITS = 32;      // shares of one sequence's attention
constexpr int TOKEN_LANES = HEAD_DIM / 8;      // that hold one token's key
constexpr int WARP_TOKENS = 32 / TOKEN_LANES;  // that a warp takes at a time
constexpr int TILE = WARPS * WARP_TOKENS;      // that a block takes at a time
// Tiles of which a lane's tokens are on their way; more heads leave fewer registers.
constexpr int AHEAD = GROUP_SIZE <= 4 ? 3 : GROUP_SIZE == 5 ? 2 : 1;
constexpr int MERGED = 16;           // shares that a thread takes at a time
constexpr int HALF = HEAD_DIM / 2;
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float NO_SCORE = -1e30f;  // below any score, and finite: no difference of two is NaN

enum Kind { QKV, OUTPUT, GATE_UP, DOWN, HEAD };  // four products of a layer, and the last

struct Layer {
    const void* weights[4];  // by kind: [features, size]
    const void* biases[4];   // [features], or null
    const void *input_norm, *post_norm;                             // [hidden]
    const void *q_norm, *k_norm;                                    // [HEAD_DIM], or null
    void* cache;  // [pages, 2, block_size, kv_heads, HEAD_DIM]
};

struct Args {
    const Layer* layers;          // [num_layers]
    const void* final_norm;       // [hidden]
    const void* head;             // [vocab, hidden]
    void* residual;               // [rows, hidden]: the embeddings; used up
    void* qkv;                    // [rows, (heads + 2 * kv_heads) * HEAD_DIM]
    void* attended;               // [rows, heads * HEAD_DIM]
    void* gated;                  // [rows, intermediate]
    void* logits;                 // [rows, vocab]
    float* partial;               // [rows, heads, MAX_SPLITS, HEAD_DIM]
    float* partial_lse;           // [rows, heads, MAX_SPLITS]
    uint32_t* counts;             // [rows, kv_heads], zero; left zero
    uint32_t* barrier;            // one word, zero at first
    uint32_t* stuck;              // set where blocks waited for ever
    const int32_t* block_tables;  // [rows, table_stride]
    const int32_t* positions;     // [rows], of the new tokens
    const int32_t* rotary_rows;   // [rows], each token's row of cos_sin
    const float* cos_sin;         // [.., HEAD_DIM], cosines then sines
    int64_t table_stride, page_stride, kv_stride;  // elements
    int32_t num_layers, rows, hidden, heads, kv_heads, intermediate, vocab;
    float eps, head_eps, scale;   // of the norms; of the heads' norms; of q times k
};

#ifndef ASYNCLLM_EMULATED  // tests/cuda/emulator.h has the same for a CPU

#define thread_index() static_cast<int>(threadIdx.x)
#define block_index() static_cast<int>(blockIdx.x)
#define num_blocks() static_cast<int>(gridDim.x)

__device__ __forceinline__ unsigned char* shared_memory() {
    extern __shared__ uint4 memory[];
    return reinterpret_cast<unsigned char*>(memory);
}

__device__ __forceinline__ void sync_block() { __syncthreads(); }
__device__ __forceinline__ void sync_warp() { __syncwarp(); }
__device__ __forceinline__ float add_across(float x, int step) {
    return x + __shfl_xor_sync(~0u, x, step);
}

__device__ __forceinline__ float most_across(float x, int step) {
    return fmaxf(x, __shfl_xor_sync(~0u, x, step));
}

__device__ __forceinline__ void prefetch(const void* p) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

// 16 bytes to shared memory; complete once `wait_copies` says so of their group.
__device__ __forceinline__ void copy_async(void* to, const void* from) {
    const auto shared = static_cast<uint32_t>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(shared), "l"(from)
                 : "memory");
}
__device__ __forceinline__ void end_copies() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int LATER>
__device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory");
}

// What other blocks wrote during this kernel: past the first cache, which may hold the old, and in
// this place of the program.
__device__ __forceinline__ uint4 load_fresh(const void* p) {
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ uint32_t load_fresh_pair(const void* p) {
    uint32_t v;
    asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ float load_fresh_float(const float* p) {
    float v;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ uint16_t load_fresh_half(const void* p) {
    uint16_t v;
    asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ uint4 load_constant(const void* p) {
    return __ldg(static_cast<const uint4*>(p));
}

// By one thread between two `sync_block`: who sees the sum sees what its block wrote before.
__device__ __forceinline__ void add_release(uint32_t* p, uint32_t value) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}
// The same, and the block then sees what those wrote whose sums it saw.
__device__ __forceinline__ uint32_t add_and_see(uint32_t* p, uint32_t value) {
    uint32_t old;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
                 : "=r"(old) : "l"(p), "r"(value) : "memory");
    return old;
}
__device__ __forceinline__ uint32_t load_acquire(const uint32_t* p) {
    uint32_t value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
    return value;
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

__device__ __forceinline__ float bits_to_float(uint32_t bits) { return __uint_as_float(bits); }
__device__ __forceinline__ uint32_t to_pair(float low, float high) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
__device__ __forceinline__ float power_of_2(float x) { return exp2f(x); }
__device__ __forceinline__ float inverse_root(float x) { return rsqrtf(x); }

#endif

__device__ __forceinline__ float low(uint32_t pair) { return bits_to_float(pair << 16); }
__device__ __forceinline__ float high(uint32_t pair) { return bits_to_float(pair & 0xffff0000u); }
__device__ __forceinline__ uint16_t to_half(float x) {
    return static_cast<uint16_t>(to_pair(x, 0) & 0xffff);
}
__device__ __forceinline__ float from_half(uint16_t half) {
    return bits_to_float(static_cast<uint32_t>(half) << 16);
}
// Address arithmetic in bf16 elements.
__device__ __forceinline__ const uint16_t* at(const void* base, int64_t element) {
    return static_cast<const uint16_t*>(base) + element;
}
__device__ __forceinline__ uint16_t* at(void* base, int64_t element) {
    return static_cast<uint16_t*>(base) + element;
}

struct Shape {
    int size, num_units, features;
    int gated;    // 1: a unit has two stages, 0: one
    int num_own;  // units of this block: block_index(), then every num_blocks()th
};

__device__ __forceinline__ Shape shape_of(const Args& args, int kind) {
    const int q_size = args.heads * HEAD_DIM, kv_size = args.kv_heads * HEAD_DIM;
    Shape shape = {args.hidden, 0, 0, kind == GATE_UP, 0};
    shape.features = kind == QKV ? q_size + 2 * kv_size
        : kind == GATE_UP ? args.intermediate : kind == HEAD ? args.vocab : args.hidden;
    if (kind == OUTPUT) shape.size = q_size;
    if (kind == DOWN) shape.size = args.intermediate;
    shape.num_units = shape.features / UNIT;
    shape.num_own = (shape.num_units - block_index() + num_blocks() - 1) / num_blocks();
    return shape;
}

// --- what a block keeps in shared memory ------------------------------------------------------

constexpr int SUMS = GROUP_STAGES * MAX_ROWS * UNIT;  // of a group: [stage][row][output]

struct Shared {
    unsigned char ring[WARPS][DEPTH][STAGE_BYTES];
    union {
        struct {
            float sums[2][WARPS][SUMS];    // two groups take turns
            float squares[WARPS][MAX_ROWS];
        } product;
        struct {
            float q[GROUP_SIZE][HEAD_DIM];
            float new_key[HEAD_DIM], new_value[HEAD_DIM];
            float best[WARPS][GROUP_SIZE], total[WARPS][GROUP_SIZE];
            float sums[WARPS][GROUP_SIZE][HEAD_DIM];
            uint32_t arrived;
        } attention;
    };
    struct {  // of the block's share of attention, by positions alone: the same in every layer
        int row, kv_head, split, position, start, end, num_active;
        int64_t new_place, places[AHEAD][TILE];  // of tokens in the cache: elements
        float cos_sin[HEAD_DIM];
    } plan;
    int num_work;            // shares of all rows and KV heads
    Shape shapes[HEAD + 1];  // of the products, by kind
    Layer layers[1];         // [num_layers + 1]: the last one has the head's weights alone
};
constexpr int MAX_LAYERS = 128;
static_assert(sizeof(Shared) + MAX_LAYERS * sizeof(Layer) <= 227 << 10);

struct Lane {
    int warp, lane, row, quad;  // row: of the tensor cores' operands, 0 to 7
};

// --- products ---------------------------------------------------------------------------------

// The next stage that a warp asks for. A block's warps walk the same units, each its own slices.
struct Cursor {
    int product, unit, slice, stage;  // unit counts the block's own
    int num_stages;                   // of the group
    Shape shape;
    const void* weight;

    __device__ __forceinline__ void open(const Args& args, const Shared& shared, int warp) {
        for (; product <= 4 * args.num_layers; product++) {
            shape = shared.shapes[product == 4 * args.num_layers ? HEAD : product % 4];
            if (shape.num_own > 0 && warp < shape.size / SLICE) {
                weight = shared.layers[product / 4].weights[product % 4];
                unit = stage = 0;
                slice = warp;
                count_stages();
                return;
            }
        }
    }

    __device__ __forceinline__ void count_stages() {
        const int left = (shape.num_own - unit) << shape.gated;
        num_stages = left < GROUP_STAGES ? left : GROUP_STAGES;
    }

    __device__ __forceinline__ void advance(const Args& args, const Shared& shared, int warp) {
        if (++stage < num_stages) return;
        stage = 0;
        if ((slice += WARPS) < shape.size / SLICE) return;
        slice = warp;
        unit += GROUP_STAGES >> shape.gated;
        if (unit < shape.num_own) return count_stages();
        product++;
        open(args, shared, warp);
    }
};

// A warp's stages on their way. Slots of a stage: row r, 16-byte chunk c at r * 16 + (c ^ swap(r)),
// so that neither a row's copies nor 4 chunks of 2 rows read at once meet in a bank.
struct Ring {
    Cursor cursor;
    int slot;  // of the next stage to use

    __device__ __forceinline__ void start(const Args& args, Shared& shared, const Lane& me) {
        cursor.product = 0;
        cursor.open(args, shared, me.warp);
        slot = 0;
        for (int i = 0; i < DEPTH - 1; i++) ask(args, shared, me, i);
    }

    __device__ __forceinline__ void ask(const Args& args, Shared& shared, const Lane& me, int to) {
        if (cursor.product <= 4 * args.num_layers) {
            const Shape& shape = cursor.shape;
            const int own = cursor.unit + (cursor.stage >> shape.gated);
            const int part = cursor.stage & shape.gated;
            const int first
                = part * shape.features + (block_index() + own * num_blocks()) * UNIT;
            const int chunk = me.lane % 16;
            unsigned char* stage = shared.ring[me.warp][to];
#pragma unroll
            for (int i = 0; i < UNIT / 2; i++) {
                const int row = 2 * i + me.lane / 16;
                const int column = cursor.slice * SLICE + chunk * 8;
                const auto place = static_cast<int64_t>(first + row) * shape.size + column;
                copy_async(stage + (row * 16 + (chunk ^ (row % 2 * 4))) * 16,
                           at(cursor.weight, place));
            }
            cursor.advance(args, shared, me.warp);
        }
        end_copies();  // an empty group too, so that groups and stages count alike
    }

    // The next stage, complete.
    __device__ __forceinline__ const unsigned char* next(Shared& shared, const Lane& me) {
        wait_copies<DEPTH - 2>();
        sync_warp();  // all lanes' copies have come, and all have read the stage before
        const unsigned char* stage = shared.ring[me.warp][slot];
        slot = slot == DEPTH - 1 ? 0 : slot + 1;
        return stage;
    }

    // After `next`: the stage before it makes room for the one that is DEPTH - 1 ahead of it.
    __device__ __forceinline__ void ask_ahead(const Args& args, Shared& shared, const Lane& me) {
        ask(args, shared, me, slot < 2 ? slot + DEPTH - 2 : slot - 2);
    }
};

// A lane's share of one slice of x: of its row, 8 columns of each 32.
template <bool NORM>
struct Piece {
    uint4 values[SLICE / 32];
    uint4 norm[NORM ? SLICE / 32 : 1];

    __device__ __forceinline__ void load(const void* x, const void* norm_weight, int size, int rows,
                                         int slice, const Lane& me) {
#pragma unroll
        for (int i = 0; i < SLICE / 32; i++) {
            const int column = slice * SLICE + i * 32 + me.quad * 8;
            values[i] = {0, 0, 0, 0};
            if (me.row < rows)
                values[i] = load_fresh(at(x, static_cast<int64_t>(me.row) * size + column));
            if (NORM) norm[i] = load_constant(at(norm_weight, column));
        }
    }

    static __device__ __forceinline__ uint32_t weigh(uint32_t pair, uint32_t by, float& squares) {
        squares += low(pair) * low(pair) + high(pair) * high(pair);
        return to_pair(low(pair) * low(by), high(pair) * high(by));
    }

    // Times the norm's weights, rounded as everywhere; the factor of a row comes at the end.
    __device__ __forceinline__ void weigh(float& squares) {
#pragma unroll
        for (int i = 0; i < (NORM ? SLICE / 32 : 0); i++) {
            uint4& v = values[i];
            const uint4& w = norm[i];
            v = {weigh(v.x, w.x, squares), weigh(v.y, w.y, squares), weigh(v.z, w.z, squares),
                 weigh(v.w, w.w, squares)};
        }
    }
};

struct Operands {
    const void *x, *norm, *bias;
    void* out;
};

// A thread's output of a group: where it goes and what is added to it, known before the sums.
template <int KIND>
struct Output {
    static constexpr bool ADDS = KIND == OUTPUT || KIND == DOWN;
    static constexpr int PARTS = KIND == GATE_UP ? 2 : 1;
    uint16_t* to;  // null: this thread has none
    int unit, row, column;
    uint16_t bias[PARTS], residual;  // as read: to make them floats is to wait for them

    __device__ __forceinline__ Output(const Args& args, const Operands& operands,
                                      const Shape& shape, int first_unit, int num_stages) {
        const int thread = thread_index();
        unit = thread / (MAX_ROWS * UNIT);
        row = thread / UNIT % MAX_ROWS;
        column = (block_index() + (first_unit + unit) * num_blocks()) * UNIT + thread % UNIT;
        to = nullptr;
        if (unit * PARTS >= num_stages || row >= args.rows) return;
        to = at(operands.out, static_cast<int64_t>(row) * shape.features + column);
        if (ADDS) residual = load_fresh_half(to);
        for (int part = 0; part < PARTS && operands.bias != nullptr; part++)
            bias[part] = *at(operands.bias, part * shape.features + column);
    }

    // From the sums of all warps.
    __device__ __forceinline__ void finish(const Args& args, const Operands& operands,
                                           const Shape& shape, const Shared& shared,
                                           int buffer) const {
        if (to == nullptr) return;
        float factor = 1;
        if (operands.norm != nullptr) {
            float squares = 0;
            for (int w = 0; w < WARPS; w++) squares += shared.product.squares[w][row];
            factor = inverse_root(squares * (1.0f / shape.size) + args.eps);
        }
        float result[PARTS];
        for (int part = 0; part < PARTS; part++) {
            const int place
                = (unit * PARTS + part) * MAX_ROWS * UNIT + thread_index() % (MAX_ROWS * UNIT);
            float sum = 0;
            for (int w = 0; w < WARPS; w++) sum += shared.product.sums[buffer][w][place];
            sum *= factor;
            if (operands.bias != nullptr) sum += from_half(bias[part]);
            result[part] = sum;
        }
        float value = result[0];
        if (PARTS == 2) value = value / (1 + power_of_2(-value * LOG2_E)) * result[PARTS - 1];
        if (ADDS) value += from_half(residual);
        *to = to_half(value);
    }
};

// A lane's 16 bytes of each 32 columns of its row of a stage.
struct Weights {
    uint4 windows[SLICE / 32];

    __device__ __forceinline__ void load(const unsigned char* stage, const Lane& me) {
#pragma unroll
        for (int i = 0; i < SLICE / 32; i++) {
            const int chunk = (i * 4 + me.quad) ^ (me.row % 2 * 4);
            windows[i] = *reinterpret_cast<const uint4*>(stage + (me.row * 16 + chunk) * 16);
        }
    }
};

template <int KIND>
__device__ __forceinline__ void product(const Args& args, const Operands& operands, Shared& shared,
                                        Ring& ring, const Lane& me) {
    constexpr bool NORM = KIND == QKV || KIND == GATE_UP || KIND == HEAD;
    constexpr int PARTS = KIND == GATE_UP ? 2 : 1;
    constexpr int GROUP_UNITS = GROUP_STAGES / PARTS;
    constexpr int PAIRS = GROUP_STAGES / 2;
    constexpr int PIECES = NORM ? 1 : 3;  // of x on their way; a norm's weights take their room
    const Shape shape = shared.shapes[KIND];
    const int num_slices = shape.size / SLICE;
    const int num_own_slices = (num_slices - me.warp + WARPS - 1) / WARPS;
    Piece<NORM> ahead[PIECES];
    const auto ask = [&](Piece<NORM>& piece, int own_slice) {
        const int slice = me.warp + own_slice * WARPS;
        piece.load(operands.x, operands.norm, shape.size, args.rows, slice, me);
    };
#pragma unroll
    for (int i = 0; i < PIECES; i++)
        if (shape.num_own > 0 && i < num_own_slices) ask(ahead[i], i);
    int buffer = 0;
    for (int unit = 0; unit < shape.num_own; unit += GROUP_UNITS, buffer ^= 1) {
        const int left = (shape.num_own - unit) * PARTS;
        const int num_stages = left < GROUP_STAGES ? left : GROUP_STAGES;
        const bool is_last = unit + GROUP_UNITS >= shape.num_own;
        float sums[PAIRS][2][4] = {};  // two each, so that an addition need not wait for the last
        float squares = 0;
        const Output<KIND> output(args, operands, shape, unit, num_stages);
        for (int first = 0; first < num_own_slices; first += PIECES) {
#pragma unroll
            for (int i = 0; i < PIECES; i++) {
                if (first + i >= num_own_slices) break;
                Piece<NORM> x = ahead[i];
                if (first + i + PIECES < num_own_slices)
                    ask(ahead[i], first + i + PIECES);
                else if (!is_last)
                    ask(ahead[i], i);  // of the next group
                x.weigh(squares);
#pragma unroll
                for (int pair = 0; pair < PAIRS; pair++) {
                    if (2 * pair >= num_stages) break;
                    Weights a = {}, b = {};
                    a.load(ring.next(shared, me), me);
                    ring.ask_ahead(args, shared, me);
                    if (2 * pair + 1 < num_stages) {
                        b.load(ring.next(shared, me), me);
                        ring.ask_ahead(args, shared, me);
                    }
#pragma unroll
                    for (int window = 0; window < SLICE / 32; window++) {
                        const uint4 &v = x.values[window], &p = a.windows[window],
                                    &q = b.windows[window];
                        multiply_add(sums[pair][0], p.x, q.x, p.y, q.y, v.x, v.y);
                        multiply_add(sums[pair][1], p.z, q.z, p.w, q.w, v.z, v.w);
                    }
                }
            }
        }
#pragma unroll
        for (int i = 0; i < GROUP_STAGES; i++) {  // of output `me.row`, rows 2 * quad and the next
            const float(&parts)[2][4] = sums[i / 2];
            const int place = (i * MAX_ROWS + 2 * me.quad) * UNIT + me.row;
            float* to = &shared.product.sums[buffer][me.warp][place];
            to[0] = parts[0][i % 2 * 2] + parts[1][i % 2 * 2];
            to[UNIT] = parts[0][i % 2 * 2 + 1] + parts[1][i % 2 * 2 + 1];
        }
        if (NORM && unit == 0) {
            squares = add_across(add_across(squares, 1), 2);
            if (me.quad == 0) shared.product.squares[me.warp][me.row] = squares;
        }
        // One is enough: a buffer is written again after the next, which all reach done with it.
        sync_block();
        output.finish(args, operands, shape, shared, buffer);
    }
}

// --- attention --------------------------------------------------------------------------------

// One token's key and value, 8 entries of each in every lane.
struct Token {
    uint4 key, value;
};

// Two entries of each half of a head: 2i and 2i + 1 in lane i.
struct Pairs {
    uint32_t first, second;
};

// A block's share of one row and KV head, and what it can load before the projection has ended.
struct Share {
    int row, kv_head, split, position;
    int start, end;  // tokens
    int num_active;  // shares of this row and KV head; 0: this one is none of them
    uint16_t* new_key;  // in its page
    float cos0, cos1, sin0, sin1;
    Pairs q_norm, k_norm;
    Token ahead[AHEAD];
};

__device__ __forceinline__ int count_splits(const Args& args) {
    const int splits = num_blocks() / (args.rows * args.kv_heads);
    return splits < 1 ? 1 : splits > MAX_SPLITS ? MAX_SPLITS : splits;
}

__device__ __forceinline__ int64_t place_of(const Args& args, int row, int kv_head, int token) {
    const int page = args.block_tables[row * args.table_stride + token / BLOCK_SIZE];
    const int64_t place = static_cast<int64_t>(token % BLOCK_SIZE) * args.kv_heads + kv_head;
    return page * args.page_stride + place * HEAD_DIM;
}

__device__ __forceinline__ Token load_token_at(const Args& args, const uint16_t* key, int lane) {
    key += lane % TOKEN_LANES * 8;
    return {load_fresh(key), load_fresh(key + args.kv_stride)};
}

__device__ __forceinline__ Token load_token(const Args& args, const Layer& layer,
                                            const Share& share, int token, int lane) {
    if (token >= share.end || token >= share.position) return {{0, 0, 0, 0}, {0, 0, 0, 0}};
    return load_token_at(
        args, at(layer.cache, place_of(args, share.row, share.kv_head, token)), lane);
}

__device__ __forceinline__ int first_token(const Share& share, const Lane& me) {
    return share.start + me.warp * WARP_TOKENS + me.lane / TOKEN_LANES;
}

__device__ __forceinline__ Pairs load_pairs(const void* head, int lane) {
    const int place = 2 * lane < HALF ? 2 * lane : 0;
    return {load_fresh_pair(at(head, place)), load_fresh_pair(at(head, HALF + place))};
}

// Shares by shapes and positions alone. By all threads, between two `sync_block`.
__device__ __forceinline__ void plan_share(const Args& args, int work, Shared& shared) {
    auto& plan = shared.plan;
    const int thread = thread_index();
    const int num_items = args.rows * args.kv_heads, num_splits = count_splits(args);
    const int split = work / num_items, row = work % num_items / args.kv_heads;
    const int kv_head = work % args.kv_heads;
    int num_active = 0, start = 0, end = 0, position = 0;
    if (split < num_splits) {
        position = args.positions[row];
        const int num_tiles = position / TILE + 1;
        const int tiles = (num_tiles + num_splits - 1) / num_splits;
        num_active = (num_tiles + tiles - 1) / tiles;
        if (split >= num_active) num_active = 0;
        start = split * tiles * TILE;
        end = start + tiles * TILE < position + 1 ? start + tiles * TILE : position + 1;
    }
    if (thread == 0) {
        plan.row = row, plan.kv_head = kv_head, plan.split = split, plan.position = position;
        plan.start = start, plan.end = end, plan.num_active = num_active;
    }
    if (num_active == 0) return;
    if (thread == 0) plan.new_place = place_of(args, row, kv_head, position);
    for (int i = thread; i < AHEAD * TILE; i += THREADS)
        if (start + i < end)
            plan.places[i / TILE][i % TILE] = place_of(args, row, kv_head, start + i);
    for (int i = thread; i < HEAD_DIM; i += THREADS)
        plan.cos_sin[i] = args.cos_sin[static_cast<int64_t>(args.rotary_rows[row]) * HEAD_DIM + i];
}

__device__ __forceinline__ Share open_share(const Args& args, const Layer& layer,
                                            const Shared& shared, const Lane& me) {
    const auto& plan = shared.plan;
    Share share = {};
    share.num_active = plan.num_active;
    if (share.num_active == 0) return share;
    share.row = plan.row, share.kv_head = plan.kv_head, share.split = plan.split;
    share.position = plan.position, share.start = plan.start, share.end = plan.end;
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
        const int token = first_token(share, me) + i * TILE;
        if (token < share.end && token < share.position)
            share.ahead[i] = load_token_at(
                args, at(layer.cache, plan.places[i][token - share.start - i * TILE]), me.lane);
    }
    share.new_key = at(layer.cache, plan.new_place);
    const int place = 2 * me.lane < HALF ? 2 * me.lane : 0;
    share.cos0 = plan.cos_sin[place], share.cos1 = plan.cos_sin[place + 1];
    share.sin0 = plan.cos_sin[HALF + place], share.sin1 = plan.cos_sin[HALF + place + 1];
    if (layer.q_norm != nullptr) {
        share.q_norm = load_pairs(layer.q_norm, me.lane);
        share.k_norm = load_pairs(layer.k_norm, me.lane);
    }
    return share;
}

// A head of q or k, normalised and rotated, in the roundings of the other kernels.
__device__ __forceinline__ Pairs rotate_head(const Args& args, const Share& share, const Pairs& raw,
                                             const Pairs& norm, bool has_norm, int lane) {
    float a0 = low(raw.first), a1 = high(raw.first), b0 = low(raw.second), b1 = high(raw.second);
    if (has_norm) {
        float squares = 2 * lane < HALF ? a0 * a0 + a1 * a1 + b0 * b0 + b1 * b1 : 0;
        for (int step = 16; step > 0; step /= 2) squares = add_across(squares, step);
        const float factor = inverse_root(squares / HEAD_DIM + args.head_eps);
        a0 *= factor * low(norm.first), a1 *= factor * high(norm.first);
        b0 *= factor * low(norm.second), b1 *= factor * high(norm.second);
    }
    return {to_pair(a0 * share.cos0 - b0 * share.sin0, a1 * share.cos1 - b1 * share.sin1),
            to_pair(b0 * share.cos0 + a0 * share.sin0, b1 * share.cos1 + a1 * share.sin1)};
}

__device__ __forceinline__ void store_floats(float* to, const Pairs& pairs, int lane) {
    if (2 * lane >= HALF) return;
    to[2 * lane] = low(pairs.first), to[2 * lane + 1] = high(pairs.first);
    to[HALF + 2 * lane] = low(pairs.second), to[HALF + 2 * lane + 1] = high(pairs.second);
}

__device__ __forceinline__ void store_pairs(uint16_t* to, const Pairs& pairs, int lane) {
    if (2 * lane >= HALF) return;
    *reinterpret_cast<uint32_t*>(to + 2 * lane) = pairs.first;
    *reinterpret_cast<uint32_t*>(to + HALF + 2 * lane) = pairs.second;
}

// The heads of q for the block; and where its share holds the new token, that one's key and value,
// also to their page.
__device__ __forceinline__ void load_heads(const Args& args, const Layer& layer, const Share& share,
                                           Shared& shared, const Lane& me) {
    auto& own = shared.attention;
    const bool has_norm = layer.q_norm != nullptr;
    const int64_t width = static_cast<int64_t>(args.heads + 2 * args.kv_heads) * HEAD_DIM;
    const uint16_t* qkv = at(args.qkv, share.row * width);
    for (int member = me.warp; member < GROUP_SIZE; member += WARPS) {
        const int head = share.kv_head * GROUP_SIZE + member;
        const Pairs raw = load_pairs(qkv + head * HEAD_DIM, me.lane);
        store_floats(own.q[member], rotate_head(args, share, raw, share.q_norm, has_norm, me.lane),
                     me.lane);
    }
    if (share.end <= share.position || me.warp != WARPS - 1) return;
    const uint16_t* source = qkv + (args.heads + share.kv_head) * HEAD_DIM;
    const Pairs raw = load_pairs(source, me.lane);
    const Pairs value = load_pairs(source + args.kv_heads * HEAD_DIM, me.lane);
    const Pairs key = rotate_head(args, share, raw, share.k_norm, has_norm, me.lane);
    store_floats(own.new_key, key, me.lane);
    store_floats(own.new_value, value, me.lane);
    store_pairs(share.new_key, key, me.lane);
    store_pairs(share.new_key + args.kv_stride, value, me.lane);
}

__device__ __forceinline__ void unpack(const uint4& v, float (&to)[8]) {
    const uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) to[2 * i] = low(pairs[i]), to[2 * i + 1] = high(pairs[i]);
}

// Softmax over a warp's tokens so far. A lane has 8 entries of the sums, of the tokens it takes.
struct Softmax {
    float best[GROUP_SIZE], total[GROUP_SIZE], sums[GROUP_SIZE][8];

    __device__ __forceinline__ Softmax() {
#pragma unroll
        for (int h = 0; h < GROUP_SIZE; h++) {
            best[h] = NO_SCORE;
            total[h] = 0;
            for (int i = 0; i < 8; i++) sums[h][i] = 0;
        }
    }

    __device__ __forceinline__ void add(int h, float score, const float (&value)[8]) {
        const float new_best = score > best[h] ? score : best[h];
        const float shrink = power_of_2(best[h] - new_best);
        const float weight = power_of_2(score - new_best);
        best[h] = new_best;
        total[h] = total[h] * shrink + weight;
        for (int i = 0; i < 8; i++) sums[h][i] = sums[h][i] * shrink + weight * value[i];
    }

    // The tokens that a warp takes at a time become one; to shared memory.
    __device__ __forceinline__ void store(Shared& shared, const Lane& me) {
        auto& own = shared.attention;
#pragma unroll
        for (int h = 0; h < GROUP_SIZE; h++) {
            float most = best[h];
            for (int step = TOKEN_LANES; step < 32; step *= 2) most = most_across(most, step);
            const float shrink = power_of_2(best[h] - most);
            total[h] *= shrink;
            for (int step = TOKEN_LANES; step < 32; step *= 2)
                total[h] = add_across(total[h], step);
            for (int i = 0; i < 8; i++) {
                sums[h][i] *= shrink;
                for (int step = TOKEN_LANES; step < 32; step *= 2)
                    sums[h][i] = add_across(sums[h][i], step);
                if (me.lane < TOKEN_LANES) own.sums[me.warp][h][me.lane * 8 + i] = sums[h][i];
            }
            if (me.lane == 0) {
                own.best[me.warp][h] = most;
                own.total[me.warp][h] = total[h];
            }
        }
    }
};

// The scores of a warp's tokens of the share.
__device__ __forceinline__ void attend_tokens(const Args& args, const Layer& layer, Share& share,
                                              Shared& shared, const Lane& me) {
    auto& own = shared.attention;
    const int entry = me.lane % TOKEN_LANES * 8;
    const float scale = args.scale * LOG2_E;
    float q[GROUP_SIZE][8];
#pragma unroll
    for (int h = 0; h < GROUP_SIZE; h++)
        for (int i = 0; i < 8; i++) q[h][i] = own.q[h][entry + i];
    Softmax softmax;
    int token = first_token(share, me);
    for (int first = share.start; first < share.end; first += AHEAD * TILE) {
#pragma unroll
        for (int a = 0; a < AHEAD; a++, token += TILE) {
            if (first + a * TILE >= share.end) break;
            float key[8], value[8];
            unpack(share.ahead[a].key, key);
            unpack(share.ahead[a].value, value);
            share.ahead[a] = load_token(args, layer, share, token + AHEAD * TILE, me.lane);
            if (token == share.position) {
                for (int i = 0; i < 8; i++) key[i] = own.new_key[entry + i];
                for (int i = 0; i < 8; i++) value[i] = own.new_value[entry + i];
            }
#pragma unroll
            for (int h = 0; h < GROUP_SIZE; h++) {
                float score = 0;
                for (int i = 0; i < 8; i++) score += q[h][i] * key[i];
                for (int step = TOKEN_LANES / 2; step > 0; step /= 2)
                    score = add_across(score, step);
                softmax.add(h, token < share.end ? score * scale : 2 * NO_SCORE, value);
            }
        }
    }
    softmax.store(shared, me);
}

// The warps become one: an entry of the output, and the log2 of its weights' sum.
__device__ __forceinline__ float merge_warps(const Shared& shared, int member, int entry,
                                             float& lse) {
    const auto& own = shared.attention;
    float most = NO_SCORE, total = 0, sum = 0;
    for (int w = 0; w < WARPS; w++) most = own.best[w][member] > most ? own.best[w][member] : most;
    for (int w = 0; w < WARPS; w++) {
        const float weight = power_of_2(own.best[w][member] - most);
        total += weight * own.total[w][member];
        sum += weight * own.sums[w][member][entry];
    }
    lse = most + log2f(total);
    return sum / total;
}

// The shares of a row and KV head become one, always in the same order. `part`: the first head's.
__device__ __forceinline__ void merge_shares(const Args& args, int64_t part, int num_active,
                                             uint16_t* out) {
    for (int i = thread_index(); i < GROUP_SIZE * HEAD_DIM; i += THREADS) {
        const float* lse = args.partial_lse + part + i / HEAD_DIM * MAX_SPLITS;
        const float* from
            = args.partial + (part + i / HEAD_DIM * MAX_SPLITS) * HEAD_DIM + i % HEAD_DIM;
        float most = NO_SCORE, total = 0, sum = 0;
        for (int first = 0; first < num_active; first += MERGED) {
            float lses[MERGED], values[MERGED];  // all on their way at once
#pragma unroll
            for (int s = 0; s < MERGED; s++) {
                const bool is_one = first + s < num_active;
                lses[s] = is_one ? load_fresh_float(lse + first + s) : 2 * NO_SCORE;
                values[s] = is_one ? load_fresh_float(from + (first + s) * HEAD_DIM) : 0;
            }
            float new_most = most;
#pragma unroll
            for (int s = 0; s < MERGED; s++) new_most = lses[s] > new_most ? lses[s] : new_most;
            const float shrink = power_of_2(most - new_most);
            total *= shrink, sum *= shrink;
            most = new_most;
#pragma unroll
            for (int s = 0; s < MERGED; s++) {
                const float weight = power_of_2(lses[s] - most);
                total += weight, sum += weight * values[s];
            }
        }
        out[i] = to_half(sum / total);
    }
}

// The last share of a row and KV head to be done merges them.
__device__ __forceinline__ void run_share(const Args& args, const Layer& layer, Share& share,
                                          Shared& shared, const Lane& me) {
    auto& own = shared.attention;
    load_heads(args, layer, share, shared, me);
    sync_block();
    attend_tokens(args, layer, share, shared, me);
    sync_block();
    const int64_t head = static_cast<int64_t>(share.row) * args.heads + share.kv_head * GROUP_SIZE;
    uint16_t* out = at(args.attended, head * HEAD_DIM);
    for (int i = thread_index(); i < GROUP_SIZE * HEAD_DIM; i += THREADS) {
        float lse;
        const float result = merge_warps(shared, i / HEAD_DIM, i % HEAD_DIM, lse);
        if (share.num_active == 1) {
            out[i] = to_half(result);
        } else {
            const int64_t part = (head + i / HEAD_DIM) * MAX_SPLITS + share.split;
            args.partial[part * HEAD_DIM + i % HEAD_DIM] = result;
            if (i % HEAD_DIM == 0) args.partial_lse[part] = lse;
        }
    }
    if (share.num_active == 1) return;
    uint32_t* count = args.counts + share.row * args.kv_heads + share.kv_head;
    sync_block();
    if (thread_index() == 0) own.arrived = add_and_see(count, 1);
    sync_block();
    if (own.arrived != static_cast<uint32_t>(share.num_active - 1)) return;
    if (thread_index() == 0) *count = 0;  // for the next layer
    merge_shares(args, head * MAX_SPLITS, share.num_active, out);
}

// --- the step ---------------------------------------------------------------------------------

// All blocks meet: the top bit of the word turns when the last has arrived, and needs no reset.
struct Barrier {
    uint32_t* word;
    uint32_t* stuck;
    uint32_t turned;  // the top bit as it will be
    uint32_t gave_up = 0;  // 1: waits no more, or every later barrier would take as long

    __device__ __forceinline__ Barrier(const Args& args)
        : word(args.barrier), stuck(args.stuck), turned(load_acquire(args.barrier) & TOP) {}

    __device__ __forceinline__ void arrive() {
        sync_block();
        turned ^= TOP;
        const uint32_t step = block_index() == 0 ? TOP - (num_blocks() - 1) : 1;
        if (thread_index() == 0) add_release(word, step);
    }

    __device__ __forceinline__ void wait() {
        if (thread_index() == 0) {
            int polls = 0;
#pragma unroll 1
            while (!gave_up && (load_acquire(word) & TOP) != turned && ++polls < MAX_POLLS) {
            }
            if (polls == MAX_POLLS) *stuck = gave_up = 1;
        }
        sync_block();
    }

    __device__ __forceinline__ void meet() {
        arrive();
        wait();
    }

    static constexpr uint32_t TOP = 0x80000000u;
    static constexpr int MAX_POLLS = 1 << 24;  // seconds: one never came, and the kernel must end
};

// Rows and KV heads, each in shares. Between `arrive` and `wait`: what needs no projection.
__device__ __forceinline__ void attention(const Args& args, const Layer& layer, Barrier& barrier,
                                          Shared& shared, const Lane& me) {
    int work = block_index();
    const int num_work = shared.num_work;
    if (num_work > num_blocks()) {  // the plan of the start is another's now
        plan_share(args, work, shared);
        sync_block();
    }
    Share share = open_share(args, layer, shared, me);
    barrier.wait();
    while (work < num_work) {
        if (share.num_active > 0) run_share(args, layer, share, shared, me);
        work += num_blocks();
        if (work >= num_work) break;
        sync_block();  // before the next share's q
        plan_share(args, work, shared);
        sync_block();
        share = open_share(args, layer, shared, me);
    }
}

__global__ void __launch_bounds__(THREADS, 1) persistent_decode(const Args args) {
    Shared& shared = *reinterpret_cast<Shared*>(shared_memory());
    const int thread = thread_index(), lane = thread % 32;
    const Lane me = {thread / 32, lane, lane / 4, lane % 4};
    Barrier barrier(args);
#pragma unroll 1
    for (int i = thread; i < args.num_layers; i += THREADS) shared.layers[i] = args.layers[i];
    if (thread <= HEAD) shared.shapes[thread] = shape_of(args, thread);
    if (thread == 0) {
        shared.layers[args.num_layers].weights[0] = args.head;
        shared.num_work = args.rows * args.kv_heads * count_splits(args);
    }
    sync_block();
    Ring ring;
    ring.start(args, shared, me);
    plan_share(args, block_index(), shared);
    for (int i = 0; i < args.num_layers; i++) {
        const Layer& layer = shared.layers[i];
        // Norms are 2 to 16 KiB of a layer's hundreds of MiB, and everyone waits for them.
        const bool is_last = i + 1 == args.num_layers;
        const void* next = is_last ? args.final_norm : shared.layers[i + 1].input_norm;
        const int line = (block_index() * THREADS + thread) * 64;
        if (line < args.hidden) prefetch(at(layer.post_norm, line)), prefetch(at(next, line));
        product<QKV>(args, {args.residual, layer.input_norm, layer.biases[QKV], args.qkv}, shared,
                     ring, me);
        barrier.arrive();
        attention(args, layer, barrier, shared, me);
        barrier.meet();
        product<OUTPUT>(args, {args.attended, nullptr, layer.biases[OUTPUT], args.residual}, shared,
                        ring, me);
        barrier.meet();
        product<GATE_UP>(args, {args.residual, layer.post_norm, layer.biases[GATE_UP], args.gated},
                         shared, ring, me);
        barrier.meet();
        product<DOWN>(args, {args.gated, nullptr, layer.biases[DOWN], args.residual}, shared,
                      ring, me);
        barrier.meet();
    }
    product<HEAD>(args, {args.residual, args.final_norm, nullptr, args.logits}, shared, ring, me);
    wait_copies<0>();
}

int shared_bytes(const Args& args) {
    return static_cast<int>(sizeof(Shared) + args.num_layers * sizeof(Layer));
}

}  // namespace

// Returns a cudaError_t. All sizes are multiples: hidden, intermediate and heads * HEAD_DIM of 128,
// vocab of 8. Blocks must all be on the device at once, hence the cooperative launch.
#ifndef ASYNCLLM_EMULATED
extern "C" int asyncllm_persistent_decode(const Args* args, int num_blocks, void* stream) {
    const int bytes = shared_bytes(*args);
    const cudaError_t error = cudaFuncSetAttribute(
        persistent_decode, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return error;
    cudaLaunchConfig_t config = {};
    config.gridDim = num_blocks;
    config.blockDim = THREADS;
    config.dynamicSmemBytes = bytes;
    config.stream = static_cast<cudaStream_t>(stream);
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
    config.attrs = &attribute;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, persistent_decode, *args);
}
#else  // `stream` is the seed of the order in which threads take turns
extern "C" int asyncllm_persistent_decode(const Args* args, int num_blocks, void* stream) {
    const auto seed = static_cast<unsigned>(reinterpret_cast<uintptr_t>(stream));
    emulator::launch(num_blocks, THREADS, shared_bytes(*args), seed,
                     [args] { persistent_decode(*args); });
    return 0;
}
#endif
