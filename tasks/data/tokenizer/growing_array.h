// Arrays that grow in place: in anonymous memory up to a limit that they share, beyond it in files.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <utility>

// Thrown where an array cannot grow: the disk is full, or the memory limit is reached and there are no files.
struct NoRoom {};

// Anonymous memory that the arrays may take together, and the folder of the files that hold the rest, "" for none: pages that the
// system writes back and evicts as it needs. A file has no name and ends with its array.
struct Room {
    int64_t limit;
    std::string folder;
    int64_t in_memory = 0, in_files = 0;
};

template <typename T>
class Array {
  public:
    // This array may take `share` of the room's limit: arrays that are read in order leave memory to those that are read at random.
    explicit Array(Room &room, double share = 1) : room_(&room), share_(share) {}
    Array(const Array &) = delete;
    Array &operator=(const Array &) = delete;

    ~Array() {
        if (file_ < 0) {
            free(data_);
            room_->in_memory -= bytes(capacity_);
        } else {
            munmap(data_, bytes(capacity_));
            close(file_);
            room_->in_files -= bytes(capacity_);
        }
    }

    void swap(Array &other) {
        std::swap(data_, other.data_);
        std::swap(size_, other.size_);
        std::swap(capacity_, other.capacity_);
        std::swap(file_, other.file_);
    }

    // New elements are not initialised.
    void resize(size_t size) {
        if (size > capacity_) grow(std::max(size, capacity_ + capacity_ / 4 + 4096 / sizeof(T)));
        size_ = size;
    }

    void push_back(const T &value) {
        const T copy = value;
        resize(size_ + 1);
        data_[size_ - 1] = copy;
    }

    T &operator[](size_t index) { return data_[index]; }
    const T &operator[](size_t index) const { return data_[index]; }
    T *begin() { return data_; }
    T *end() { return data_ + size_; }
    size_t size() const { return size_; }
    size_t capacity() const { return capacity_; }

  private:
    static int64_t bytes(size_t count) { return static_cast<int64_t>(count * sizeof(T)); }

    void grow(size_t capacity) {
        if (file_ < 0) {
            const int64_t more = bytes(capacity) - bytes(capacity_);
            const bool fits = room_->in_memory + more <= room_->limit && bytes(capacity) <= share_ * static_cast<double>(room_->limit);
            if (T *moved = fits ? static_cast<T *>(realloc(data_, bytes(capacity))) : nullptr) {
                data_ = moved;
                capacity_ = capacity;
                room_->in_memory += more;
                return;
            }
            move_to_file();
        }
        // Reserved before it is mapped: a full disk is an error here, not a signal at some later write.
        if (posix_fallocate(file_, 0, bytes(capacity)) != 0) throw NoRoom{};
        if (data_ != nullptr) munmap(data_, bytes(capacity_));
        data_ = nullptr;
        room_->in_files += bytes(capacity) - bytes(capacity_);
        capacity_ = capacity;
        void *mapped = mmap(nullptr, bytes(capacity), PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
        if (mapped == MAP_FAILED) throw NoRoom{};
        data_ = static_cast<T *>(mapped);
    }

    void move_to_file() {
        if (room_->folder.empty()) throw NoRoom{};
        std::string name = room_->folder + "/array-XXXXXX";
        const int file = mkstemp(name.data());
        if (file < 0) throw NoRoom{};
        unlink(name.c_str());
        const char *from = reinterpret_cast<const char *>(data_);
        for (int64_t done = 0; done < bytes(size_);) {
            const ssize_t written = pwrite(file, from + done, bytes(size_) - done, done);
            if (written <= 0) {
                close(file);
                throw NoRoom{};
            }
            done += written;
        }
        free(data_);
        data_ = nullptr;
        file_ = file;
        room_->in_memory -= bytes(capacity_);
        capacity_ = 0;
    }

    Room *room_;
    double share_;
    T *data_ = nullptr;
    size_t size_ = 0, capacity_ = 0;
    int file_ = -1;
};
