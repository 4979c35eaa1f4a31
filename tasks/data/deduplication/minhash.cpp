// Shingles, MinHash signatures and common shingles of many texts: minhash.py says what they are. One thread: Spark runs one per core.

#include <algorithm>
#include <cstdint>
#include <vector>

namespace {

constexpr uint64_t BASE = 0x9E3779B97F4A7C15ull;
constexpr int64_t TILE = 32;  // permutations whose minima stay in registers

// splitmix64's finaliser.
uint64_t mix(uint64_t value) {
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ull;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EBull;
    return value ^ (value >> 31);
}

// MurmurHash3's 32-bit finaliser, which datasketch applies before it permutes.
uint32_t premix(uint32_t value) {
    value = (value ^ (value >> 16)) * 0x85EBCA6Bu;
    value = (value ^ (value >> 13)) * 0xC2B2AE35u;
    return value ^ (value >> 16);
}

}  // namespace

extern "C" {

// Shingles of text i go to out[shingle_offsets[i]:]; a text with fewer than `size` words has one, of all its words.
void make_shingles(const uint64_t* words, const int64_t* word_offsets, int64_t num_texts, int64_t size, int shift,
                   const int64_t* shingle_offsets, uint64_t* out) {
    for (int64_t text = 0; text < num_texts; ++text) {
        const uint64_t* from = words + word_offsets[text];
        const int64_t run = std::min(size, word_offsets[text + 1] - word_offsets[text]);
        uint64_t* to = out + shingle_offsets[text];
        for (int64_t i = 0; i < shingle_offsets[text + 1] - shingle_offsets[text]; ++i) {
            uint64_t hash = 0;
            for (int64_t word = 0; word < run; ++word) hash = hash * BASE + from[i + word];
            to[i] = mix(hash) >> shift;
        }
    }
}

// The smallest permuted shingle per text and permutation, of the upper 32 of `bits` bits; all ones for a text without shingles.
void sign_texts(const uint64_t* shingles, const int64_t* offsets, int64_t num_texts, int bits, const uint32_t* multipliers,
                const uint32_t* addends, int64_t num_permutations, uint32_t* out) {
    std::vector<uint32_t> values;
    for (int64_t text = 0; text < num_texts; ++text) {
        values.clear();
        for (int64_t i = offsets[text]; i < offsets[text + 1]; ++i) values.push_back(premix(uint32_t(shingles[i] >> (bits - 32))));
        for (int64_t tile = 0; tile < num_permutations; tile += TILE) {
            const int64_t width = std::min(TILE, num_permutations - tile);
            uint32_t multiplier[TILE] = {}, addend[TILE] = {}, smallest[TILE];
            std::copy_n(multipliers + tile, width, multiplier);
            std::copy_n(addends + tile, width, addend);
            std::fill_n(smallest, TILE, 0xFFFFFFFFu);
            for (const uint32_t value : values)
                for (int64_t i = 0; i < TILE; ++i) smallest[i] = std::min(smallest[i], value * multiplier[i] + addend[i]);
            std::copy_n(smallest, width, out + text * num_permutations + tile);
        }
    }
}

// Sizes of the intersections of the sorted sets left[i] and right[i].
void count_shared(const uint64_t* values, const int64_t* offsets, const int64_t* left, const int64_t* right, int64_t num_pairs,
                  int64_t* shared) {
    for (int64_t pair = 0; pair < num_pairs; ++pair) {
        const uint64_t *a = values + offsets[left[pair]], *b = values + offsets[right[pair]];
        const uint64_t *const a_end = values + offsets[left[pair] + 1], *const b_end = values + offsets[right[pair] + 1];
        int64_t count = 0;
        while (a != a_end && b != b_end) {
            const uint64_t x = *a, y = *b;
            count += x == y;
            a += x <= y;
            b += y <= x;
        }
        shared[pair] = count;
    }
}

}  // extern "C"
