// Matrix products over packed weights.
//
// y [rows, n] = x [rows, k] @ w.T + bias. The weights w [n, k] are packed in panels of PANEL outputs: [n / PANEL][k][PANEL],
// so that the innermost loop reads them once, in order, and multiplies each vector of them with the rows of a tile of x.
// The tiles are copied, with rows STRIDE apart: at their own distance, they fall on the same lines of the cache where k is
// a multiple of 1024. Weights of 16 and 8 bits are widened whenever they are read: turning a piece of a panel into float32
// once, for all tiles, was slower by up to a quarter, because it is larger then.

#include <memory>

#include "kernels.h"
#include "threads.h"
#include "vectors.h"

namespace {

// Rows of x that a vector of weights is multiplied with: with two vectors they fill the registers but a few.
constexpr int TILE_ROWS = WIDTH == 16 ? 14 : WIDTH == 8 ? 6 : 4;
constexpr int PANEL = 2 * WIDTH;
constexpr int64_t DEPTH = 768;  // of the k: a piece of a tile, of a panel, and of the next panel stay in the second-level cache
constexpr int64_t CHUNK = 8;  // tiles: their pieces stay in the second-level cache for one panel after another
constexpr int64_t LINE = 64;  // bytes of a cache line
constexpr int64_t DISTANCE = 4096;  // bytes; the processor's own fetching ends with the page, and lost a quarter
constexpr int64_t STRIDE = DEPTH + 16;

// Where outputs are written, and what is done with them at the end of k.
struct Output {
    float* y;
    int64_t stride;
    int columns;  // up to PANEL
    const float *scale, *bias;  // of the columns, or null
    bool begins, ends;  // whether the piece of k is the first, the last one
};

// Weights that will be needed after these, fetched from memory while the processor computes: the first tile of a panel
// would wait for them, and the others leave the memory idle. The tiles of a panel share them evenly. They may lie past the
// end of all weights, which does no harm.
struct Ahead {
    const char* line;
    int64_t step;  // bytes for each vector of weights that is used: up to two lines, or less than one
};

// Scale and bias of a tile. One function for all numbers of rows: compilers join a product and a sum into one rounding in one
// place and not in another.
__attribute__((noinline)) void finish(const Output& out, int rows) {
    for (int half = 0; half < 2; half++) {
        const int count = std::min(WIDTH, out.columns - half * WIDTH), column = half * WIDTH;
        const Vec scale = out.scale ? load_up_to(out.scale + column, count) : splat(1.0f);
        const Vec bias = out.bias ? load_up_to(out.bias + column, count) : Vec{};
        for (int row = 0; row < rows; row++) {
            float* y = out.y + row * out.stride + column;
            store_up_to(y, load_up_to(y, count) * scale + bias, count);
        }
    }
}

template <int ROWS, typename W>
void multiply_tile(const float* x, const W* panel, int64_t depth, const Output& out, Ahead ahead) {
    Vec acc[ROWS][2];
    const auto count = [&](int half) { return std::min(WIDTH, out.columns - half * WIDTH); };
    const auto at = [&](int row, int half) { return out.y + row * out.stride + half * WIDTH; };
    for (int row = 0; row < ROWS; row++)
        for (int half = 0; half < 2; half++)
            acc[row][half] = out.begins ? Vec{} : load_up_to(at(row, half), count(half));
    for (int64_t i = 0; i < depth; i++, panel += PANEL, ahead.line += ahead.step) {
        __builtin_prefetch(ahead.line, 0, 2);
        if (ahead.step > LINE) __builtin_prefetch(ahead.line + LINE, 0, 2);
        const Vec w0 = load(panel), w1 = load(panel + WIDTH);
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; row++) {
            const Vec a = splat(x[row * STRIDE + i]);
            acc[row][0] += a * w0;
            acc[row][1] += a * w1;
        }
    }
    for (int row = 0; row < ROWS; row++)
        for (int half = 0; half < 2; half++) store_up_to(at(row, half), acc[row][half], count(half));
    if (out.ends && (out.scale || out.bias)) finish(out, ROWS);
}

template <int ROWS, typename W>
void multiply_tile_of(int rows, const float* x, const W* panel, int64_t depth, const Output& out, Ahead ahead) {
    if constexpr (ROWS > 0) {
        if (rows == ROWS) multiply_tile<ROWS>(x, panel, depth, out, ahead);
        else multiply_tile_of<ROWS - 1>(rows, x, panel, depth, out, ahead);
    }
}

