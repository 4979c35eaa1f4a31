// The passes over memory between the matrix products, each in one go, float32, rows contiguous: RMSNorm, RMSNorm and rotation of heads,
// SwiGLU's product, softmax with its gradient. Widths are multiples of 8. Sums over rows go by fixed chunks of rows, so results do not
// depend on the number of threads.
#include <vector>

#include "native_code.h"

namespace {

constexpr int64_t ROWS_PER_CHUNK = 128;

float squares(const float* x, int64_t width) {
    v8 sums = all(0.0f);
    for (int64_t i = 0; i < width; i += LANES) sums += load(x + i) * load(x + i);
    return sum(sums);
}

// Gradient of x for y = x * inverse * weight, and the row's part of the weight's gradient.
void norm_row_backward(const float* grad, const float* x, const float* weight, float inverse, int64_t width, float* grad_x, float* grad_weight) {
    v8 inner = all(0.0f);
    for (int64_t i = 0; i < width; i += LANES) inner += load(grad + i) * load(weight + i) * load(x + i);
    const v8 mean = all(sum(inner) * inverse * inverse / width), factor = all(inverse);
    for (int64_t i = 0; i < width; i += LANES) {
        const v8 g = load(grad + i), value = load(x + i);
        store(grad_weight + i, load(grad_weight + i) + g * value * factor);
        store(grad_x + i, factor * (g * load(weight + i) - value * mean));
    }
}

// Sums the chunks' parts in their order.
void add_chunks(const std::vector<float>& parts, int64_t width, float* out) {
    std::memset(out, 0, width * sizeof(float));
    for (size_t first = 0; first < parts.size(); first += width)
        for (int64_t i = 0; i < width; ++i) out[i] += parts[first + i];
}

// The pairs (i, i + half) of a head turned by the angle (sign 1) or back (sign -1); what comes after both halves is copied.
void turn(const float* x, const float* cosine, const float* sine, float sign, int64_t half, int64_t width, float* out) {
    for (int64_t i = 0; i < half; i += LANES) {
        const v8 first = load(x + i), second = load(x + half + i), c = load(cosine + i), s = load(sine + i) * all(sign);
        store(out + i, first * c - second * s);
        store(out + half + i, second * c + first * s);
    }
    for (int64_t i = 2 * half; i < width; i += LANES) store(out + i, load(x + i));
}

}  // namespace

extern "C" {

void norm_forward(int64_t rows, int64_t width, const float* x, const float* weight, float eps, float* out, float* inverses, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
        const float* from = x + row * width;
        const float inverse = 1.0f / std::sqrt(squares(from, width) / width + eps);
        inverses[row] = inverse;
        for (int64_t i = 0; i < width; i += LANES) store(out + row * width + i, load(from + i) * all(inverse) * load(weight + i));
    }
}

void norm_backward(
    int64_t rows, int64_t width, const float* grad, const float* x, const float* weight, const float* inverses, float* grad_x,
    float* grad_weight, int threads) {
    const int64_t chunks = (rows + ROWS_PER_CHUNK - 1) / ROWS_PER_CHUNK;
    std::vector<float> parts(chunks * width);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t chunk = 0; chunk < chunks; ++chunk)
        for (int64_t row = chunk * ROWS_PER_CHUNK; row < rows && row < (chunk + 1) * ROWS_PER_CHUNK; ++row)
            norm_row_backward(
                grad + row * width, x + row * width, weight, inverses[row], width, grad_x + row * width, parts.data() + chunk * width);
    add_chunks(parts, width, grad_weight);
}

