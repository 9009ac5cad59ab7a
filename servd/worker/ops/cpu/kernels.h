// What a forward pass calls, and program.cpp calls again. Described where they are defined.

#pragma once

#include <cstdint>

extern "C" {

void servd_multiply(int type, const float* x, int64_t rows, int64_t k, const void* packed, const float* scale,
                    const float* bias, float* y, int64_t n);
void servd_rows(int type, const void* packed, const float* scale, int64_t k, const int64_t* index, int64_t count, float* out);
void servd_write(int type, const float* q, int64_t q_stride, const float* k, int64_t k_stride, const float* v,
                 int64_t v_stride, float* q_out, const float* cos, const float* sin, void* keys, void* values,
                 const int64_t* slots, int64_t num_tokens, int64_t num_heads, int64_t kv_heads, int64_t head_dim,
                 int64_t block_size);
void servd_attend(int type, const float* q, int64_t q_stride, const void* keys, const void* values,
                  const int32_t* block_tables, int64_t max_blocks, const int64_t* query_lens, const int64_t* seq_lens,
                  int64_t num_rows, int64_t num_heads, int64_t kv_heads, int64_t head_dim, int64_t block_size,
                  int64_t window, float scale, float* out);
void servd_norm(int centered, const float* x, int64_t per_stride, int64_t stride, const float* residual, const float* weight,
                const float* bias, float eps, float* out, float* sums, int64_t rows, int64_t size);
void servd_activate(const float* x, int64_t rows, int64_t size, int function, int gated, float* out);
void servd_take(const float* table, int64_t size, const int64_t* index, int64_t count, float* out);
void servd_rotation(const int64_t* positions, int64_t count, const float* inv_freq, int64_t size, float magnitude, float* cos,
                    float* sin);

}  // extern "C"
