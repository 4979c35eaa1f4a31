// What the kernels share: vectors of eight floats (GCC and Clang's vector extension, so any instruction set), their exponential, and
// products with a right-hand side packed in panels of 16 columns.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

typedef float v8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t i8 __attribute__((vector_size(32), aligned(4), may_alias));

constexpr int LANES = 8;
constexpr int PANEL = 16;
constexpr int STRIP = 6;  // rows per micro-kernel: 6 x 16 sums fill 12 of AVX2's 16 registers

static inline v8 load(const float* p) { return *(const v8*)p; }
static inline void store(float* p, v8 x) { *(v8*)p = x; }
static inline v8 all(float x) { return v8{x, x, x, x, x, x, x, x}; }
// The larger and the smaller of two; where one is NaN the second.
#ifdef __AVX__
static inline v8 larger(v8 a, v8 b) { return __builtin_ia32_maxps256(a, b); }
static inline v8 smaller(v8 a, v8 b) { return __builtin_ia32_minps256(a, b); }
#else
static inline v8 choose(i8 condition, v8 yes, v8 no) { return (v8)(((i8)yes & condition) | ((i8)no & ~condition)); }
static inline v8 larger(v8 a, v8 b) { return choose(a > b, a, b); }
static inline v8 smaller(v8 a, v8 b) { return choose(a < b, a, b); }
#endif
static inline float sum(v8 x) { return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7])); }
static inline float largest(v8 x) {
    float result = x[0];
    for (int i = 1; i < LANES; ++i) result = x[i] > result ? x[i] : result;
    return result;
}

// e^x within 2 units in the last place: 2^n from the exponent bits, the rest from Cephes' polynomial. Below -87.3 it is 0, above 88 e^88.
static inline v8 exponential(v8 x) {
    const i8 underflows = x < all(-87.3f);
    x = larger(all(-87.3f), smaller(all(88.0f), x));
    const v8 shifted = x * all(1.44269504088896341f) + all(12582912.0f);  // adding 1.5 * 2^23 rounds to the nearest integer
    const v8 n = shifted - all(12582912.0f);
    v8 r = x - n * all(0.693359375f);
    r = r - n * all(-2.12194440e-4f);
    v8 y = all(1.9875691500e-4f);
    y = y * r + all(1.3981999507e-3f);
    y = y * r + all(8.3334519073e-3f);
    y = y * r + all(4.1665795894e-2f);
    y = y * r + all(1.6666665459e-1f);
    y = y * r + all(5.0000001201e-1f);
    y = y * (r * r) + r + all(1.0f);
    const i8 exponent = (i8)shifted << 23;  // of what was added for the rounding only zeros are left
    return (v8)(((i8)y + exponent) & ~underflows);
}

static inline v8 sigmoid(v8 x) { return all(1.0f) / (all(1.0f) + exponential(-x)); }

// out (ROWS x 16, rows `out_stride` apart) = or += left x panel; left[r, k] is at left[r * row_step + k * depth_step].
template <int ROWS, bool ADDS>
static inline void multiply_strip(
    int64_t depth, const float* left, int64_t row_step, int64_t depth_step, const float* panel, float* out, int64_t out_stride) {
    v8 low[ROWS], high[ROWS];
    for (int r = 0; r < ROWS; ++r) low[r] = high[r] = all(0.0f);
    for (int64_t k = 0; k < depth; ++k) {
        const v8 first = load(panel), second = load(panel + LANES);
        for (int r = 0; r < ROWS; ++r) {
            const v8 factor = all(left[r * row_step]);
            low[r] += factor * first;
            high[r] += factor * second;
        }
        left += depth_step;
        panel += PANEL;
    }
    for (int r = 0; r < ROWS; ++r) {
        float* row = out + r * out_stride;
        store(row, ADDS ? load(row) + low[r] : low[r]);
        store(row + LANES, ADDS ? load(row + LANES) + high[r] : high[r]);
    }
}

template <bool ADDS>
static inline void multiply_rows(
    int rows, int64_t depth, const float* left, int64_t row_step, int64_t depth_step, const float* panel, float* out, int64_t stride) {
    switch (rows) {
        case 6: return multiply_strip<6, ADDS>(depth, left, row_step, depth_step, panel, out, stride);
        case 5: return multiply_strip<5, ADDS>(depth, left, row_step, depth_step, panel, out, stride);
        case 4: return multiply_strip<4, ADDS>(depth, left, row_step, depth_step, panel, out, stride);
        case 3: return multiply_strip<3, ADDS>(depth, left, row_step, depth_step, panel, out, stride);
        case 2: return multiply_strip<2, ADDS>(depth, left, row_step, depth_step, panel, out, stride);
        default: return multiply_strip<1, ADDS>(depth, left, row_step, depth_step, panel, out, stride);
    }
}