// Heads of `tokens` rows: normalised where `weight` is not null, then turned by row (token mod positions) of the tables (positions, 2 half).
void heads_forward(
    int64_t tokens, int64_t positions, int64_t heads, int64_t width, int64_t half, const float* x, const float* weight, float eps,
    const float* cosine, const float* sine, float* out, float* inverses, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t token = 0; token < tokens; ++token) {
        const int64_t angle = token % positions * 2 * half;
        std::vector<float> normalised(width);
        for (int64_t row = token * heads; row < (token + 1) * heads; ++row) {
            const float* from = x + row * width;
            if (weight != nullptr) {
                const float inverse = 1.0f / std::sqrt(squares(from, width) / width + eps);
                inverses[row] = inverse;
                for (int64_t i = 0; i < width; i += LANES) store(&normalised[i], load(from + i) * all(inverse) * load(weight + i));
                from = normalised.data();
            }
            turn(from, cosine + angle, sine + angle, 1.0f, half, width, out + row * width);
        }
    }
}

void heads_backward(
    int64_t tokens, int64_t positions, int64_t heads, int64_t width, int64_t half, const float* grad, const float* x, const float* weight,
    const float* cosine, const float* sine, const float* inverses, float* grad_x, float* grad_weight, int threads) {
    const int64_t chunks = (tokens + ROWS_PER_CHUNK - 1) / ROWS_PER_CHUNK;
    std::vector<float> parts(weight != nullptr ? chunks * width : 0);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        std::vector<float> turned(width);
        for (int64_t token = chunk * ROWS_PER_CHUNK; token < tokens && token < (chunk + 1) * ROWS_PER_CHUNK; ++token) {
            const int64_t angle = token % positions * 2 * half;
            for (int64_t row = token * heads; row < (token + 1) * heads; ++row) {
                float* to = weight != nullptr ? turned.data() : grad_x + row * width;
                turn(grad + row * width, cosine + angle, sine + angle, -1.0f, half, width, to);
                if (weight != nullptr)
                    norm_row_backward(to, x + row * width, weight, inverses[row], width, grad_x + row * width, &parts[chunk * width]);
            }
        }
    }
    if (weight != nullptr) add_chunks(parts, width, grad_weight);
}

// out = silu(gate) * up; `size` is a multiple of 8.
void silu_product(int64_t size, const float* gate, const float* up, float* out, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < size; i += LANES) store(out + i, load(gate + i) * sigmoid(load(gate + i)) * load(up + i));
}

// `grad` becomes the gradient of up, `grad_gate` that of gate, `product` is silu(gate) * up again.
void silu_product_backward(int64_t size, float* grad, const float* gate, const float* up, float* grad_gate, float* product, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < size; i += LANES) {
        const v8 g = load(grad + i), x = load(gate + i), u = load(up + i), s = sigmoid(x), activated = x * s;
        store(grad_gate + i, g * u * s * (all(1.0f) + x - activated));
        store(grad + i, g * activated);
        store(product + i, activated * u);
    }
}

// losses[row] = -log softmax(logits[row])[target]; where `factors` is not null logits become factor * (softmax - one-hot(target)).
void softmax_losses(int64_t rows, int64_t width, float* logits, const int64_t* targets, const float* factors, float* losses, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
        float* line = logits + row * width;
        v8 most[4], sums[4];
        for (int j = 0; j < 4; ++j) most[j] = load(line), sums[j] = all(0.0f);
        int64_t i = 0;
        for (; i + 4 * LANES <= width; i += 4 * LANES)
            for (int j = 0; j < 4; ++j) most[j] = larger(load(line + i + j * LANES), most[j]);
        for (; i < width; i += LANES) most[0] = larger(load(line + i), most[0]);
        const float highest = largest(larger(larger(most[0], most[1]), larger(most[2], most[3])));
        const float target = line[targets[row]];
        for (i = 0; i < width; i += LANES) {
            const v8 e = exponential(load(line + i) - all(highest));
            if (factors != nullptr) store(line + i, e);
            sums[i / LANES % 4] += e;
        }
        const float total = sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
        losses[row] = std::log(total) + highest - target;
        if (factors == nullptr) continue;
        const v8 scale = all(factors[row] / total);
        for (i = 0; i < width; i += LANES) store(line + i, load(line + i) * scale);
        line[targets[row]] -= factors[row];
    }
}
}
