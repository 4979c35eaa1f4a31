// Byte-pair merges from a table (word -> count), in the order of the trainer of the `tokenizers` library (BpeTrainer::do_train): the pair
// with the highest count first, of equal ones the pair of the lowest ids. Counts have 64 bits. One thread: a merge touches few words.
// Data that grows with the words is in flat arrays, 120 bytes per word of 14 bytes, in memory up to a limit, beyond it in files.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <new>
#include <string>
#include <unordered_map>
#include <vector>

#include "growing_array.h"
#include "pair_counts.h"
#include "position_lists.h"

namespace {

constexpr int64_t MERGES_DO_NOT_FIT = -1, NO_ROOM = -2, TOO_MANY_WORDS = -3;

// Words in which a pair appeared at one time. A pair that appears again later gets a second entry, as in the reference.
struct Candidate {
    int64_t count;
    Pair pair;
    uint64_t positions;  // the word's position if it is the only one, else the number of a list
    uint32_t age;
    bool is_single;

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
    Learner(int64_t limit, const char *folder, const int32_t *byte_ids)
        : room{limit, folder}, words_(room, 0.25), lists_(room), events_(room, 0.25), queue_(room), rare_(room), pair_counts_(room) {
        tokens_.resize(256);
        for (int byte = 0; byte < 256; ++byte) {
            byte_ids_[byte] = static_cast<uint16_t>(byte_ids[byte]);
            tokens_[byte_ids[byte]] = std::string(1, static_cast<char>(byte));
            ids_[tokens_[byte_ids[byte]]] = byte_ids[byte];
        }
        words_.resize(2);  // no word has position 0
    }

    // A word's record: its count in one unit of 16 bits, or LARGE and four, its symbols, END, up to a multiple of two units. A byte is a
    // unit, a merged token two: it spans two bytes or more, so a record never outgrows its room.
    void add(const uint8_t *text, const int64_t *starts, const int64_t *counts, int64_t num_words) {
        for (int64_t word = 0; word < num_words; ++word) {
            const int64_t length = starts[word + 1] - starts[word], count = counts[word];
            if (length < 2) continue;
            const size_t begin = words_.size();
            if (begin / 2 >> POSITION_BITS) throw TooManyWords{};
            const bool is_large = count < 0 || count >= LARGE;
            words_.resize((begin + (is_large ? 5 : 1) + length + 1 + 1) / 2 * 2);
            uint16_t *unit = &words_[begin];
            *unit++ = is_large ? LARGE : static_cast<uint16_t>(count);
            if (is_large) {
                memcpy(unit, &count, sizeof count);
                unit += 4;
            }
            for (int64_t at = starts[word]; at < starts[word + 1]; ++at) *unit++ = byte_ids_[text[at]];
            *unit = END;
        }
    }

    void learn(int64_t vocab_size, int64_t min_count) {
        min_count_ = min_count;
        index_bytes();
        while (static_cast<int64_t>(tokens_.size()) < vocab_size) {
            if (queue_.size() == 0 && !take_rare()) return;
            std::pop_heap(queue_.begin(), queue_.end());
            Candidate top = queue_[queue_.size() - 1];
            queue_.resize(queue_.size() - 1);
            const int64_t count = pair_counts_.get(top.pair);
            if (count != top.count) {
                top.count = count;
                if (count > 0) queue(top); else release(top);
                continue;
            }
            if (count < 1 || count < min_count) return;
            left_ = top.pair >> 32, right_ = static_cast<int32_t>(top.pair & 0xFFFFFFFFu);
            merged_ = id_of(tokens_[left_] + tokens_[right_]);
            merges.push_back({left_, right_, merged_});
            ++age_;
            if (top.is_single) merge_in(top.positions);
            else lists_.for_each(static_cast<uint32_t>(top.positions), [this](uint64_t position) { merge_in(position); });
            release(top);
            queue_pending();
        }
    }

    Room room;
    std::vector<Merge> merges;

  private:
    static constexpr int POSITION_BITS = 40;
    static constexpr uint16_t END = 0x4000, LARGE = 0x8000, MERGED = 0x8000;
    static constexpr uint32_t NONE = ~uint32_t{0};

    static Pair pair_of(int32_t left, int32_t right) { return static_cast<Pair>(left) << 32 | static_cast<uint32_t>(right); }

