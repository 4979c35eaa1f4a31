// One pass of glm4_moe over a ragged set of tokens, float32 on a CPU: token ids in, chosen tokens and their log-probabilities out.
//
// A token is (sequence, position, id). Its keys and values go to the cache at its position and it sees positions 0..position, so prompts
// of any lengths, prefill in chunks, single decoding steps and drafts to verify are the same call, and taking a draft back means writing
// over it. Every output number is one chain of multiply-adds in a fixed order: no result depends on the other tokens of the call, on
// the number of threads, or on who computed which tile.
//
// Matrices are packed in panels of WIDTH outputs, [panel][input][WIDTH]. Panels are float32, or bfloat16 where that loses nothing (the
// weights came from a bfloat16 checkpoint): half the memory traffic, the same arithmetic.
//
// Over 350 lines: phases of one pass that share their scratch and types; a split would put a boundary into the inner loops.
// R tokens of the call, D model, N query heads, G kv heads, H head dim, F expert hidden, E experts, K experts per token, V vocabulary.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include <omp.h>
#include <sched.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif
constexpr int WIDTH = 2 * LANES;  // outputs per panel
constexpr int ROWS = 6;           // tokens per tile: 12 sums, 2 weights and a broadcast fill 16 registers
constexpr int BLOCK = 16;         // positions per block of cached keys
constexpr int CHUNK = 16;         // panels per partial result of the unembedding

typedef float Vec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t IntVec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint32_t WordVec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint16_t HalfVec __attribute__((vector_size(LANES * 2), aligned(2), may_alias));

inline Vec splat(float value) { return value - Vec{}; }
inline Vec load(const float* from) { return *reinterpret_cast<const Vec*>(from); }
// A panel's two vectors for one input. In bfloat16 they are interleaved, so that a shift and a mask widen them.
inline void load_both(const float* from, Vec& low, Vec& high) { low = load(from), high = load(from + LANES); }
inline void load_both(const uint16_t* from, Vec& low, Vec& high) {
    WordVec both = *reinterpret_cast<const WordVec*>(from), first = both << 16, second = both & 0xffff0000u;
    low = reinterpret_cast<Vec&>(first), high = reinterpret_cast<Vec&>(second);
}
// Keeps a value in its register: GCC would rather load it again for every product, and the loads then cost twice what the products do.
inline void hold(Vec& value) {
#if defined(__x86_64__)
    asm("" : "+v"(value));
#elif defined(__aarch64__)
    asm("" : "+w"(value));
#endif
}
inline void store(float* to, Vec value) { *reinterpret_cast<Vec*>(to) = value; }
inline float sum(Vec value) {
    float total = 0;
    for (int lane = 0; lane < LANES; lane++) total += value[lane];
    return total;
}

// exp to about 1 unit in the last place (Cephes' polynomial); NaN stays NaN, below -87 it is 1e-38.
inline Vec exponential(Vec x) {
    x = x < splat(-87.0f) ? splat(-87.0f) : x;
    x = x > splat(88.0f) ? splat(88.0f) : x;
    const Vec magic = splat(12582912.0f);
    Vec n = (x * 1.44269504088896341f + magic) - magic;
    Vec r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    Vec y = splat(1.9875691500e-4f);
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    IntVec bits = (__builtin_convertvector(n, IntVec) + 127) << 23;
    return y * reinterpret_cast<Vec&>(bits);
}

}  // namespace

extern "C" {

// Mirrors of model/kernels/decoding_kernel.py's structures; pointers that a layer does not have are null.
struct Layer {
    const float *input_norm, *post_norm, *q_norm, *k_norm, *qkv_bias, *router_bias;
    const void *qkv, *output, *gate_up, *down, *router, *expert_gate_up, *expert_down;
    const float *enorm, *hnorm;
    const void* eh;
    int64_t mlp_width;  // of the dense MLP or the shared expert; 0 for none
    int64_t is_moe;
};

struct Model {
    const Layer* layers;  // the MTP layer's last, if any
    const float *embedding, *norm, *mtp_norm;
    const void* head;
    int64_t num_layers, hidden_size, num_heads, num_kv_heads, head_dim, rotary_dim, num_experts, experts_per_token, expert_width;
    int64_t vocab_size, is_half, normalises_weights, num_threads;
    double routed_scale, eps;
};

struct Cache {
    float *keys, *values;  // (layer, sequence, G, S / BLOCK, H, BLOCK) and (layer, sequence, G, S, H)
    const float *cosines, *sines;  // (S, rotary_dim / 2)
    int64_t num_sequences, capacity;
};

struct Call {
    int64_t num_tokens;
    const int64_t *token_ids, *sequences, *positions;
    const float* mtp_hidden;  // (R, D): run the MTP layer on these and the tokens' embeddings instead of the trunk
    float* hidden;            // (R, D) out: normalised, as the unembedding takes them; or null: the last layer then serves the read tokens only
    int32_t* routes;          // (layer, R, K) out: each token's experts where it and the layer have any; or null
    int64_t num_read;         // how many tokens' logits are wanted, and which
    const int64_t* read;      // ascending
    double temperature;  // 0 is greedy
    const double* draws;  // one of [0, 1) per token read
    int64_t* chosen;
    float *log_probability, *sampled_log_probability, *margin;
    float* logits;    // (num_read, V rounded up to panels) out, or null if greedy and nobody wants them
    int64_t has_failed;  // out: 1 where nothing can be drawn because logits are not finite
};
}

