// Counts of the pairs of neighbouring tokens.
#pragma once

#include <algorithm>
#include <cstdint>

#include "growing_array.h"

using Pair = uint64_t;  // left id << 32 | right id: compares as the pair of ids does

// Count of every pair, in open addressing, ordered by hash, so that growing reads and writes in order. Pairs whose count fell to zero
// are removed when the table grows; an absent pair has count zero.
class PairCounts {
  public:
    explicit PairCounts(Room &room) : room_(room), slots_(room) { fill(slots_, 1 << 16); }

    int64_t &operator[](Pair pair) {
        if (used_ * 10 > slots_.size() * 8) grow();
        Slot &slot = slots_[find(slots_, pair)];
        if (slot.pair == EMPTY) {
            slot = {pair, 0};
            ++used_;
        }
        return slot.count;
    }

    int64_t get(Pair pair) const {
        const Slot &slot = slots_[find(slots_, pair)];
        return slot.pair == EMPTY ? 0 : slot.count;
    }

  private:
    struct Slot {
        Pair pair;
        int64_t count;
    };
    static constexpr Pair EMPTY = ~Pair{0};

    static size_t find(const Array<Slot> &slots, Pair pair) {
        uint64_t hash = (pair ^ pair >> 29) * 0x9E3779B97F4A7C15ull;
        hash = (hash ^ hash >> 32) * 0xD6E8FEB86659FD93ull;
        size_t slot = static_cast<size_t>(static_cast<unsigned __int128>(hash) * slots.size() >> 64);
        while (slots[slot].pair != EMPTY && slots[slot].pair != pair) slot = slot + 1 == slots.size() ? 0 : slot + 1;
        return slot;
    }

    static void fill(Array<Slot> &slots, size_t size) {
        slots.resize(size);
        std::fill(slots.begin(), slots.end(), Slot{EMPTY, 0});
    }

    void grow() {
        size_t alive = 0;
        for (const Slot &slot : slots_) alive += slot.pair != EMPTY && slot.count != 0;
        Array<Slot> larger(room_);
        fill(larger, std::max<size_t>(alive * 5 / 3, 1 << 16));
        for (const Slot &slot : slots_)
            if (slot.pair != EMPTY && slot.count != 0) larger[find(larger, slot.pair)] = slot;
        slots_.swap(larger);
        used_ = alive;
    }

    Room &room_;
    Array<Slot> slots_;
    size_t used_ = 0;
};
