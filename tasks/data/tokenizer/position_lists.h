// Lists of ascending positions. Each list is written once, read in order and released; positions are stored as differences, 7 bits a byte.
#pragma once

#include <cstdint>
#include <cstring>

#include "growing_array.h"

// Thrown where a list grows beyond 4 GiB, or a number has more bits than there is room for.
struct TooManyWords {};

// A list in the making: positions are first noted, which measures the list, then written in the same order. 0 is no position.
struct Pending {
    uint64_t key = 0, num_positions = 0, num_bytes = 0, last = 0, written_to = 0;

    // False for the position that was noted last.
    bool note(uint64_t position) {
        if (last == position) return false;
        ++num_positions;
        for (uint64_t rest = position - last; rest > 0; rest >>= 7) ++num_bytes;
        last = position;
        return true;
    }
};

class PositionLists {
  public:
    explicit PositionLists(Room &room) : bytes_(room, 0.25), starts_(room) {}

    // Called before lists of `num_bytes` in all are made: reuses the memory of released lists before it takes more.
    void reserve(uint64_t num_bytes) {
        if (bytes_.size() + num_bytes > bytes_.capacity() && dead_bytes_ * 3 > bytes_.size()) compact();
    }

    static uint64_t needed(const Pending &pending) { return HEADER + pending.num_bytes; }

    // Makes a list for the noted positions and returns its number; `write` fills it before the next call of `reserve`.
    uint32_t make(Pending &pending) {
        uint32_t number = first_free_;
        if (number == DEAD) {
            if (starts_.size() >= DEAD || pending.num_bytes >> 32) throw TooManyWords{};
            number = static_cast<uint32_t>(starts_.size());
            starts_.resize(number + 1);
        } else {
            first_free_ = static_cast<uint32_t>(starts_[number]);
        }
        if (pending.num_bytes >> 32) throw TooManyWords{};
        const size_t start = bytes_.size();
        bytes_.resize(start + needed(pending));
        const uint32_t header[2] = {number, static_cast<uint32_t>(pending.num_bytes)};
        memcpy(&bytes_[start], header, HEADER);
        starts_[number] = start;
        pending.written_to = start + HEADER;
        pending.last = 0;
        return number;
    }

    void write(Pending &pending, uint64_t position) {
        if (pending.last == position) return;
        uint64_t rest = position - pending.last;
        for (; rest > 127; rest >>= 7) bytes_[pending.written_to++] = static_cast<uint8_t>(rest | 128);
        bytes_[pending.written_to++] = static_cast<uint8_t>(rest);
        pending.last = position;
    }

    // `visit` must not make a list.
    template <typename Visit>
    void for_each(uint32_t number, Visit visit) {
        size_t at = starts_[number];
        const size_t end = at + HEADER + size_of(at);
        uint64_t position = 0;
        for (at += HEADER; at < end;) {
            uint64_t difference = 0;
            int shift = 0;
            for (; bytes_[at] & 128; shift += 7) difference |= static_cast<uint64_t>(bytes_[at++] & 127) << shift;
            position += difference | static_cast<uint64_t>(bytes_[at++]) << shift;
            visit(position);
        }
    }

    void release(uint32_t number) {
        const size_t start = starts_[number];
        memcpy(&bytes_[start], &DEAD, sizeof DEAD);
        dead_bytes_ += HEADER + size_of(start);
        starts_[number] = first_free_;
        first_free_ = number;
    }

  private:
    static constexpr uint32_t DEAD = ~uint32_t{0};
    static constexpr size_t HEADER = 8;  // a list's number and its bytes, 32 bits each

    uint32_t size_of(size_t start) const {
        uint32_t size;
        memcpy(&size, &bytes_[start + 4], sizeof size);
        return size;
    }

    // Moves the lists that were not released together, in their order.
    void compact() {
        size_t to = 0;
        for (size_t from = 0; from < bytes_.size();) {
            const size_t num_bytes = HEADER + size_of(from);
            uint32_t number;
            memcpy(&number, &bytes_[from], sizeof number);
            if (number != DEAD) {
                memmove(&bytes_[to], &bytes_[from], num_bytes);
                starts_[number] = to;
                to += num_bytes;
            }
            from += num_bytes;
        }
        bytes_.resize(to);
        dead_bytes_ = 0;
    }

    Array<uint8_t> bytes_;
    Array<uint64_t> starts_;  // start of each list; for a free number the next free one
    size_t dead_bytes_ = 0;
    uint32_t first_free_ = DEAD;
};