namespace {

// Threads meet here often and briefly, so they spin; where something else holds the core they give theirs away.
struct Barrier {
    std::atomic<int> waiting{0}, round{0};
    void wait(int threads) {
        if (threads == 1) return;
        int now = round.load(std::memory_order_acquire);
        if (waiting.fetch_add(1, std::memory_order_acq_rel) == threads - 1) {
            waiting.store(0, std::memory_order_relaxed);
            round.store(now + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; round.load(std::memory_order_acquire) == now; spins++) {
            if (spins > 4000) sched_yield();
#if defined(__x86_64__)
            else _mm_pause();
#endif
        }
    }
};

template <int M, class W>
inline void multiply(const float* const* rows, int64_t inputs, const W* panel, Vec (&sums)[ROWS][2]) {
    const float* row[M];
    Vec low[M], high[M];
    for (int m = 0; m < M; m++) row[m] = rows[m], low[m] = high[m] = Vec{};
    for (int64_t k = 0; k < inputs; k++, panel += WIDTH) {
        // The panels of one matrix follow each other; the next one is asked for while this one is multiplied.
        __builtin_prefetch(panel + WIDTH * 64);
        Vec first, second;
        load_both(panel, first, second);
        hold(first), hold(second);
#pragma GCC unroll 6
        for (int m = 0; m < M; m++) {
            Vec value = splat(row[m][k]);
            low[m] += value * first;
            high[m] += value * second;
        }
    }
    for (int m = 0; m < M; m++) sums[m][0] = low[m], sums[m][1] = high[m];
}

template <class W>
inline void multiply(int num_rows, const float* const* rows, int64_t inputs, const W* panel, Vec (&sums)[ROWS][2]) {
    switch (num_rows) {
        case 1: return multiply<1>(rows, inputs, panel, sums);
        case 2: return multiply<2>(rows, inputs, panel, sums);
        case 3: return multiply<3>(rows, inputs, panel, sums);
        case 4: return multiply<4>(rows, inputs, panel, sums);
        case 5: return multiply<5>(rows, inputs, panel, sums);
        default: return multiply<6>(rows, inputs, panel, sums);
    }
}

struct Scratch {
    std::vector<float> residual, normed, joined, qkv, attended, mlp_hidden, expert_hidden, expert_out, weights, scores, partial_numbers;
    std::vector<int32_t> expert_ids, slots, order, starts, partial_ids;
    std::vector<std::vector<float>> own;  // per thread: attention scores; per thread: a chunk's logits
};

struct Pass {
    const Model& model;
    const Cache& cache;
    Call& call;
    Scratch& scratch;
    int threads;
    Barrier barrier;
    std::vector<std::atomic<int64_t>> counters;

    int64_t R, D, N, G, H, E, K, F, qkv_width;
    const int64_t* narrowed = nullptr;  // where only the tokens read are left: which they are

    Pass(const Model& m, const Cache& c, Call& call_, Scratch& s)
        : model(m), cache(c), call(call_), scratch(s), threads(int(m.num_threads)), counters(12 * (m.num_layers + 1) + 16),
          R(call_.num_tokens), D(m.hidden_size), N(m.num_heads), G(m.num_kv_heads), H(m.head_dim), E(m.num_experts),
          K(m.experts_per_token), F(m.expert_width), qkv_width((N + 2 * G) * H) {
        for (auto& counter : counters) counter.store(0, std::memory_order_relaxed);
        int64_t widest = 0;
        for (int64_t layer = 0; layer < m.num_layers; layer++) widest = std::max(widest, m.layers[layer].mlp_width);
        auto grow = [](auto& buffer, int64_t size) { if (int64_t(buffer.size()) < size) buffer.resize(size); };
        grow(s.residual, R * D), grow(s.normed, R * D), grow(s.qkv, R * padded(qkv_width)), grow(s.attended, R * N * H);
        grow(s.mlp_hidden, R * padded(widest)), grow(s.scores, R * padded(E)), grow(s.weights, R * K);
        grow(s.expert_hidden, R * K * padded(F)), grow(s.expert_out, R * K * D);
        grow(s.expert_ids, R * K), grow(s.slots, R * K), grow(s.order, R * K), grow(s.starts, E + 1);
        if (call.mtp_hidden) grow(s.joined, R * 2 * D);
        int64_t chunks = (panels_of(m.vocab_size) + CHUNK - 1) / CHUNK;
        grow(s.partial_numbers, call.num_read * chunks * 3), grow(s.partial_ids, call.num_read * chunks);
        if (int(s.own.size()) < 2 * threads) s.own.resize(2 * threads);
    }