template <typename W>
void multiply(const float* x, int64_t rows, int64_t k, const W* packed, const float* scale, const float* bias, float* y,
              int64_t n) {
    const int64_t num_panels = (n + PANEL - 1) / PANEL, num_tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    const auto first_row = [=](int64_t tile) { return rows * tile / num_tiles; };  // tiles of nearly equal height
    const int64_t num_pieces = std::max<int64_t>(1, (k + DEPTH - 1) / DEPTH);  // of k = 0 too: the bias remains
    const int64_t piece_depth = (k + num_pieces - 1) / num_pieces;  // of k in a piece; the last one may have less
    std::unique_ptr<float[]> copy(rows > 1 ? new float[num_pieces * rows * STRIDE] : nullptr);  // [pieces][rows][STRIDE]
    if (rows > 1)
        parallel_for(rows, std::max<int64_t>(1, 32768 / (k + 1)), [&](int64_t row) {
            for (int64_t piece = 0; piece < num_pieces; piece++)
                memcpy(&copy[(piece * rows + row) * STRIDE], x + row * k + piece * piece_depth,
                       std::min(piece_depth, k - piece * piece_depth) * 4);
        });
    const int64_t num_chunks = (num_tiles + CHUNK - 1) / CHUNK;
    // A chunk's pieces together are too large for the cache: with several chunks, all of them do a piece before the next one.
    const int64_t together = num_chunks == 1 ? num_pieces : 1;
    for (int64_t first = 0; first < num_pieces; first += together)
        parallel_for(num_chunks * num_panels, 1, [&](int64_t part) {
            const int64_t chunk = part / num_panels, panel = part % num_panels, column = panel * PANEL;
            const int64_t first_tile = num_tiles * chunk / num_chunks, last_tile = num_tiles * (chunk + 1) / num_chunks;
            for (int64_t piece = first; piece < first + together; piece++) {
                const int64_t start = piece * piece_depth, depth = std::min(piece_depth, k - start);
                const float* from = rows > 1 ? &copy[piece * rows * STRIDE] : x + start;
                const W* weights = packed + (panel * k + start) * PANEL;
                const bool is_last_here = piece == first + together - 1;
                const W* next = is_last_here ? packed + ((panel + 1) * k + first * piece_depth) * PANEL : weights + depth * PANEL;
                const bool has_next = !is_last_here || panel + 1 < num_panels;
                // A tile alone fetches what it will need itself; several share what comes after them.
                const auto ahead = [&](int64_t tile) -> Ahead {
                    constexpr int64_t ROW = PANEL * int64_t(sizeof(W));
                    if (num_tiles == 1) return {(const char*)weights + DISTANCE, ROW};
                    if (!has_next) return {(const char*)from, 0};
                    const int64_t tiles = last_tile - first_tile, step = (ROW + tiles - 1) / tiles;
                    return {(const char*)next + (tile - first_tile) * depth * step, step};
                };
                for (int64_t tile = first_tile; tile < last_tile; tile++) {
                    const int64_t row = first_row(tile);
                    const int height = int(first_row(tile + 1) - row);
                    const float* at = from + row * STRIDE;
                    const Output out{y + row * n + column, n, int(std::min<int64_t>(PANEL, n - column)),
                                     scale ? scale + column : nullptr, bias ? bias + column : nullptr,
                                     piece == 0, piece == num_pieces - 1};
                    multiply_tile_of<TILE_ROWS>(height, at, weights, depth, out, ahead(tile));
                }
            }
        });
}

template <typename W>
void pack(const W* weight, int64_t row_stride, int64_t column_stride, int64_t n, int64_t k, W* packed) {
    const int64_t num_panels = (n + PANEL - 1) / PANEL;
    parallel_for(num_panels, 1, [&](int64_t panel) {
        W* to = packed + panel * k * PANEL;
        memset((void*)to, 0, k * PANEL * sizeof(W));
        const int columns = int(std::min<int64_t>(PANEL, n - panel * PANEL));
        const W* from = weight + panel * PANEL * row_stride;
        for (int64_t i = 0; i < k; i++)
            for (int column = 0; column < columns; column++)
                to[i * PANEL + column] = from[column * row_stride + i * column_stride];
    });
}

template <typename W>
void rows_of(const W* packed, const float* scale, int64_t k, const int64_t* index, int64_t count, float* out) {
    for (int64_t i = 0; i < count; i++) {
        const W* from = packed + index[i] / PANEL * PANEL * k + index[i] % PANEL;
        const float s = scale ? scale[index[i]] : 1.0f;
        for (int64_t j = 0; j < k; j++) out[i * k + j] = widen(from[j * PANEL]) * s;
    }
}

}  // namespace

extern "C" {

int servd_panel() { return PANEL; }

void servd_pack(int type, const void* weight, int64_t row_stride, int64_t column_stride, int64_t n, int64_t k, void* packed) {
    with_type(type, [&](auto* p) {
        using W = std::remove_pointer_t<decltype(p)>;
        pack((const W*)weight, row_stride, column_stride, n, k, (W*)packed);
    });
}

void servd_multiply(int type, const float* x, int64_t rows, int64_t k, const void* packed, const float* scale,
                    const float* bias, float* y, int64_t n) {
    with_type(type, [&](auto* p) { multiply(x, rows, k, (decltype(p))packed, scale, bias, y, n); });
}

void servd_rows(int type, const void* packed, const float* scale, int64_t k, const int64_t* index, int64_t count, float* out) {
    with_type(type, [&](auto* p) { rows_of((decltype(p))packed, scale, k, index, count, out); });
}

}  // extern "C"
