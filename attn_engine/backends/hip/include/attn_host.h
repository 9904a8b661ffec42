// The host side of a plan: tensors of the caller, temporaries, fills, launches in the order of one stream.
#pragma once

namespace attn {

template <class T, int RANK>
Global<T, RANK> global_of(const attn_tensor *tensor) {
  Global<T, RANK> result{};
  result.data = static_cast<T *>(tensor->data);
  for (int axis = 0; axis < RANK; ++axis) {
    result.size[axis] = static_cast<int>(tensor->size[axis]);
    result.stride[axis] = tensor->stride[axis];
  }
  return result;
}

template <class T, int RANK>
ATTN_KERNEL(256)
void fill_kernel(Global<T, RANK> target, T value, long long count) {
  const long long first = static_cast<long long>(program<0>()) * 256 + thread();
  if (first >= count) return;
  long long rest = first, offset = 0;
  for (int axis = RANK - 1; axis >= 0; --axis) {
    offset += rest % target.size[axis] * target.stride[axis];
    rest /= target.size[axis];
  }
  target.data[offset] = value;
}

// Runs the launches of one plan; after an error it does nothing more, and `status` tells it.
class Host {
 public:
  explicit Host(void *stream) : stream_(stream) {}
  Host(const Host &) = delete;
  ~Host() {
    for (int i = 0; i < temporaries_; ++i) release(memory_[i], stream_);
  }
  int status() const { return status_; }

  template <class... P, class... A>
  void launch(void (*kernel)(P...), int x, int y, int z, int threads, A... arguments) {
    if (status_ || x <= 0 || y <= 0 || z <= 0) return;
    status_ = attn::launch(kernel, {unsigned(x), unsigned(y), unsigned(z)}, threads, stream_, arguments...);
  }

  // Contiguous, uninitialised, given back when the plan ends.
  template <class T, class... S>
  Global<T, sizeof...(S)> temporary(S... sizes) {
    Global<T, sizeof...(S)> result{nullptr, {}, {sizes...}};
    long long count = 1;
    for (int axis = sizeof...(S) - 1; axis >= 0; --axis) {
      result.stride[axis] = count;
      count *= result.size[axis];
    }
    void *memory = nullptr;
    if (!status_ && count > 0) status_ = temporaries_ < 32 ? allocate(&memory, count * sizeof(T), stream_) : 2;
    if (memory) memory_[temporaries_++] = memory;
    result.data = static_cast<T *>(memory);
    return result;
  }

  template <class T, int RANK>
  void fill(const Global<T, RANK> &target, T value) {
    long long count = 1;
    for (int axis = 0; axis < RANK; ++axis) count *= target.size[axis];
    launch(&fill_kernel<T, RANK>, static_cast<int>((count + 255) / 256), 1, 1, 256, target, value, count);
  }

 private:
  void *stream_;
  int status_ = 0;
  int temporaries_ = 0;
  void *memory_[32];
};

}  // namespace attn
