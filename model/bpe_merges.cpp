// Byte-pair merges from a table (word -> count), in the order of the trainer of the `tokenizers` library (BpeTrainer::do_train): the pair
// with the highest count first, of equal ones the pair of the lowest ids. Counts have 64 bits. One thread: a merge touches few words.

#include <algorithm>
#include <cstdint>
#include <queue>
#include <string>
#include <unordered_map>
#include <vector>

namespace {

using Pair = uint64_t;  // left id << 32 | right id: compares as the pair of ids does

// Count of every pair, in open addressing. Pairs whose count fell to zero are forgotten when the table grows: absent is zero.
class PairCounts {
  public:
    PairCounts() { resize(1 << 16); }

    int64_t &operator[](Pair pair) {
        if (used_ * 10 > keys_.size() * 6) grow();
        const size_t slot = find(pair);
        if (keys_[slot] == EMPTY) {
            keys_[slot] = pair;
            ++used_;
        }
        return counts_[slot];
    }

    int64_t get(Pair pair) const {
        const size_t slot = find(pair);
        return keys_[slot] == EMPTY ? 0 : counts_[slot];
    }

  private:
    static constexpr Pair EMPTY = ~Pair{0};

    size_t find(Pair pair) const {
        size_t slot = (pair * 0x9E3779B97F4A7C15ull) >> shift_;
        while (keys_[slot] != EMPTY && keys_[slot] != pair) slot = (slot + 1) & (keys_.size() - 1);
        return slot;
    }

    void resize(size_t size) {
        keys_.assign(size, EMPTY);
        counts_.assign(size, 0);
        shift_ = 64 - __builtin_ctzll(size);
        used_ = 0;
    }

    void grow() {
        std::vector<Pair> keys;
        std::vector<int64_t> counts;
        keys.swap(keys_);
        counts.swap(counts_);
        const size_t alive = counts.size() - std::count(counts.begin(), counts.end(), 0);
        size_t size = keys.size();
        while (alive * 10 > size * 3) size *= 2;
        resize(size);
        for (size_t slot = 0; slot < keys.size(); ++slot) {
            if (keys[slot] == EMPTY || counts[slot] == 0) continue;
            const size_t free = find(keys[slot]);
            keys_[free] = keys[slot];
            counts_[free] = counts[slot];
            ++used_;
        }
    }

    std::vector<Pair> keys_;
    std::vector<int64_t> counts_;
    size_t used_ = 0;
    int shift_ = 0;
};

// Words in which a pair appeared at one time. A pair that appears again later gets a second entry, as in the reference.
struct Candidate {
    int64_t count;
    Pair pair;
    uint32_t age;
    uint32_t places;

    bool operator<(const Candidate &other) const {
        if (count != other.count) return count < other.count;
        if (pair != other.pair) return pair > other.pair;
        return age > other.age;
    }
};

struct Merge {
    int32_t left, right, merged;
};

class Learner {
  public:
    Learner(const uint8_t *text, const int64_t *starts, const int64_t *counts, int64_t num_words, const int32_t *byte_ids)
        : starts_(starts), word_counts_(counts), lengths_(num_words), symbols_(starts[num_words] - starts[0]) {
        tokens_.resize(256);
        for (int byte = 0; byte < 256; ++byte) {
            tokens_[byte_ids[byte]] = std::string(1, static_cast<char>(byte));
            ids_[tokens_[byte_ids[byte]]] = byte_ids[byte];
        }
        for (size_t place = 0; place < symbols_.size(); ++place) symbols_[place] = byte_ids[text[starts[0] + place]];
        for (int64_t word = 0; word < num_words; ++word) {
            lengths_[word] = static_cast<int32_t>(starts[word + 1] - starts[word]);
            const int32_t *symbol = symbols_of(word);
            for (int32_t at = 0; at + 1 < lengths_[word]; ++at) {
                const Pair pair = pair_of(symbol[at], symbol[at + 1]);
                pair_counts_[pair] += counts[word];
                note(pair, word);
            }
        }
        queue_pending();
    }

