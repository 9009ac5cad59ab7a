// Layers with a recurrent state: the short convolution, the gated delta rule and Mamba-2, and their gates.
//
// The tokens of a row are computed one by one, by the same code in prompts and in decode steps. Results
// therefore do not depend on the chunks of a prompt, and a checkpoint inside a row only costs a copy.

#include <vector>

#include "checks.h"
#include "kernels.h"
#include "threads.h"
#include "vectors.h"

namespace {

// The tokens [begin, end) of a row, and its first entry of `saves`.
struct Span {
    int64_t begin, end, save;
};

// Returns the tokens of all rows, and checks every index of `rows`.
std::vector<Span> spans_of(const StateRows& rows, int64_t num_tokens) {
    check_ids("slots", rows.slots, 0, rows.num_rows, rows.num_slots);
    for (int64_t i = 0, last = 0; i < rows.num_saves; i++) {
        const int64_t* const save = rows.saves + 2 * i;
        check_ids("ends of saves", save, 0, 1, num_tokens, last + 1);  // ascending
        check_ids("checkpoints of saves", save, 1, 2, rows.num_checkpoints);
        last = save[0];
    }
    std::vector<Span> spans(rows.num_rows);
    int64_t end = 0, save = 0;
    for (int64_t row = 0; row < rows.num_rows; row++) {
        check_ids("query_lens", rows.query_lens, row, row + 1, num_tokens - end + 1);
        const int64_t begin = end;
        end += rows.query_lens[row];
        while (save < rows.num_saves && rows.saves[2 * save] <= begin) save++;
        spans[row] = {begin, end, save};
    }
    check_at_most("the number of tokens", num_tokens, end);
    return spans;
}

// A part of a row's state: loads it, passes the row's tokens to `compute` in order, and stores it. `load`
// gets a null pointer for zeros. `first`: the part's first number in the state.
template <typename Load, typename Compute, typename Store>
void run_row(const StateRows& rows, const Span& span, int64_t row, int64_t first, const Load& load,
             const Compute& compute, const Store& store) {
    if (span.begin == span.end) return;
    float* const state = rows.states + rows.slots[row] * rows.stride + first;
    load(rows.seq_lens[row] == span.end - span.begin ? nullptr : state);
    int64_t begin = span.begin;
    for (int64_t i = span.save; i < rows.num_saves && rows.saves[2 * i] < span.end; i++) {
        compute(begin, rows.saves[2 * i]);
        begin = rows.saves[2 * i];
        store(rows.checkpoints + rows.saves[2 * i + 1] * rows.checkpoint_stride + first);
    }
    compute(begin, span.end);
    store(state);
}

// How many neighbouring parts of rows a thread takes at once, if a part takes `work` of the time of a
// small task for each token.
int64_t parts_at_once(int64_t num_rows, int64_t num_tokens, int64_t work) {
    return 1 + work * num_rows / (num_tokens + 1);
}

constexpr int CHANNELS = 4;  // vectors of channels of a convolution that stay in registers

struct Convolution {
    const float* x;
    int64_t x_stride, channels;
    const float *weight, *bias;  // [size, channels], [channels] or null
    int silu;
    const float* before;
    int64_t before_stride;
    const float* after;
    int64_t after_stride;
    float* out;

    template <int SIZE>
    void run(const StateRows& rows, const Span& span, int64_t row, int64_t first) const {
        Vec last[SIZE][CHANNELS], factors[SIZE][CHANNELS];  // of `last`, one is the token itself
        int left[CHANNELS];  // channels of each vector
        for (int c = 0; c < CHANNELS; c++)
            left[c] = int(std::clamp<int64_t>(channels - first - c * WIDTH, 0, WIDTH));
        const auto load_row = [&](const float* from, int c) {
            return load_up_to(from + first + c * WIDTH, left[c]);
        };
        for (int i = 0; i < SIZE; i++)
            for (int c = 0; c < CHANNELS; c++) factors[i][c] = load_row(weight + i * channels, c);
        const auto load_state = [&](const float* state) {
            for (int i = 0; i < SIZE - 1; i++)
                for (int c = 0; c < CHANNELS; c++)
                    last[i][c] = state ? load_up_to(state + i * channels + c * WIDTH, left[c]) : Vec{};
        };
        const auto compute = [&](int64_t begin, int64_t end) {
            for (int64_t t = begin; t < end; t++)
                for (int c = 0; c < CHANNELS; c++) {
                    Vec in = load_row(x + t * x_stride, c);
                    if (before) in *= load_row(before + t * before_stride, c);
                    last[SIZE - 1][c] = in;
                    Vec y = bias ? load_row(bias, c) : Vec{};
                    for (int i = 0; i < SIZE; i++) y += factors[i][c] * last[i][c];
                    for (int i = 0; i < SIZE - 1; i++) last[i][c] = last[i + 1][c];
                    if (silu) y *= sigmoid(y);
                    if (after) y *= load_row(after + t * after_stride, c);
                    store_up_to(out + t * channels + first + c * WIDTH, y, left[c]);
                }
        };
        run_row(rows, span, row, first, load_state, compute, [&](float* state) {
            for (int i = 0; i < SIZE - 1; i++)
                for (int c = 0; c < CHANNELS; c++)
                    store_up_to(state + i * channels + c * WIDTH, last[i][c], left[c]);
        });
    }
};

constexpr int VECTORS = WIDTH == 16 ? 2 : 4;  // of the columns of a matrix
constexpr int64_t PANEL = VECTORS * WIDTH;
constexpr int64_t MAX_KEY_DIM = 256;  // of a panel on the stack, which should fit in the L1 cache

inline float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

struct Scan {
    const float* q;
    int64_t q_stride;
    const float* k;
    int64_t k_stride;
    const float* v;
    int64_t v_stride, heads, groups, key_dim, value_dim;
    const float *decays, *rates;  // [num_tokens, heads]
    const float* skip;  // D: [heads] or null
    float* out;