    static int64_t panels_of(int64_t outputs) { return (outputs + WIDTH - 1) / WIDTH; }
    static int64_t padded(int64_t outputs) { return panels_of(outputs) * WIDTH; }

    // Runs `task(0..num_tasks-1)` on all threads, whoever is free takes the next; returns when all are done.
    template <class Task>
    void share(int& phase, int64_t num_tasks, Task task) {
        auto& counter = counters[phase++];
        for (int64_t number; (number = counter.fetch_add(1, std::memory_order_relaxed)) < num_tasks;) task(number);
        barrier.wait(threads);
    }

    float* own_scratch(int thread, int64_t size) {
        auto& buffer = scratch.own[thread];
        if (int64_t(buffer.size()) < size) buffer.resize(size);
        return buffer.data();
    }

    // One panel times `count` rows; `row(i)` gives the inputs and `finish(i, low, high)` takes the WIDTH sums of row i.
    template <class W, class Row, class Finish>
    void tile_rows(int64_t count, int64_t inputs, const W* panel, Row row, Finish finish) {
        int64_t blocks = (count + ROWS - 1) / ROWS;
        for (int64_t block = 0; block < blocks; block++) {
            int64_t start = count * block / blocks, stop = count * (block + 1) / blocks;
            const float* rows[ROWS] = {};
            for (int64_t i = start; i < stop; i++) rows[i - start] = row(i);
            Vec sums[ROWS][2];
            multiply(int(stop - start), rows, inputs, panel, sums);
            for (int64_t i = start; i < stop; i++) finish(i, sums[i - start][0], sums[i - start][1]);
        }
    }

    template <class Row, class Finish>
    void tile(const void* matrix, int64_t panel, int64_t count, int64_t inputs, Row row, Finish finish) {
        int64_t offset = panel * inputs * WIDTH;
        if (model.is_half) return tile_rows(count, inputs, static_cast<const uint16_t*>(matrix) + offset, row, finish);
        tile_rows(count, inputs, static_cast<const float*>(matrix) + offset, row, finish);
    }

    int64_t panels_per_task(int64_t count) { return count >= 24 ? 1 : 4; }

    // out(R, padded(outputs)) = in(R, inputs) x matrix, plus a bias, or added to what is there.
    void multiply_all(
        int& phase, const void* matrix, int64_t outputs, int64_t inputs, const float* in, float* out, int64_t out_stride,
        const float* bias, bool adds
    ) {
        int64_t per_task = panels_per_task(R), panels = panels_of(outputs);
        share(phase, (panels + per_task - 1) / per_task, [&](int64_t number) {
            for (int64_t panel = number * per_task; panel < std::min(panels, (number + 1) * per_task); panel++) {
                int64_t first = panel * WIDTH, count = std::min<int64_t>(WIDTH, outputs - first);
                tile(matrix, panel, R, inputs, [&](int64_t r) { return in + r * inputs; }, [&](int64_t r, Vec low, Vec high) {
                    put(out + r * out_stride + first, count, low, high, bias ? bias + first : nullptr, adds);
                });
            }
        });
    }

    static void put(float* to, int64_t count, Vec low, Vec high, const float* bias, bool adds) {
        if (count == WIDTH) {
            if (bias) low += load(bias), high += load(bias + LANES);
            if (adds) low += load(to), high += load(to + LANES);
            store(to, low), store(to + LANES, high);
            return;
        }
        for (int64_t j = 0; j < count; j++) {
            float value = j < LANES ? low[j] : high[j - LANES];
            if (bias) value += bias[j];
            to[j] = adds ? to[j] + value : value;
        }
    }