    void learn(int64_t vocab_size, int64_t min_count) {
        while (static_cast<int64_t>(tokens_.size()) < vocab_size && !queue_.empty()) {
            Candidate top = queue_.top();
            queue_.pop();
            const int64_t count = pair_counts_.get(top.pair);
            if (count != top.count) {
                top.count = count;
                if (count > 0) queue_.push(top); else release(top.places);
                continue;
            }
            if (count < 1 || count < min_count) break;
            const int32_t left = top.pair >> 32, right = static_cast<int32_t>(top.pair & 0xFFFFFFFFu);
            const int32_t merged = id_of(tokens_[left] + tokens_[right]);
            merges.push_back({left, right, merged});
            ++age_;
            for (const uint32_t word : places_[top.places]) merge_in(word, left, right, merged);
            release(top.places);
            queue_pending();
        }
    }

    std::vector<Merge> merges;

  private:
    static Pair pair_of(int32_t left, int32_t right) { return static_cast<Pair>(left) << 32 | static_cast<uint32_t>(right); }

    int32_t *symbols_of(int64_t word) { return symbols_.data() + (starts_[word] - starts_[0]); }

    int32_t id_of(const std::string &token) {
        const auto [entry, is_new] = ids_.try_emplace(token, static_cast<int32_t>(tokens_.size()));
        if (is_new) tokens_.push_back(token);
        return entry->second;
    }

    // Word::merge of the reference. The merged pair's own count stays as it was, there as here.
    void merge_in(uint32_t word, int32_t left, int32_t right, int32_t merged) {
        int32_t *symbol = symbols_of(word);
        const int64_t count = word_counts_[word];
        const int32_t length = lengths_[word];
        int32_t kept = 0;
        for (int32_t at = 0; at < length; ++at) {
            if (symbol[at] != left || at + 1 >= length || symbol[at + 1] != right) {
                symbol[kept++] = symbol[at];
                continue;
            }
            if (kept > 0) {
                pair_counts_[pair_of(symbol[kept - 1], left)] -= count;
                add(pair_of(symbol[kept - 1], merged), word, count);
            }
            ++at;
            if (at + 1 < length) {
                pair_counts_[pair_of(right, symbol[at + 1])] -= count;
                add(pair_of(merged, symbol[at + 1]), word, count);
            }
            symbol[kept++] = merged;
        }
        lengths_[word] = kept;
    }

    void add(Pair pair, uint32_t word, int64_t count) {
        pair_counts_[pair] += count;
        note(pair, word);
    }

    void note(Pair pair, uint32_t word) {
        const auto [entry, is_new] = pending_.try_emplace(pair, 0);
        if (is_new) entry->second = new_places();
        std::vector<uint32_t> &words = places_[entry->second];
        if (words.empty() || words.back() != word) words.push_back(word);
    }

    uint32_t new_places() {
        if (free_.empty()) {
            places_.emplace_back();
            return static_cast<uint32_t>(places_.size() - 1);
        }
        const uint32_t slot = free_.back();
        free_.pop_back();
        return slot;
    }

    void release(uint32_t places) {
        std::vector<uint32_t>().swap(places_[places]);
        free_.push_back(places);
    }

    void queue_pending() {
        for (const auto &[pair, places] : pending_) {
            const int64_t count = pair_counts_.get(pair);
            places_[places].shrink_to_fit();
            if (count > 0) queue_.push({count, pair, age_, places}); else release(places);
        }
        pending_.clear();
    }

    const int64_t *starts_;
    const int64_t *word_counts_;
    std::vector<int32_t> lengths_;
    std::vector<int32_t> symbols_;
    std::vector<std::string> tokens_;
    std::unordered_map<std::string, int32_t> ids_;
    PairCounts pair_counts_;
    std::unordered_map<Pair, uint32_t> pending_;
    std::vector<std::vector<uint32_t>> places_;
    std::vector<uint32_t> free_;
    std::priority_queue<Candidate> queue_;
    uint32_t age_ = 0;
};

}  // namespace

extern "C" {

// Learns at most `max_merges` merges into `merges` (left, right, merged id); gives how many there are, -1 where they would not fit.
int64_t learn_merges(const uint8_t *text, const int64_t *starts, const int64_t *counts, int64_t num_words, const int32_t *byte_ids,
                     int64_t vocab_size, int64_t min_count, int32_t *merges, int64_t max_merges) {
    Learner learner(text, starts, counts, num_words, byte_ids);
    learner.learn(vocab_size, min_count);
    const int64_t count = static_cast<int64_t>(learner.merges.size());
    if (count > max_merges) return -1;
    for (int64_t number = 0; number < count; ++number) {
        merges[3 * number] = learner.merges[number].left;
        merges[3 * number + 1] = learner.merges[number].right;
        merges[3 * number + 2] = learner.merges[number].merged;
    }
    return count;
}
}