    int32_t id_of(const std::string &token) {
        const auto [entry, is_new] = ids_.try_emplace(token, static_cast<int32_t>(tokens_.size()));
        if (is_new) tokens_.push_back(token);
        return entry->second;
    }

    // Reads the symbols of a record into symbols_; returns where they begin, and sets `count`.
    uint16_t *read_word(uint64_t position, int64_t &count) {
        uint16_t *unit = &words_[2 * position];
        count = *unit++;
        if (count == LARGE) {
            memcpy(&count, unit, sizeof count);
            unit += 4;
        }
        symbols_.clear();
        for (const uint16_t *at = unit; *at != END; ++at) {
            if (*at & MERGED) {
                symbols_.push_back((*at & 0x7FFF) << 15 | at[1]);
                ++at;
            } else {
                symbols_.push_back(*at);
            }
        }
        return unit;
    }

    // Word::merge of the reference. As there, the merged pair's own count does not change.
    void merge_in(uint64_t position) {
        int64_t count;
        uint16_t *unit = read_word(position, count);
        const size_t length = symbols_.size();
        size_t kept = 0;
        for (size_t at = 0; at < length; ++at) {
            if (symbols_[at] != left_ || at + 1 >= length || symbols_[at + 1] != right_) {
                symbols_[kept++] = symbols_[at];
                continue;
            }
            if (kept > 0) {
                pair_counts_[pair_of(symbols_[kept - 1], left_)] -= count;
                add_position(pair_of(symbols_[kept - 1], merged_), position, count);
            }
            ++at;
            if (at + 1 < length) {
                pair_counts_[pair_of(right_, symbols_[at + 1])] -= count;
                add_position(pair_of(merged_, symbols_[at + 1]), position, count);
            }
            symbols_[kept++] = merged_;
        }
        if (kept == length) return;
        for (size_t at = 0; at < kept; ++at) {
            const int32_t symbol = symbols_[at];
            if (symbol >= 256) *unit++ = static_cast<uint16_t>(MERGED | symbol >> 15);
            *unit++ = static_cast<uint16_t>(symbol & 0x7FFF);
        }
        *unit = END;
    }

    void add_position(Pair pair, uint64_t position, int64_t count) {
        pair_counts_[pair] += count;
        // Every new pair holds the merged token: the other one names it.
        const int32_t left = static_cast<int32_t>(pair >> 32), right = static_cast<int32_t>(pair & 0xFFFFFFFFu);
        std::vector<uint32_t> &slots = left == merged_ ? right_slots_ : left_slots_;
        const size_t other = left == merged_ ? right : left;
        if (slots.size() <= other) slots.resize(tokens_.size(), NONE);
        if (slots[other] == NONE) {
            slots[other] = static_cast<uint32_t>(pending_.size());
            pending_.emplace_back();
            pending_.back().key = pair;
        }
        if (pending_[slots[other]].note(position)) events_.push_back(static_cast<uint64_t>(slots[other]) << POSITION_BITS | position);
    }

    // The pairs of bytes: their table is small, so their positions are counted first and written in a second pass.
    void index_bytes() {
        std::vector<Pending> noted(1 << 16);
        std::vector<int64_t> counts(1 << 16);
        for (const bool is_second : {false, true}) {
            for (size_t unit = 2; unit < words_.size();) {
                const uint64_t position = unit / 2;
                int64_t count;
                const size_t begin = read_word(position, count) - words_.begin();
                for (size_t at = 0; at + 1 < symbols_.size(); ++at) {
                    const size_t pair = symbols_[at] << 8 | symbols_[at + 1];
                    if (is_second) {
                        write(noted[pair], position);
                    } else {
                        counts[pair] += count;
                        noted[pair].note(position);
                    }
                }
                unit = (begin + symbols_.size() + 2) / 2 * 2;
            }
            if (is_second) return;
            for (size_t pair = 0; pair < noted.size(); ++pair) {
                noted[pair].key = pair_of(pair >> 8, pair & 255);
                if (counts[pair] != 0) pair_counts_[noted[pair].key] = counts[pair];
            }
            make_lists(noted);
        }
    }