    void normalise(const float* in, const float* weight, float* out, int64_t size) {
        Vec squares{};
        int64_t i = 0;
        for (; i + LANES <= size; i += LANES) squares += load(in + i) * load(in + i);
        float total = sum(squares);
        for (int64_t j = i; j < size; j++) total += in[j] * in[j];
        float scale = 1.0f / std::sqrt(total / float(size) + float(model.eps));
        for (i = 0; i + LANES <= size; i += LANES) store(out + i, load(in + i) * scale * load(weight + i));
        for (; i < size; i++) out[i] = in[i] * scale * weight[i];
    }

    // The experts' rows of the layer before, weighted and summed in the order of a token's experts, join the residual stream.
    void add_experts(int64_t r) {
        float* to = scratch.residual.data() + r * D;
        for (int64_t k = 0; k < K; k++) {
            const float* from = scratch.expert_out.data() + int64_t(scratch.slots[r * K + k]) * D;
            float weight = scratch.weights[r * K + k];
            for (int64_t d = 0; d < D; d++) to[d] += weight * from[d];
        }
    }

    void rotate(float* head, int64_t position) {
        int64_t half = model.rotary_dim / 2;
        const float *cosine = cache.cosines + position * half, *sine = cache.sines + position * half;
        for (int64_t i = 0; i < half; i++) {
            float first = head[i], second = head[i + half];
            head[i] = first * cosine[i] - second * sine[i];
            head[i + half] = second * cosine[i] + first * sine[i];
        }
    }

    float* keys_of(int64_t layer, int64_t sequence, int64_t g) {
        return cache.keys + ((layer * cache.num_sequences + sequence) * G + g) * cache.capacity * H;
    }
    float* values_of(int64_t layer, int64_t sequence, int64_t g) {
        return cache.values + ((layer * cache.num_sequences + sequence) * G + g) * cache.capacity * H;
    }

    // QK-norm, rotary embedding and scale on a token's heads; its keys and values go to the cache.
    void place_heads(int64_t number, const Layer& layer, int64_t r) {
        int64_t position = call.positions[r];
        float* heads = scratch.qkv.data() + r * padded(qkv_width);
        float scale = 1.0f / std::sqrt(float(H));
        for (int64_t n = 0; n < N; n++) {
            float* head = heads + n * H;
            if (layer.q_norm) normalise(head, layer.q_norm, head, H);
            rotate(head, position);
            for (int64_t h = 0; h < H; h++) head[h] *= scale;
        }
        for (int64_t g = 0; g < G; g++) {
            float* head = heads + (N + g) * H;
            if (layer.k_norm) normalise(head, layer.k_norm, head, H);
            rotate(head, position);
            float* block = keys_of(number, call.sequences[r], g) + position / BLOCK * BLOCK * H + position % BLOCK;
            for (int64_t h = 0; h < H; h++) block[h * BLOCK] = head[h];
            std::memcpy(values_of(number, call.sequences[r], g) + position * H, heads + (N + G + g) * H, H * sizeof(float));
        }
    }

    template <int HEADS>
    void score_block(const float* query, const float* keys, float* scores, int64_t stride) {
        constexpr int PARTS = BLOCK / LANES;
        Vec sums[HEADS][PARTS];
        for (int n = 0; n < HEADS; n++) for (int part = 0; part < PARTS; part++) sums[n][part] = Vec{};
        for (int64_t h = 0; h < H; h++)
            for (int part = 0; part < PARTS; part++) {
                Vec key = load(keys + h * BLOCK + part * LANES);
                for (int n = 0; n < HEADS; n++) sums[n][part] += splat(query[n * H + h]) * key;
            }
        for (int n = 0; n < HEADS; n++) for (int part = 0; part < PARTS; part++) store(scores + n * stride + part * LANES, sums[n][part]);
    }

    template <int HEADS>
    void mix_values(const float* scores, int64_t stride, const float* values, int64_t seen, const float* scales, float* out) {
        int64_t h = 0;
        for (; h + 2 * LANES <= H; h += 2 * LANES) {
            Vec low[HEADS], high[HEADS];
            for (int n = 0; n < HEADS; n++) low[n] = high[n] = Vec{};
            for (int64_t s = 0; s < seen; s++) {
                Vec first = load(values + s * H + h), second = load(values + s * H + h + LANES);
                for (int n = 0; n < HEADS; n++) {
                    Vec score = splat(scores[n * stride + s]);
                    low[n] += score * first, high[n] += score * second;
                }
            }
            for (int n = 0; n < HEADS; n++) store(out + n * H + h, low[n] * scales[n]), store(out + n * H + h + LANES, high[n] * scales[n]);
        }
        for (; h < H; h++)
            for (int n = 0; n < HEADS; n++) {
                float total = 0;
                for (int64_t s = 0; s < seen; s++) total += scores[n * stride + s] * values[s * H + h];
                out[n * H + h] = total * scales[n];
            }
    }