    // Updates columns [column, column + PANEL) of a head's matrix by the tokens of a row.
    template <bool CORRECTS>
    void run(const StateRows& rows, const Span& span, int64_t row, int64_t head,
             int64_t column) const {
        alignas(64) Vec matrix[MAX_KEY_DIM][VECTORS];
        int left[VECTORS];  // columns of each vector
        for (int c = 0; c < VECTORS; c++)
            left[c] = int(std::clamp<int64_t>(value_dim - column - c * WIDTH, 0, WIDTH));
        const auto load_state = [&](const float* state) {
            for (int64_t i = 0; i < key_dim; i++)
                for (int c = 0; c < VECTORS; c++)
                    matrix[i][c] =
                        state ? load_up_to(state + i * value_dim + c * WIDTH, left[c]) : Vec{};
        };
        const int64_t group = head / (heads / groups);
        const auto compute = [&](int64_t begin, int64_t end) {
            for (int64_t t = begin; t < end; t++) {
                const float* const keys = k + t * k_stride + group * key_dim;
                const float* const queries = q + t * q_stride + group * key_dim;
                const float* const values = v + t * v_stride + head * value_dim + column;
                const float decay = decays[t * heads + head], rate = rates[t * heads + head];
                Vec value[VECTORS], change[VECTORS], result[VECTORS] = {};
                for (int c = 0; c < VECTORS; c++)
                    value[c] = load_up_to(values + c * WIDTH, left[c]);
                if (CORRECTS) {
                    Vec even[VECTORS] = {}, odd[VECTORS] = {};  // shorter chains of sums
                    int64_t i = 0;
                    for (; i + 1 < key_dim; i += 2)
                        for (int c = 0; c < VECTORS; c++) {
                            even[c] += keys[i] * matrix[i][c];
                            odd[c] += keys[i + 1] * matrix[i + 1][c];
                        }
                    for (int c = 0; c < VECTORS; c++) {
                        if (i < key_dim) even[c] += keys[i] * matrix[i][c];
                        change[c] = rate * (value[c] - decay * (even[c] + odd[c]));
                    }
                } else {
                    for (int c = 0; c < VECTORS; c++) change[c] = rate * value[c];
                }
                for (int64_t i = 0; i < key_dim; i++)
                    for (int c = 0; c < VECTORS; c++) {
                        matrix[i][c] = decay * matrix[i][c] + keys[i] * change[c];
                        result[c] += queries[i] * matrix[i][c];
                    }
                float* const to = out + (t * heads + head) * value_dim + column;
                for (int c = 0; c < VECTORS; c++) {
                    if (skip) result[c] += skip[head] * value[c];
                    store_up_to(to + c * WIDTH, result[c], left[c]);
                }
            }
        };
        const int64_t first = head * key_dim * value_dim + column;
        run_row(rows, span, row, first, load_state, compute, [&](float* state) {
            for (int64_t i = 0; i < key_dim; i++)
                for (int c = 0; c < VECTORS; c++)
                    store_up_to(state + i * value_dim + c * WIDTH, matrix[i][c], left[c]);
        });
    }
};

}  // namespace

