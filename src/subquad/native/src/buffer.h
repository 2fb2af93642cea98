// Working memory of a thread: aligned to cache lines, zeroed, and freed with its owner.
#pragma once

#include <new>

#include "vector.h"

namespace subquad::SUBQUAD_ISA {

template <class T> class Buffer {
 public:
  Buffer() = default;
  // Allocates one more vector, because the last row may be read and written up to the end of a whole vector.
  explicit Buffer(Size size) : data_(make(size + lanes<T>)) {}
  Buffer(const Buffer&) = delete;
  Buffer(Buffer&& other) noexcept : data_(other.data_) { other.data_ = nullptr; }
  Buffer& operator=(Buffer&& other) noexcept {
    T* mine = data_;
    data_ = other.data_;
    other.data_ = mine;
    return *this;
  }
  ~Buffer() { ::operator delete(data_, std::align_val_t{64}); }
  operator T*() const { return data_; }

 private:
  static T* make(Size size) {
    T* data = static_cast<T*>(::operator new(size * sizeof(T), std::align_val_t{64}));
    std::memset(data, 0, size * sizeof(T));
    return data;
  }
  T* data_ = nullptr;
};

}  // namespace subquad::SUBQUAD_ISA