    // HEADS query heads of one kv head: they read its keys and values together.
    template <int HEADS>
    void attend(int thread, int64_t layer, int64_t r, int64_t g, int64_t first_head) {
        int64_t token = narrowed ? narrowed[r] : r, seen = call.positions[token] + 1, stride = (seen + BLOCK - 1) / BLOCK * BLOCK;
        float* scores = own_scratch(thread, HEADS * stride);
        const float* query = scratch.qkv.data() + token * padded(qkv_width) + first_head * H;
        const float *keys = keys_of(layer, call.sequences[token], g), *values = values_of(layer, call.sequences[token], g);
        for (int64_t s = 0; s < seen; s += BLOCK) {
            for (int64_t i = 0; i < BLOCK * H; i += 16) __builtin_prefetch(values + s * H + i);
            score_block<HEADS>(query, keys + s * H, scores + s, stride);
        }
        float scales[HEADS];
        for (int n = 0; n < HEADS; n++) {
            float *row = scores + n * stride, highest = row[0];
            for (int64_t s = seen; s < stride; s++) row[s] = -std::numeric_limits<float>::infinity();
            Vec most = splat(highest);
            for (int64_t s = 0; s < stride; s += LANES) most = load(row + s) > most ? load(row + s) : most;
            for (int lane = 0; lane < LANES; lane++) highest = std::max(highest, most[lane]);
            Vec total{};
            for (int64_t s = 0; s < stride; s += LANES) {
                Vec value = exponential(load(row + s) - highest);
                total += value;  // positions after `seen` add 1e-38
                store(row + s, value);
            }
            scales[n] = 1.0f / sum(total);
        }
        mix_values<HEADS>(scores, stride, values, seen, scales, scratch.attended.data() + (r * N + first_head) * H);
    }

    void attend_group(int thread, int64_t layer, int64_t r, int64_t g) {
        int64_t repeats = N / G, n = 0;
        for (; n + 4 <= repeats; n += 4) attend<4>(thread, layer, r, g, g * repeats + n);
        for (; n + 2 <= repeats; n += 2) attend<2>(thread, layer, r, g, g * repeats + n);
        for (; n < repeats; n++) attend<1>(thread, layer, r, g, g * repeats + n);
    }

    // The K experts of a token: highest sigmoid score plus bias, weighted only by the score.
    void choose_experts(int64_t number, const Layer& layer, int64_t r) {
        float* scores = scratch.scores.data() + r * padded(E);
        for (int64_t e = 0; e < E; e += LANES) store(scores + e, 1.0f / (1.0f + exponential(-load(scores + e))));
        int32_t* chosen = scratch.expert_ids.data() + r * K;
        float total = 0;
        for (int64_t k = 0; k < K; k++) {
            int64_t best = -1;
            for (int64_t e = 0; e < E; e++) {
                bool is_taken = false;
                for (int64_t j = 0; j < k; j++) is_taken |= chosen[j] == e;
                if (is_taken) continue;
                // The first one left is taken even where all are NaN: broken weights, too, must name K experts.
                if (best < 0 || scores[e] + layer.router_bias[e] > scores[best] + layer.router_bias[best]) best = e;
            }
            chosen[k] = int32_t(best);
            total += scores[best];
        }
        for (int64_t k = 0; k < K; k++) {
            float weight = scores[chosen[k]];
            if (model.normalises_weights) weight /= total + 1e-20f;
            scratch.weights[r * K + k] = weight * float(model.routed_scale);
        }
        if (call.routes) std::copy(chosen, chosen + K, call.routes + (number * call.num_tokens + (narrowed ? narrowed[r] : r)) * K);
    }

    // Rows of every expert, in the order of the tokens: `order` names the token of each row, `slots` the row of each token's choice.
    void group_by_expert() {
        std::fill_n(scratch.starts.begin(), E + 1, 0);
        for (int64_t i = 0; i < R * K; i++) scratch.starts[scratch.expert_ids[i] + 1]++;
        for (int64_t e = 0; e < E; e++) scratch.starts[e + 1] += scratch.starts[e];
        std::vector<int32_t> next(scratch.starts.begin(), scratch.starts.begin() + E);
        for (int64_t i = 0; i < R * K; i++) {
            int32_t row = next[scratch.expert_ids[i]]++;
            scratch.slots[i] = row;
            scratch.order[row] = int32_t(i / K);
        }
    }

