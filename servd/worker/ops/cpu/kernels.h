// The kernels. graph.cpp lists them, and Python calls them by their names here.
//
// An address may be null where the definition says so. Strides and sizes count elements. `type` is
// a `Type` of vectors.h. A kernel checks indices before it reads or writes there.

#pragma once

#include <cstdint>

// A weight matrix [n, k] in panels, see `pack`. Groups of weights along k have a scale, and may have
// an offset: weight = value * scale + offset. Graphs pass the members one after the other.
struct PackedWeight {
    int type, terms;  // of the values, and of the x that it multiplies: see terms.h
    const void* packed;
    const float* table;  // [16], the values of 4-bit codes, or null
    int scale_type;
    const void *scale, *offset, *factors;  // packed; without groups, scale is float [n]; or null
    int64_t group_size;  // 0: without groups
    int64_t n, k;
};

// Matrices of one shape and type, one for each expert. A table [num_experts] has their addresses.
struct PackedExperts {
    int type, terms;
    int64_t num_experts;
    const void* const* packed;
    const float* table;
    int scale_type;
    const void *const *scales, *const *offsets, *const *factors;  // or null
    int64_t group_size, n, k;

    PackedWeight at(int64_t expert) const {
        const auto address = [=](const void* const* table) {
            return table ? table[expert] : nullptr;
        };
        return {type, terms, packed[expert], table, scale_type, address(scales), address(offsets),
                address(factors), group_size, n, k};
    }
};

// The states of a step's rows, in a layer's columns: StateRows of ../_state_rows.py.
struct StateRows {
    float* states;  // [num_slots, stride]
    int64_t num_slots, stride;
    const int64_t *slots, *query_lens, *seq_lens;  // [num_rows]
    int64_t num_rows;
    float* checkpoints;  // [num_checkpoints, checkpoint_stride], or null
    int64_t num_checkpoints, checkpoint_stride;
    const int64_t* saves;  // [num_saves, 2]: an end and a checkpoint
    int64_t num_saves;
};

