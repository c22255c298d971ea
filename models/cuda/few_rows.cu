// Matrix products of 2 to 16 rows, with what comes before and after them: see few_rows.py.
//
// One block computes FEATURES = 16 outputs of every row. Its warps share out the columns; each holds
// its first weights in registers before it waits for the kernel before it. The tensor cores take the
// weights as the operand of 16 rows and the few rows as that of 8. Which column a register stands for
// does not matter as long as it is the same in both operands, so a thread loads 16 bytes that are
// neighbours in memory where the instruction's own order would take 4.
#include "../../attention/cuda/device.cuh"

namespace {

// WARPS and AHEAD by a sweep (docs/LOG.md).
constexpr int FEATURES = 16;
constexpr int WARPS = 16;
constexpr int ROWS_TILE = 8;
constexpr int COLUMNS = 32;   // of a warp's load: 8 rows of 64 bytes
constexpr int AHEAD = 2;      // loads in flight per thread and row of the weights

struct Args {
    const __nv_bfloat16* x;          // [rows, size]
    const float* squares;            // [rows, num_squares], or null: the factor is applied already
    const __nv_bfloat16* weight;     // [features (twice if gated), size]
    const __nv_bfloat16* bias;       // or null
    const __nv_bfloat16* next_norm;  // [features], or null: nothing is added
    __nv_bfloat16* out;              // [rows, features]: the result, or the residual it is added to
    __nv_bfloat16* scaled;           // [rows, features]: the sum times next_norm
    float* next_squares;             // [rows, gridDim.x]
    int rows, features, size, num_squares;
    float eps;
};

__device__ __forceinline__ uint4 load_weight(const __nv_bfloat16* p, bool inside) {
    uint4 v = make_uint4(0, 0, 0, 0);
    if (inside)
        asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

__device__ __forceinline__ uint4 load_row(const __nv_bfloat16* p, bool inside) {
    return inside ? *reinterpret_cast<const uint4*>(p) : make_uint4(0, 0, 0, 0);
}

// PARTS: 1, or 2 where gate and up are computed together. TILES: of 8 rows.
template <int PARTS, int TILES, bool ADD>
__global__ void __launch_bounds__(WARPS * 32) few_rows(const Args args) {
    asm volatile("griddepcontrol.launch_dependents;");
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
    const int feature = blockIdx.x * FEATURES + group;
    const int size = args.size, num_loads = size / COLUMNS;
    const __nv_bfloat16* source[PARTS][2];
    bool inside[2];
    for (int half = 0; half < 2; half++) {
        inside[half] = feature + 8 * half < args.features;
        for (int part = 0; part < PARTS; part++)
            source[part][half] = args.weight
                + (static_cast<int64_t>(part) * args.features + feature + 8 * half) * size + quad * 8;
    }
    uint4 weight[AHEAD][PARTS][2];
    auto load = [&](uint4 (&to)[PARTS][2], int i) {
        for (int part = 0; part < PARTS; part++)
            for (int half = 0; half < 2; half++)
                to[part][half] = load_weight(source[part][half] + i * COLUMNS,
                                             inside[half] && i < num_loads);
    };
#pragma unroll
    for (int i = 0; i < AHEAD; i++) load(weight[i], warp + i * WARPS);

    asm volatile("griddepcontrol.wait;" ::: "memory");

    __shared__ float factor[ROWS_TILE * TILES];
    if (args.squares != nullptr) {
        for (int row = warp; row < args.rows; row += WARPS) {
            float sum = 0;
            for (int i = lane; i < args.num_squares; i += 32)
                sum += args.squares[row * args.num_squares + i];
            for (int step = 16; step > 0; step /= 2) sum = add_across(sum, step);
            if (lane == 0) factor[row] = rsqrtf(sum / size + args.eps);
        }
    }
    float total[TILES][PARTS][4] = {};
    for (int first = warp; first < num_loads; first += AHEAD * WARPS) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const int at = first + i * WARPS;
            uint4 x[TILES];
            for (int tile = 0; tile < TILES; tile++) {
                const int row = tile * ROWS_TILE + group;
                x[tile] = load_row(args.x + static_cast<int64_t>(row) * size + at * COLUMNS + quad * 8,
                                   row < args.rows && at < num_loads);
            }
            uint4 now[PARTS][2];
            for (int part = 0; part < PARTS; part++)
                for (int half = 0; half < 2; half++) now[part][half] = weight[i][part][half];
            load(weight[i], at + AHEAD * WARPS);
            for (int tile = 0; tile < TILES; tile++)
                for (int part = 0; part < PARTS; part++) {
                    const uint4 a = now[part][0], b = now[part][1];
                    multiply_add(total[tile][part], a.x, b.x, a.y, b.y, x[tile].x, x[tile].y);
                    multiply_add(total[tile][part], a.z, b.z, a.w, b.w, x[tile].z, x[tile].w);
                }
        }
    }