    // silu(gate) * up: a panel holds LANES outputs of each.
    template <class Row>
    void gate_panel(const void* matrix, int64_t panel, int64_t count, int64_t width, Row row, float* out) {
        int64_t first = panel * LANES, kept = std::min<int64_t>(LANES, width - first);
        tile(matrix, panel, count, D, row, [&](int64_t i, Vec gate, Vec up) {
            Vec value = gate / (1.0f + exponential(-gate)) * up;
            float* to = out + i * width + first;
            if (kept == LANES) return store(to, value);
            for (int64_t j = 0; j < kept; j++) to[j] = value[j];
        });
    }

    // The dense MLP or the shared expert, and the routed ones: first all hidden activations, then all outputs.
    void run_mlp(int& phase, const Layer& layer) {
        const float* in = scratch.normed.data();
        float* residual = scratch.residual.data();
        const int32_t* starts = scratch.starts.data();
        int64_t half_bytes = model.is_half ? 2 : 4, experts = layer.is_moe ? E : 0;
        auto part_of = [&](const void* matrix, int64_t expert, int64_t panels, int64_t inputs) {
            return static_cast<const char*>(matrix) + expert * panels * inputs * WIDTH * half_bytes;
        };
        auto gate_panels = [](int64_t width) { return (width + LANES - 1) / LANES; };
        int64_t per_task = panels_per_task(R * K / std::max<int64_t>(E, 1));
        auto tasks_of = [&](int64_t panels) { return (panels + per_task - 1) / per_task; };

        int64_t own_tasks = gate_panels(layer.mlp_width), expert_tasks = tasks_of(gate_panels(F));
        share(phase, own_tasks + experts * expert_tasks, [&](int64_t number) {
            if (number < own_tasks) {
                gate_panel(layer.gate_up, number, R, layer.mlp_width, [&](int64_t r) { return in + r * D; }, scratch.mlp_hidden.data());
                return;
            }
            int64_t expert = (number - own_tasks) / expert_tasks, start = starts[expert], count = starts[expert + 1] - start;
            int64_t panel = (number - own_tasks) % expert_tasks * per_task, stop = std::min(gate_panels(F), panel + per_task);
            for (; count && panel < stop; panel++)
                gate_panel(
                    part_of(layer.expert_gate_up, expert, gate_panels(F), D), panel, count, F,
                    [&](int64_t i) { return in + int64_t(scratch.order[start + i]) * D; }, scratch.expert_hidden.data() + start * F
                );
        });

        int64_t panels = panels_of(D);
        own_tasks = layer.mlp_width ? panels : 0, expert_tasks = tasks_of(panels);
        share(phase, own_tasks + experts * expert_tasks, [&](int64_t number) {
            if (number < own_tasks) {
                int64_t first = number * WIDTH, kept = std::min<int64_t>(WIDTH, D - first);
                tile(layer.down, number, R, layer.mlp_width, [&](int64_t r) { return scratch.mlp_hidden.data() + r * layer.mlp_width; },
                     [&](int64_t r, Vec low, Vec high) { put(residual + r * D + first, kept, low, high, nullptr, true); });
                return;
            }
            int64_t expert = (number - own_tasks) / expert_tasks, start = starts[expert], count = starts[expert + 1] - start;
            int64_t panel = (number - own_tasks) % expert_tasks * per_task, stop = std::min(panels, panel + per_task);
            for (; count && panel < stop; panel++) {
                int64_t first = panel * WIDTH, kept = std::min<int64_t>(WIDTH, D - first);
                tile(part_of(layer.expert_down, expert, panels, F), panel, count, F,
                     [&](int64_t i) { return scratch.expert_hidden.data() + (start + i) * F; },
                     [&](int64_t i, Vec low, Vec high) { put(scratch.expert_out.data() + (start + i) * D + first, kept, low, high, nullptr, false); });
            }
        });
    }

    // From here on only the tokens read: the others have left their keys and values, which is all that others want of them.
    void narrow() {
        narrowed = call.read, R = call.num_read;
        for (int64_t r = 0; r < R; r++) std::memmove(scratch.residual.data() + r * D, scratch.residual.data() + narrowed[r] * D, D * sizeof(float));
    }