namespace kernels {

void set_threads(int number);

// The inputs of a decode step: steps.cpp
void begin_decode(int64_t* step, int64_t num_tokens, int32_t* seq_lens, const int32_t* token_ids,
                  int64_t num_slots, int64_t num_columns, int64_t* num_computed, int32_t* tables,
                  int64_t num_rows, int64_t num_blocks, int64_t block_size);

// Matrices: matrix.cpp
void pack(int type, int terms, const void* weight, int64_t row_stride, int64_t column_stride,
          int64_t n, int64_t k, void* packed);
void matmul(const float* x, int64_t rows, PackedWeight weight, const float* bias, float* y,
            int64_t y_stride);
void matmul_experts(const float* x, int64_t x_rows, const int32_t* index, const int32_t* starts,
                    PackedExperts experts, float* y, int64_t rows);
void attend_all(int type, const float* q, const float* k, const float* v, int64_t sequences,
                int64_t n, int64_t num_heads, int64_t head_dim, float scale, float* out);
void gather_rows(PackedWeight weight, const int64_t* index, int64_t count, float* out);

// Rounding weights to fewer bits: rounding.cpp
void round_rows(const float* x, int64_t rows, int64_t size, void* codes, float* scale);
void round_groups(const float* x, int64_t rows, int64_t size, const float* importance, void* codes,
                  void* scale, void* offset);

// Unpacking weights of GGUF files: blocks.cpp
void unpack_blocks(int type, const void* blocks, int64_t rows, int64_t num_blocks, int64_t bytes,
                   int64_t size, int64_t groups, int code_type, void* codes, int scale_type,
                   void* scale, void* offset, void* factors);

// Adapters: low_rank.cpp
void add_low_rank(int type, const float* x, int64_t rows, int64_t k, const void* a, int64_t width,
                  const void* b, int64_t max_rank, const int64_t* ranks, const int64_t* part_ends,
                  int64_t num_adapter_slots, int64_t parts, const int64_t* adapter_slots, float* y, int64_t n);

// Attention: attention.cpp
void write_kv(int type, const float* q, int64_t q_stride, const float* k, int64_t k_stride,
              const float* v, int64_t v_stride, float* q_out, const float* cos, const float* sin,
              int64_t pairs, void* keys, void* values, int64_t num_blocks,
              const int64_t* slot_mapping, int64_t num_tokens, int64_t num_heads, int64_t kv_heads, int64_t head_dim,
              int64_t block_size);
void attend(int type, const float* q, int64_t q_stride, int64_t num_tokens, const void* keys,
            const void* values, int64_t num_blocks, const int32_t* block_tables,
            int64_t max_blocks, const int64_t* query_lens, const int64_t* seq_lens,
            int64_t num_rows, int64_t num_heads, int64_t kv_heads, int64_t head_dim,
            int64_t value_dim, int64_t block_size, int64_t window, int causal,
            const int64_t* tails, int64_t tail_size, float scale, float soft_cap,
            const float* sinks, const int64_t* bidirectional, float* out);

// Other layers: layers.cpp
void embed(const float* table, int64_t num_rows, int64_t size, const int64_t* index, int64_t count,
           float* out);
void rotation(const int64_t* positions, int64_t count, const float* inv_freq, int64_t size,
              float magnitude, float* cos, float* sin);
void norm(int centered, const float* x, int64_t per_stride, int64_t stride, int64_t row_stride,
          const float* residual, const float* weight, const float* bias, float eps, float* out, float* sums, int64_t rows,
          int64_t size);
void scale(const float* x, float factor, const float* residual, int64_t count, float* out);
void spread(const float* x, int64_t rows, int64_t size, int is_inverse, float* out);
void activate(const float* x, int64_t rows, int64_t size, int function, int gated, float* out);

// Routing tokens to experts, and adding the results: experts.cpp
void route(const float* logits, const float* bias, int64_t rows, int64_t num_experts, int64_t top_k,
           int renormalize, int32_t* tokens, int32_t* starts, int32_t* places, float* weights);
void combine(const float* y, int64_t num_pairs, const int32_t* places, const float* weights,
             int64_t rows, int64_t top_k, int64_t size, float* out);

// Recurrent states: states.cpp
void convolve(const float* x, int64_t x_stride, int64_t num_tokens, int64_t channels,
              const float* weight, int64_t size, const float* bias, int silu, const float* before,
              int64_t before_stride, const float* after, int64_t after_stride, StateRows rows,
              float* out);
void linear_scan(const float* q, int64_t q_stride, const float* k, int64_t k_stride, const float* v,
                 int64_t v_stride, const float* a, int64_t a_stride, const float* dt_bias,
                 const float* A, const float* b, int64_t b_stride, const float* D, float min_dt,
                 float max_dt, int64_t num_tokens, int64_t heads, int64_t groups, int64_t key_dim,
                 int64_t value_dim, StateRows rows, float* out);
void gated_norm(const float* x, int64_t x_per_stride, int64_t x_stride, int64_t x_row_stride,
                const float* gate, int64_t per_stride, int64_t stride, int64_t row_stride,
                const float* weight, int64_t weight_rows, float eps, int gates_first, int64_t rows,
                int64_t size, float* out);
void multiply_sigmoid(const float* x, const float* gate, int64_t per_stride, int64_t stride,
                      int64_t row_stride, int64_t gate_size, int64_t rows, int64_t size, float* out);

// The sampler: sampling.cpp
void edit_logits(float* logits, int64_t stride, const int32_t* bitmask, int64_t bitmask_rows, int64_t words,
           const int64_t* slots, int64_t num_slots, const int32_t* counts, const float* factors,
           int64_t rows, int64_t vocab, int64_t* best);
void choose(const float* logits, int64_t stride, int64_t rows, int64_t vocab, const int64_t* slots,
            const int64_t* columns, int32_t* token_ids, int64_t num_slots, int64_t num_columns,
            int64_t* chosen);
void to_weights(const float* logits, int64_t stride, const float* peaks, const float* temperatures,
                int64_t rows, int64_t vocab, float* weights);
void filter_top_k_top_p(const float* weights, const float* lowest, const int64_t* top_k, const double* top_p,
            int64_t rows, int64_t vocab, float* limits);
void draw(const float* weights, const float* lowest, const int64_t* seeds,
          const int64_t* positions, int64_t rows, int64_t vocab, int64_t* token_ids);
void score(const float* logits, int64_t stride, const int64_t* token_ids, int64_t rows,
           int64_t vocab, float* log_totals, int64_t* ranks);

}  // namespace kernels