    // The warps' shares, added up in the same order always. [tile][part][feature][row]
    constexpr int SUMS = TILES * PARTS * FEATURES * ROWS_TILE;
    __shared__ float shares[WARPS][SUMS];
    for (int tile = 0; tile < TILES; tile++)
        for (int part = 0; part < PARTS; part++)
            for (int i = 0; i < 4; i++) {
                const int f = group + 8 * (i / 2), row = quad * 2 + i % 2;
                shares[warp][((tile * PARTS + part) * FEATURES + f) * ROWS_TILE + row]
                    = total[tile][part][i];
            }
    __syncthreads();
    const int f = threadIdx.x % FEATURES;
    for (int row = threadIdx.x / FEATURES; row < ROWS_TILE * TILES; row += WARPS * 32 / FEATURES) {
        float result[PARTS];
        for (int part = 0; part < PARTS; part++) {
            const int place = (((row / ROWS_TILE) * PARTS + part) * FEATURES + f) * ROWS_TILE
                + row % ROWS_TILE;
            float sum = 0;
            for (int w = 0; w < WARPS; w++) sum += shares[w][place];
            if (args.squares != nullptr && row < args.rows) sum *= factor[row];
            const int at = blockIdx.x * FEATURES + f;
            if (args.bias != nullptr && at < args.features)
                sum += __bfloat162float(args.bias[part * args.features + at]);
            result[part] = sum;
        }
        const int at = blockIdx.x * FEATURES + f;
        const bool stored = row < args.rows && at < args.features;
        const int64_t place = static_cast<int64_t>(row) * args.features + at;
        float value = result[0];
        if constexpr (PARTS == 2) value = value / (1 + __expf(-value)) * result[1];
        if constexpr (ADD) {
            if (stored) value += __bfloat162float(args.out[place]);
        }
        const __nv_bfloat16 rounded = __float2bfloat16(value);
        if (stored) args.out[place] = rounded;
        if constexpr (ADD) {
            const float sum = __bfloat162float(rounded);
            float square = 0;
            if (stored) {
                args.scaled[place] = __float2bfloat16(sum * __bfloat162float(args.next_norm[at]));
                square = sum * sum;
            }
            for (int step = FEATURES / 2; step > 0; step /= 2) square = add_across(square, step);
            if (f == 0 && row < args.rows) args.next_squares[row * gridDim.x + blockIdx.x] = square;
        }
    }
}

template <int PARTS, int TILES, bool ADD>
int launch(const Args& args, cudaStream_t stream) {
    cudaLaunchConfig_t config = {};
    config.gridDim = (args.features + FEATURES - 1) / FEATURES;
    config.blockDim = WARPS * 32;
    config.stream = stream;
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &attribute;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, few_rows<PARTS, TILES, ADD>, args);
}

}  // namespace

// Returns a cudaError_t. size: a multiple of 32; pointers aligned to 16 bytes.
extern "C" int asyncllm_few_rows(const void* x, const void* squares, const void* weight,
                                 const void* bias, const void* next_norm, void* out, void* scaled,
                                 void* next_squares, int rows, int features, int size,
                                 int num_squares, int gated, float eps, void* stream) {
    const Args args = {
        static_cast<const __nv_bfloat16*>(x), static_cast<const float*>(squares),
        static_cast<const __nv_bfloat16*>(weight), static_cast<const __nv_bfloat16*>(bias),
        static_cast<const __nv_bfloat16*>(next_norm), static_cast<__nv_bfloat16*>(out),
        static_cast<__nv_bfloat16*>(scaled), static_cast<float*>(next_squares),
        rows, features, size, num_squares, eps};
    const auto s = static_cast<cudaStream_t>(stream);
    const bool one = rows <= ROWS_TILE;
    if (next_norm != nullptr) return one ? launch<1, 1, true>(args, s) : launch<1, 2, true>(args, s);
    if (gated) return one ? launch<2, 1, false>(args, s) : launch<2, 2, false>(args, s);
    return one ? launch<1, 1, false>(args, s) : launch<1, 2, false>(args, s);
}