    void run_layer(int thread, int& phase, int64_t number, bool follows_experts, bool narrows) {
        const Layer& layer = model.layers[number];
        float *residual = scratch.residual.data(), *normed = scratch.normed.data();
        share(phase, R, [&](int64_t r) {
            if (follows_experts) add_experts(r);
            normalise(residual + r * D, layer.input_norm, normed + r * D, D);
        });
        multiply_all(phase, layer.qkv, qkv_width, D, normed, scratch.qkv.data(), padded(qkv_width), layer.qkv_bias, false);
        share(phase, R, [&](int64_t r) { place_heads(number, layer, r); });
        if (narrows) share(phase, 1, [&](int64_t) { narrow(); });
        share(phase, R * G, [&](int64_t task) { attend_group(thread, number, task / G, task % G); });
        multiply_all(phase, layer.output, D, N * H, scratch.attended.data(), residual, D, nullptr, true);
        share(phase, (R + ROWS - 1) / ROWS, [&](int64_t block) {
            int64_t first = block * ROWS, count = std::min<int64_t>(ROWS, R - first);
            for (int64_t r = first; r < first + count; r++) normalise(residual + r * D, layer.post_norm, normed + r * D, D);
            if (!layer.is_moe) return;
            for (int64_t panel = 0; panel < panels_of(E); panel++)
                // Never in half precision: routing is decided in float32.
                tile_rows(count, D, static_cast<const float*>(layer.router) + panel * D * WIDTH, [&](int64_t i) { return normed + (first + i) * D; },
                          [&](int64_t i, Vec low, Vec high) {
                              float* to = scratch.scores.data() + (first + i) * padded(E) + panel * WIDTH;
                              store(to, low), store(to + LANES, high);
                          });
            for (int64_t r = first; r < first + count; r++) choose_experts(number, layer, r);
        });
        if (layer.is_moe) share(phase, 1, [&](int64_t) { group_by_expert(); });
        run_mlp(phase, layer);
    }

    // Chunks of the vocabulary leave, per token, their best two logits and their sum of exponentials; whole rows only where asked for.
    void run_head(int thread, int& phase, const float* hidden) {
        int64_t V = model.vocab_size, panels = panels_of(V), chunks = (panels + CHUNK - 1) / CHUNK, rows = call.num_read;
        share(phase, chunks, [&](int64_t chunk) {
            int64_t first_panel = chunk * CHUNK, stop_panel = std::min(panels, first_panel + CHUNK), stride = padded(V);
            float* logits = call.logits + first_panel * WIDTH;
            if (!call.logits) {
                stride = CHUNK * WIDTH;
                logits = own_scratch(threads + thread, rows * stride);
            }
            for (int64_t panel = first_panel; panel < stop_panel; panel++) {
                float* to = logits + (panel - first_panel) * WIDTH;
                tile(model.head, panel, rows, D, [&](int64_t i) { return hidden + (narrowed ? i : call.read[i]) * D; },
                     [&](int64_t i, Vec low, Vec high) { store(to + i * stride, low), store(to + i * stride + LANES, high); });
            }
            int64_t count = std::min(V - first_panel * WIDTH, (stop_panel - first_panel) * WIDTH);
            for (int64_t i = 0; i < rows; i++) summarise_chunk(logits + i * stride, count, first_panel * WIDTH, i * chunks + chunk);
        });
        share(phase, rows, [&](int64_t i) { choose_token(i, chunks); });
    }

    void summarise_chunk(float* logits, int64_t count, int64_t first_token, int64_t slot) {
        const float lowest = -std::numeric_limits<float>::infinity();
        for (int64_t j = count; j % LANES; j++) logits[j] = lowest;
        Vec best = splat(lowest), second = best;
        for (int64_t j = 0; j < count; j += LANES) {
            Vec value = load(logits + j), lesser = value > best ? best : value;
            best = value > best ? value : best;
            second = lesser > second ? lesser : second;
        }
        float top = lowest, next = lowest;
        for (int lane = 0; lane < LANES; lane++)
            for (float value : {best[lane], second[lane]})
                if (value > top) next = top, top = value;
                else if (value > next) next = value;
        int64_t place = 0;
        while (place + 1 < count && !(logits[place] == top)) place++;
        Vec total{};
        for (int64_t j = 0; j < count; j += LANES) total += exponential(load(logits + j) - top);
        float* numbers = scratch.partial_numbers.data() + slot * 3;
        numbers[0] = top, numbers[1] = next, numbers[2] = sum(total);
        scratch.partial_ids[slot] = int32_t(first_token + place);
    }

