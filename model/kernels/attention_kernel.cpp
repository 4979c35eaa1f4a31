// Causal attention inside documents, forward and backward, float32, grouped heads, holding the scores of a few rows at a time.
//
// Row t sees the positions starts[t] .. t. Query-like tensors are (B, T, N, H), key-like (B, T, G, H), contiguous; H is a multiple of 16.
// A block of keys is packed once for all its query heads. Strips of six query rows leave out the keys that none of them sees, so the
// upper triangle and other documents cost nothing. One thread does one key-value head of one sequence: sums are not shared between
// threads, so results do not depend on their number.
#include <cstdlib>
#include <limits>

#include "native_code.h"

namespace {

constexpr int QUERY_ROWS = 96;  // rows whose probabilities the backward pass keeps: with MOST_KEYS they fit the second-level cache
constexpr int MOST_KEYS = 288;
constexpr float MINUS_INFINITY = -std::numeric_limits<float>::infinity();

struct Shape {
    int64_t batch, positions, query_heads, kv_heads, width;
    int64_t query_stride() const { return query_heads * width; }
    int64_t kv_stride() const { return kv_heads * width; }
    int64_t heads_per_group() const { return query_heads / kv_heads; }
    int64_t keys_per_block() const { return width <= 64 ? MOST_KEYS : MOST_KEYS / 2; }
};

struct Buffer {
    float* data;
    explicit Buffer(int64_t size) : data((float*)std::aligned_alloc(64, (size * sizeof(float) + 63) / 64 * 64)) {}
    ~Buffer() { std::free(data); }
    Buffer(const Buffer&) = delete;
    operator float*() const { return data; }
};

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
int64_t lower(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t higher(int64_t a, int64_t b) { return a > b ? a : b; }

// Right-hand side whose depth is the rows: out[h / 16][row][h % 16].
void pack_columns(const float* source, int64_t stride, int64_t rows, int64_t rows_padded, int64_t width, float* out) {
    for (int64_t first = 0; first < width; first += PANEL) {
        float* panel = out + first * rows_padded;
        for (int64_t row = 0; row < rows; ++row) {
            store(panel + row * PANEL, load(source + row * stride + first));
            store(panel + row * PANEL + LANES, load(source + row * stride + first + LANES));
        }
        std::memset(panel + rows * PANEL, 0, (rows_padded - rows) * PANEL * sizeof(float));
    }
}

// Right-hand side whose depth is the width: out[row / 16][h][row % 16]; rows beyond the last are 0.
void pack_rows(const float* source, int64_t stride, int64_t rows, int64_t rows_padded, int64_t width, float* out) {
    for (int64_t row = 0; row < rows_padded; ++row) {
        float* to = out + row / PANEL * PANEL * width + row % PANEL;
        for (int64_t h = 0; h < width; ++h) to[h * PANEL] = row < rows ? source[row * stride + h] : 0.0f;
    }
}

// A block of keys as the query rows of one sequence see it. `starts` never fall along a sequence.
struct Block {
    int64_t first_key, keys, keys_padded;
    const int32_t* starts;

    Block(const Shape& shape, int64_t first, const int32_t* starts) : first_key(first), starts(starts) {
        keys = lower(shape.keys_per_block(), shape.positions - first);
        keys_padded = round_up(keys, PANEL);
    }
    bool ends_before(int64_t row) const { return starts[row] >= first_key + keys; }
    // Columns [low, high) that a row sees, empty where high <= low.
    int64_t low(int64_t row) const { return higher(starts[row] - first_key, 0); }
    int64_t high(int64_t row) const { return lower(row + 1 - first_key, keys); }
    // Columns that one of the rows first .. last sees, as whole panels.
    int64_t panel_low(int64_t first) const { return low(first) / PANEL * PANEL; }
    int64_t panel_high(int64_t last) const { return round_up(high(last), PANEL); }
};

// Rows of scores = query x key^T over columns [low, high), -infinity where a row does not see the column.
void score_rows(
    const Block& block, const Shape& shape, const float* query, int64_t row, int rows, const float* key_rows, float* scores, int64_t low,
    int64_t high) {
    for (int64_t column = low; column < high; column += PANEL)
        multiply_rows<false>(
            rows, shape.width, query, shape.query_stride(), 1, key_rows + column * shape.width, scores + column, block.keys_padded);
    for (int r = 0; r < rows; ++r) {
        float* line = scores + r * block.keys_padded;
        for (int64_t c = low; c < lower(block.low(row + r), high); ++c) line[c] = MINUS_INFINITY;
        for (int64_t c = higher(block.high(row + r), low); c < high; ++c) line[c] = MINUS_INFINITY;
    }
}

struct Packed {
    Buffer key_rows, key_columns, value_rows, value_columns;
    explicit Packed(const Shape& s, int64_t size) : key_rows(size), key_columns(size), value_rows(size), value_columns(size) {}
};

// One head against one block: running maximum, sum and unnormalised output of every row are brought up to date.
void forward_block(
    const Shape& shape, const Block& block, const Packed& packed, const float* query, float* out, float* highest, float* total,
    float* scores, float scale) {
    const int64_t stride = shape.query_stride();
    for (int64_t row = block.first_key; row < shape.positions && !block.ends_before(row); row += STRIP) {
        const int rows = lower(STRIP, shape.positions - row);
        const int64_t low = block.panel_low(row), high = block.panel_high(row + rows - 1);
        score_rows(block, shape, query + row * stride, row, rows, packed.key_rows, scores, low, high);
        for (int r = 0; r < rows; ++r) {
            float* line = scores + r * block.keys_padded;
            v8 most = all(MINUS_INFINITY), also = most;
            for (int64_t c = low; c < high; c += PANEL) {
                most = larger(load(line + c), most);
                also = larger(load(line + c + LANES), also);
            }
            const float before = highest[row + r], now = std::fmax(before, largest(larger(most, also)) * scale);
            if (now == MINUS_INFINITY) {
                std::memset(line + low, 0, (high - low) * sizeof(float));
                continue;
            }
            v8 sums = all(0.0f);
            for (int64_t c = low; c < high; c += LANES) {
                const v8 p = exponential(load(line + c) * all(scale) - all(now));
                store(line + c, p);
                sums += p;
            }
            const float kept = before == MINUS_INFINITY ? 0.0f : std::exp(before - now);
            total[row + r] = total[row + r] * kept + sum(sums);
            highest[row + r] = now;
            if (kept != 1.0f)
                for (int64_t h = 0; h < shape.width; h += LANES) {
                    float* to = out + (row + r) * stride + h;
                    store(to, load(to) * all(kept));
                }
        }
        for (int64_t h = 0; h < shape.width; h += PANEL)
            multiply_rows<true>(
                rows, high - low, scores + low, block.keys_padded, 1, packed.value_columns + h * block.keys_padded + low * PANEL,
                out + row * stride + h, stride);
    }
}

void forward_group(
    const Shape& shape, const float* query, const float* key, const float* value, const int32_t* starts, float* out, float* log_sums,
    float scale) {
    const int64_t positions = shape.positions, stride = shape.query_stride(), heads = shape.heads_per_group();
    const Packed packed(shape, round_up(shape.keys_per_block(), PANEL) * shape.width);
    const Buffer scores(STRIP * round_up(shape.keys_per_block(), PANEL)), total(heads * positions);
    std::memset(total, 0, heads * positions * sizeof(float));
    for (int64_t i = 0; i < heads * positions; ++i) log_sums[i] = MINUS_INFINITY;
    for (int64_t t = 0; t < positions; ++t) std::memset(out + t * stride, 0, heads * shape.width * sizeof(float));
    for (int64_t first = 0; first < positions; first += shape.keys_per_block()) {
        const Block block(shape, first, starts);
        const int64_t offset = first * shape.kv_stride();
        pack_rows(key + offset, shape.kv_stride(), block.keys, block.keys_padded, shape.width, packed.key_rows);
        pack_columns(value + offset, shape.kv_stride(), block.keys, block.keys_padded, shape.width, packed.value_columns);
        for (int64_t head = 0; head < heads; ++head)
            forward_block(
                shape, block, packed, query + head * shape.width, out + head * shape.width, log_sums + head * positions,
                total + head * positions, scores, scale);
    }
    for (int64_t head = 0; head < heads; ++head)
        for (int64_t t = 0; t < positions; ++t) {
            const float sums = total[head * positions + t];
            float* row = out + t * stride + head * shape.width;
            for (int64_t h = 0; h < shape.width; h += LANES) store(row + h, load(row + h) * all(1.0f / sums));
            log_sums[head * positions + t] += std::log(sums);
        }
}

struct Gradients {
    Buffer probabilities, scores, query_columns, out_columns, key, value;
    Gradients(const Shape& s, int64_t keys)
        : probabilities(QUERY_ROWS * keys), scores(QUERY_ROWS * keys), query_columns(QUERY_ROWS * s.width), out_columns(QUERY_ROWS * s.width),
          key(keys * s.width), value(keys * s.width) {}
};

// Probabilities and gradients of the scores of a strip, and its gradient of the query.
void backward_strip(
    const Shape& shape, const Block& block, const Packed& packed, const float* query, const float* grad_out, const float* log_sums,
    const float* inner, int64_t row, int rows, float* probabilities, float* scores, float* grad_query, float scale) {
    const int64_t stride = shape.query_stride(), padded = block.keys_padded;
    const int64_t low = block.panel_low(row), high = higher(block.panel_high(row + rows - 1), low);
    score_rows(block, shape, query + row * stride, row, rows, packed.key_rows, probabilities, low, high);
    for (int64_t column = low; column < high; column += PANEL)
        multiply_rows<false>(
            rows, shape.width, grad_out + row * stride, stride, 1, packed.value_rows + column * shape.width, scores + column, padded);
    for (int r = 0; r < rows; ++r) {
        float *p = probabilities + r * padded, *s = scores + r * padded;
        const v8 log_sum = all(log_sums[row + r]), mean = all(inner[row + r]);
        for (int64_t c = low; c < high; c += LANES) {
            const v8 probability = exponential(load(p + c) * all(scale) - log_sum);
            store(p + c, probability);
            store(s + c, probability * (load(s + c) - mean) * all(scale));
        }
        std::memset(p, 0, low * sizeof(float));
        std::memset(s, 0, low * sizeof(float));
        std::memset(p + high, 0, (padded - high) * sizeof(float));
        std::memset(s + high, 0, (padded - high) * sizeof(float));
    }
    for (int64_t h = 0; h < shape.width; h += PANEL)
        multiply_rows<true>(
            rows, high - low, scores + low, padded, 1, packed.key_columns + h * padded + low * PANEL, grad_query + row * stride + h, stride);
}

// One head against one block; the gradients of its keys and values add up in `gradients`.
void backward_block(
    const Shape& shape, const Block& block, const Packed& packed, const float* query, const float* grad_out, const float* log_sums,
    const float* inner, float* grad_query, const Gradients& gradients, float scale) {
    const int64_t stride = shape.query_stride(), padded = block.keys_padded;
    for (int64_t first = block.first_key; first < shape.positions && !block.ends_before(first); first += QUERY_ROWS) {
        const int64_t rows = lower(QUERY_ROWS, shape.positions - first);
        int64_t done = 0;
        for (; done < rows && !block.ends_before(first + done); done += STRIP)
            backward_strip(
                shape, block, packed, query, grad_out, log_sums, inner, first + done, lower(STRIP, rows - done),
                gradients.probabilities + done * padded, gradients.scores + done * padded, grad_query, scale);
        done = lower(done, rows);
        pack_columns(query + first * stride, stride, done, done, shape.width, gradients.query_columns);
        pack_columns(grad_out + first * stride, stride, done, done, shape.width, gradients.out_columns);
        for (int64_t k = 0; k < block.keys; k += STRIP) {
            const int keys = lower(STRIP, block.keys - k);
            const int64_t skipped = higher(block.first_key + k - first, 0);  // earlier rows do not see these keys
            if (skipped >= done) break;
            for (int64_t h = 0; h < shape.width; h += PANEL) {
                const int64_t panel = h * done + skipped * PANEL, left = skipped * padded + k, to = k * shape.width + h;
                multiply_rows<true>(
                    keys, done - skipped, gradients.probabilities + left, 1, padded, gradients.out_columns + panel, gradients.value + to,
                    shape.width);
                multiply_rows<true>(
                    keys, done - skipped, gradients.scores + left, 1, padded, gradients.query_columns + panel, gradients.key + to, shape.width);
            }
        }
    }
}

void backward_group(
    const Shape& shape, const float* query, const float* key, const float* value, const int32_t* starts, const float* out,
    const float* log_sums, const float* grad_out, float* grad_query, float* grad_key, float* grad_value, float scale) {
    const int64_t positions = shape.positions, stride = shape.query_stride(), heads = shape.heads_per_group(), width = shape.width;
    const int64_t most_keys = round_up(shape.keys_per_block(), PANEL);
    const Packed packed(shape, most_keys * width);
    const Gradients gradients(shape, most_keys);
    const Buffer inner(heads * positions);  // per row the inner product of output and its gradient: the mean gradient of its scores
    for (int64_t t = 0; t < positions; ++t) {
        std::memset(grad_query + t * stride, 0, heads * width * sizeof(float));
        for (int64_t head = 0; head < heads; ++head) {
            v8 sums = all(0.0f);
            for (int64_t h = head * width; h < (head + 1) * width; h += LANES)
                sums += load(out + t * stride + h) * load(grad_out + t * stride + h);
            inner[head * positions + t] = sum(sums);
        }
    }
    for (int64_t first = 0; first < positions; first += shape.keys_per_block()) {
        const Block block(shape, first, starts);
        const int64_t offset = first * shape.kv_stride();
        pack_rows(key + offset, shape.kv_stride(), block.keys, block.keys_padded, width, packed.key_rows);
        pack_columns(key + offset, shape.kv_stride(), block.keys, block.keys_padded, width, packed.key_columns);
        pack_rows(value + offset, shape.kv_stride(), block.keys, block.keys_padded, width, packed.value_rows);
        std::memset(gradients.key, 0, most_keys * width * sizeof(float));
        std::memset(gradients.value, 0, most_keys * width * sizeof(float));
        for (int64_t head = 0; head < heads; ++head)
            backward_block(
                shape, block, packed, query + head * width, grad_out + head * width, log_sums + head * positions, inner + head * positions,
                grad_query + head * width, gradients, scale);
        for (int64_t k = 0; k < block.keys; ++k) {
            std::memcpy(grad_key + offset + k * shape.kv_stride(), gradients.key + k * width, width * sizeof(float));
            std::memcpy(grad_value + offset + k * shape.kv_stride(), gradients.value + k * width, width * sizeof(float));
        }
    }
}

}  // namespace

extern "C" {

// `log_sums` (B, N, T) is what the backward pass needs: the logarithm of every row's sum of exponentials.
void attention_forward(
    int64_t batch, int64_t positions, int64_t query_heads, int64_t kv_heads, int64_t width, const float* query, const float* key,
    const float* value, const int32_t* starts, float* out, float* log_sums, float scale, int threads) {
    const Shape shape{batch, positions, query_heads, kv_heads, width};
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (int64_t task = 0; task < batch * kv_heads; ++task) {
        const int64_t row = task / kv_heads, group = task % kv_heads, heads = shape.heads_per_group();
        const int64_t queries = row * positions * shape.query_stride() + group * heads * width;
        const int64_t keys = row * positions * shape.kv_stride() + group * width;
        forward_group(
            shape, query + queries, key + keys, value + keys, starts + row * positions, out + queries,
            log_sums + (row * query_heads + group * heads) * positions, scale);
    }
}

void attention_backward(
    int64_t batch, int64_t positions, int64_t query_heads, int64_t kv_heads, int64_t width, const float* query, const float* key,
    const float* value, const int32_t* starts, const float* out, const float* log_sums, const float* grad_out, float* grad_query,
    float* grad_key, float* grad_value, float scale, int threads) {
    const Shape shape{batch, positions, query_heads, kv_heads, width};
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (int64_t task = 0; task < batch * kv_heads; ++task) {
        const int64_t row = task / kv_heads, group = task % kv_heads, heads = shape.heads_per_group();
        const int64_t queries = row * positions * shape.query_stride() + group * heads * width;
        const int64_t keys = row * positions * shape.kv_stride() + group * width;
        backward_group(
            shape, query + queries, key + keys, value + keys, starts + row * positions, out + queries,
            log_sums + (row * query_heads + group * heads) * positions, grad_out + queries, grad_query + queries, grad_key + keys,
            grad_value + keys, scale);
    }
}
}
