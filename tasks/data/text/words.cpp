// Cuts texts into words and hashes them, one pass over their code points: words.py says what a word is.

#include <cstdint>

namespace {

// Classes of code points, as words.py numbers them.
constexpr uint8_t SEPARATOR = 0, LETTER = 1, NUMBER = 2, SINGLE = 3, OPERATOR = 4;
constexpr uint64_t BASE = 0x9E3779B97F4A7C15ull;

// splitmix64's finaliser.
uint64_t mix(uint64_t value) {
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ull;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EBull;
    return value ^ (value >> 31);
}

}  // namespace

extern "C" {

// Gives the number of words. `visible` is null unless every visible sign is a word; outputs have room for one word per code point.
int64_t cut_words(const uint32_t* points, const int64_t* text_starts, int64_t num_texts, const uint8_t* classes, const uint32_t* lower,
                  const uint8_t* visible, int with_operators, uint64_t* hashes, int64_t* lengths, int64_t* starts, uint8_t* is_single,
                  uint8_t* has_letter, int64_t* offsets) {
    int64_t num_words = 0;
    for (int64_t text = 0; text < num_texts; ++text) {
        offsets[text] = num_words;
        const int64_t begin = text_starts[text], end = text_starts[text + 1];
        for (int64_t i = begin; i < end;) {
            const int64_t start = i;
            const uint8_t first = classes[points[i]];
            bool with_letter = first == LETTER || first == SINGLE;
            uint64_t sum = 0, power = 1;
            if (first == LETTER || first == NUMBER) {
                for (uint8_t kind = first; kind == LETTER || kind == NUMBER;) {
                    sum += (uint64_t(lower[points[i]]) + 1) * power;
                    power *= BASE;
                    with_letter |= kind == LETTER;
                    kind = ++i < end ? classes[points[i]] : SEPARATOR;
                }
            } else {
                ++i;
                const bool stands_alone = first == OPERATOR && !(start > begin && classes[points[start - 1]] == OPERATOR) &&
                                          !(i < end && classes[points[i]] == OPERATOR);
                const bool is_sign = visible && first != SINGLE && visible[points[start]];
                if (first != SINGLE && !is_sign && !(with_operators && stands_alone)) continue;
                sum = uint64_t(lower[points[start]]) + 1;
            }
            hashes[num_words] = mix(sum);
            lengths[num_words] = i - start;
            starts[num_words] = start;
            is_single[num_words] = first == SINGLE;
            has_letter[num_words++] = with_letter;
        }
    }
    offsets[num_texts] = num_words;
    return num_words;
}

}  // extern "C"