    void choose_token(int64_t i, int64_t chunks) {
        const float* numbers = scratch.partial_numbers.data() + i * chunks * 3;
        int64_t best = 0;
        for (int64_t chunk = 1; chunk < chunks; chunk++) if (numbers[chunk * 3] > numbers[best * 3]) best = chunk;
        float top = numbers[best * 3], next = numbers[best * 3 + 1];
        double total = 0;
        for (int64_t chunk = 0; chunk < chunks; chunk++) {
            if (chunk != best) next = std::max(next, numbers[chunk * 3]);
            total += double(numbers[chunk * 3 + 2]) * std::exp(double(numbers[chunk * 3]) - top);
        }
        call.margin[i] = top - next;
        if (call.temperature == 0) {
            call.chosen[i] = scratch.partial_ids[i * chunks + best];
            call.log_probability[i] = call.sampled_log_probability[i] = float(-std::log(total));
            return;
        }
        draw_token(i, top, std::log(total));
    }

    // The token on which the draw falls, in the order of the vocabulary: never one without mass.
    void draw_token(int64_t i, float top, double log_total) {
        int64_t V = model.vocab_size, stride = padded(V), step = CHUNK * WIDTH;
        const float* logits = call.logits + i * stride;
        float inverse = float(1.0 / call.temperature);
        std::vector<double> masses;
        double mass = 0;
        auto mass_of = [&](int64_t v) {
            Vec value = exponential((load(logits + v) - top) * inverse);
            for (int lane = int(std::min<int64_t>(LANES, V - v)); lane < LANES; lane++) value[lane] = 0;
            return value;
        };
        for (int64_t start = 0; start < V; start += step) {
            Vec total{};
            for (int64_t v = start; v < std::min(V, start + step); v += LANES) total += mass_of(v);
            masses.push_back(sum(total));
            mass += masses.back();
        }
        if (!std::isfinite(mass)) {
            call.has_failed = 1;
            call.chosen[i] = 0;
            return;
        }
        double wanted = call.draws[i] * mass, before = 0;
        size_t chunk = 0;
        while (chunk + 1 < masses.size() && before + masses[chunk] <= wanted) before += masses[chunk++];
        int64_t start = int64_t(chunk) * step, stop = std::min(V, start + step), chosen = start;
        double highest = -1;
        for (int64_t v = start; v < stop; v += LANES) {
            Vec value = mass_of(v);
            for (int lane = 0; lane < LANES && v + lane < stop; lane++) {
                // Rounding may put the draw after the chunk's last token: then the last one that has mass is it.
                if (value[lane] > 1e-30f) chosen = v + lane, highest = before += value[lane];
                if (highest > wanted) v = stop, lane = LANES;
            }
        }
        call.chosen[i] = chosen;
        call.log_probability[i] = float(logits[chosen] - top - log_total);
        call.sampled_log_probability[i] = float((double(logits[chosen]) - top) / call.temperature - std::log(mass));
    }

    void run(int thread) {
        int phase = 0;
        float *residual = scratch.residual.data(), *joined = scratch.joined.data();
        const bool is_mtp = call.mtp_hidden != nullptr;
        const int64_t last = model.num_layers - 1;
        const Layer& mtp = model.layers[last];
        share(phase, R, [&](int64_t r) {
            const float* embedded = model.embedding + call.token_ids[r] * D;
            if (!is_mtp) {
                std::memcpy(residual + r * D, embedded, D * sizeof(float));
                return;
            }
            normalise(embedded, mtp.enorm, joined + r * 2 * D, D);
            normalise(call.mtp_hidden + r * D, mtp.hnorm, joined + r * 2 * D + D, D);
        });
        if (is_mtp) multiply_all(phase, mtp.eh, D, 2 * D, joined, residual, D, nullptr, false);
        bool follows_experts = false, narrows = !call.hidden && call.num_read < R;
        for (int64_t number = is_mtp ? last : 0, stop = is_mtp || !model.mtp_norm ? last + 1 : last; number < stop; number++) {
            run_layer(thread, phase, number, follows_experts, narrows && number == stop - 1);
            follows_experts = model.layers[number].is_moe;
        }
        float* hidden = call.hidden ? call.hidden : scratch.normed.data();
        share(phase, R, [&](int64_t r) {
            if (follows_experts) add_experts(r);
            normalise(residual + r * D, is_mtp ? model.mtp_norm : model.norm, hidden + r * D, D);
        });
        if (call.num_read) run_head(thread, phase, hidden);
    }
};

}  // namespace

extern "C" {

int64_t panel_width() { return WIDTH; }
int64_t block_positions() { return BLOCK; }
void* new_scratch() { return new Scratch; }
void free_scratch(void* scratch) { delete static_cast<Scratch*>(scratch); }

void run_pass(const Model* model, const Cache* cache, Call* call, void* scratch) {
    call->has_failed = 0;
    Pass pass(*model, *cache, *call, *static_cast<Scratch*>(scratch));
#pragma omp parallel num_threads(pass.threads)
    pass.run(omp_get_thread_num());
}
}