    void queue_pending() {
        make_lists(pending_);
        for (const uint64_t event : events_) write(pending_[event >> POSITION_BITS], event & ((uint64_t{1} << POSITION_BITS) - 1));
        events_.resize(0);
        for (const Pending &pending : pending_) {
            const size_t left = pending.key >> 32, right = pending.key & 0xFFFFFFFFu;
            if (left < left_slots_.size()) left_slots_[left] = NONE;
            if (right < right_slots_.size()) right_slots_[right] = NONE;
        }
        pending_.clear();
    }

    // Makes the list of positions and the candidate of each pair.
    void make_lists(std::vector<Pending> &noted) {
        uint64_t needed = 0;
        for (const Pending &pending : noted) needed += pending.num_positions > 1 ? PositionLists::needed(pending) : 0;
        lists_.reserve(needed);
        for (Pending &pending : noted) {
            const int64_t count = pending.num_positions ? pair_counts_.get(pending.key) : 0;
            if (count <= 0) continue;
            const bool is_single = pending.num_positions == 1;
            queue({count, pending.key, is_single ? pending.last : lists_.make(pending), age_, is_single});
        }
    }

    void write(Pending &pending, uint64_t position) {
        if (pending.written_to) lists_.write(pending, position);
    }

    void release(const Candidate &candidate) {
        if (!candidate.is_single) lists_.release(static_cast<uint32_t>(candidate.positions));
    }

    // Pairs too rare to be learned wait outside the heap: their number grows with the words, and none is on top before the heap is empty.
    void queue(const Candidate &candidate) {
        if (candidate.count < min_count_ && !rare_are_queued_) return rare_.push_back(candidate);
        queue_.push_back(candidate);
        std::push_heap(queue_.begin(), queue_.end());
    }

    // A rare pair's count can have risen since, if another pair gave one of its tokens.
    bool take_rare() {
        if (rare_are_queued_ || rare_.size() == 0) return false;
        queue_.swap(rare_);
        rare_are_queued_ = true;
        std::make_heap(queue_.begin(), queue_.end());
        return true;
    }

    Array<uint16_t> words_;
    PositionLists lists_;
    Array<uint64_t> events_;  // what a merge adds: number of the pending pair << POSITION_BITS | position
    Array<Candidate> queue_, rare_;
    PairCounts pair_counts_;
    uint16_t byte_ids_[256];
    std::vector<std::string> tokens_;
    std::unordered_map<std::string, int32_t> ids_;
    std::vector<int32_t> symbols_;
    std::vector<Pending> pending_;
    std::vector<uint32_t> left_slots_, right_slots_;
    uint32_t age_ = 0;
    int32_t left_ = 0, right_ = 0, merged_ = 0;
    int64_t min_count_ = 0;
    bool rare_are_queued_ = false;
};

// The result, or a status below zero for an exception: none may pass through C.
template <typename Work>
int64_t status_of(Work work) {
    try {
        return work();
    } catch (const TooManyWords &) {
        return TOO_MANY_WORDS;
    } catch (const NoRoom &) {
        return NO_ROOM;
    } catch (const std::bad_alloc &) {
        return NO_ROOM;
    }
}

}  // namespace

extern "C" {

Learner *open_learner(int64_t limit, const char *folder, const int32_t *byte_ids) {
    try {
        return new Learner(limit, folder, byte_ids);
    } catch (...) {
        return nullptr;
    }
}

void close_learner(Learner *learner) { delete learner; }

int64_t add_words(Learner *learner, const uint8_t *text, const int64_t *starts, const int64_t *counts, int64_t num_words) {
    return status_of([=] {
        learner->add(text, starts, counts, num_words);
        return int64_t{0};
    });
}

// Learns at most `max_merges` merges into `merges` (left, right, merged id); returns their number, or a status below zero.
int64_t learn_merges(Learner *learner, int64_t vocab_size, int64_t min_count, int32_t *merges, int64_t max_merges) {
    return status_of([=] {
        learner->learn(vocab_size, min_count);
        const int64_t count = static_cast<int64_t>(learner->merges.size());
        if (count > max_merges) return MERGES_DO_NOT_FIT;
        for (int64_t number = 0; number < count; ++number) {
            merges[3 * number] = learner->merges[number].left;
            merges[3 * number + 1] = learner->merges[number].right;
            merges[3 * number + 2] = learner->merges[number].merged;
        }
        return count;
    });
}

int64_t bytes_in_files(const Learner *learner) { return learner->room.in_files; }
}