namespace kernels {

// Convolves the channels of x [num_tokens, channels] over the tokens of each row, with bias and SiLU if any.
// States are the last inputs [size - 1, channels], times `before`; `after` are factors of the outputs.
void convolve(const float* x, int64_t x_stride, int64_t num_tokens, int64_t channels,
              const float* weight, int64_t size, const float* bias, int silu, const float* before,
              int64_t before_stride, const float* after, int64_t after_stride, StateRows rows,
              float* out) {
    using Run = void (Convolution::*)(const StateRows&, const Span&, int64_t, int64_t) const;
    constexpr Run RUNS[] = {&Convolution::run<2>, &Convolution::run<3>, &Convolution::run<4>,
                            &Convolution::run<5>, &Convolution::run<6>, &Convolution::run<7>,
                            &Convolution::run<8>};
    check_ids("size", &size, 0, 1, 9, 2);
    const std::vector<Span> spans = spans_of(rows, num_tokens);
    const Convolution layer{x,      x_stride, channels,      weight, bias,
                            silu,   before,   before_stride, after,  after_stride,
                            out};
    const int64_t parts = (channels + CHANNELS * WIDTH - 1) / (CHANNELS * WIDTH);
    parallel_for(rows.num_rows * parts, parts_at_once(rows.num_rows, num_tokens, 64), [&](int64_t i) {
        (layer.*RUNS[size - 2])(rows, spans[i / parts], i / parts, i % parts * CHANNELS * WIDTH);
    });
}

// Updates the matrix [key_dim, value_dim] of each head by the tokens of its row, and multiplies it with q.
// With b: the gated delta rule; without b: Mamba-2. See `Ops.linear_scan`. q and k [num_tokens, groups,
// key_dim]; v and out [num_tokens, heads, value_dim]; a and b [num_tokens, heads].
void linear_scan(const float* q, int64_t q_stride, const float* k, int64_t k_stride, const float* v,
                 int64_t v_stride, const float* a, int64_t a_stride, const float* dt_bias,
                 const float* A, const float* b, int64_t b_stride, const float* D, float min_dt,
                 float max_dt, int64_t num_tokens, int64_t heads, int64_t groups, int64_t key_dim,
                 int64_t value_dim, StateRows rows, float* out) {
    check_at_most("key_dim", key_dim, MAX_KEY_DIM);
    check_ids("groups", &groups, 0, 1, heads + 1, 1);
    check_at_most("heads without a group", heads % groups, 0);
    const std::vector<Span> spans = spans_of(rows, num_tokens);
    std::vector<float> decays(num_tokens * heads), rates(num_tokens * heads);
    parallel_for(num_tokens * heads, 256, [&](int64_t i) {
        const int64_t token = i / heads, head = i % heads;
        const float dt = std::clamp(softplus(a[token * a_stride + head] + dt_bias[head]), min_dt, max_dt);
        decays[i] = expf(-A[head] * dt);
        rates[i] = b ? 1.0f / (1.0f + expf(-b[token * b_stride + head])) : dt;
    });
    const Scan layer{q,       q_stride, k,         k_stride,      v,            v_stride, heads,
                     groups,  key_dim,  value_dim, decays.data(), rates.data(), D,        out};
    const int64_t panels = (value_dim + PANEL - 1) / PANEL, parts = heads * panels;
    const auto run = b ? &Scan::run<true> : &Scan::run<false>;
    parallel_for(rows.num_rows * parts, parts_at_once(rows.num_rows, num_tokens, 4), [&](int64_t i) {
        const int64_t row = i / parts, part = i % parts;
        (layer.*run)(rows, spans[row], row, part / panels, part % panels * PANEL);
    });
}

// Computes the RMS norm of x [rows, size], times SiLU of the gate; or the norm of that product, if
// `gates_first`. Row r has row r % weight_rows of the weight [weight_rows, size]. For strides see `norm`.
void gated_norm(const float* x, int64_t x_per_stride, int64_t x_stride, int64_t x_row_stride,
                const float* gate, int64_t per_stride, int64_t stride, int64_t row_stride,
                const float* weight, int64_t weight_rows, float eps, int gates_first, int64_t rows,
                int64_t size, float* out) {
    parallel_for(rows, 1 + 8192 / size, [&](int64_t row) {
        const float* const from = x + row / x_per_stride * x_stride + row % x_per_stride * x_row_stride;
        const float* const gates = gate + row / per_stride * stride + row % per_stride * row_stride;
        const float* const weights = weight + row % weight_rows * size;
        float* const to = out + row * size;
        const auto factor = [&](int64_t i, int left) {
            const Vec y = load_up_to(gates + i, left);
            return y * sigmoid(y);
        };
        Vec squares{};
        for (int64_t i = 0; i < size; i += WIDTH) {
            const int left = int(std::min<int64_t>(WIDTH, size - i));
            Vec y = load_up_to(from + i, left);
            if (gates_first) y *= factor(i, left);
            store_up_to(to + i, y, left);
            squares += y * y;
        }
        const float scale = 1.0f / sqrtf(sum(squares) / float(size) + eps);
        for (int64_t i = 0; i < size; i += WIDTH) {
            const int left = int(std::min<int64_t>(WIDTH, size - i));
            Vec y = load_up_to(to + i, left) * scale * load_up_to(weights + i, left);
            if (!gates_first) y *= factor(i, left);
            store_up_to(to + i, y, left);
        }
    });
}

// Multiplies x [rows, size] with sigmoids of the gate [rows, gate_size]; gate_size is `size`, or 1 for all
// numbers of a row. For strides see `norm`.
void multiply_sigmoid(const float* x, const float* gate, int64_t per_stride, int64_t stride,
                      int64_t row_stride, int64_t gate_size, int64_t rows, int64_t size, float* out) {
    parallel_for(rows, 1 + 8192 / size, [&](int64_t row) {
        const float* const gates = gate + row / per_stride * stride + row % per_stride * row_stride;
        for (int64_t i = 0; i < size; i += WIDTH) {
            const int left = int(std::min<int64_t>(WIDTH, size - i));
            const Vec y = gate_size == 1 ? splat(*gates) : load_up_to(gates + i, left);
            store_up_to(out + row * size + i, load_up_to(x + row * size + i, left) * sigmoid(y), left);
        }
    });
}

}  // namespace kernels
