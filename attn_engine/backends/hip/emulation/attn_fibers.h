// Runs the threads of one program as fibers of the CPU (x86-64), waves in a random order.
//
// A wave runs until all its lanes have met at a wave operation or at the barrier; which wave goes on next is drawn anew
// each time (ATTN_EMULATION_SEED), so that waves overtake each other wherever no barrier holds them. LDS is filled with
// NaN before each program. What no device could do right ends the launch with an error.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

// LDS lies in a section of its own, whose ends the linker knows.
extern "C" char __start_attn_lds[] __attribute__((weak));
extern "C" char __stop_attn_lds[] __attribute__((weak));

extern "C" void attn_switch(void **save, void *to);
asm(R"(.text
.weak attn_switch
.type attn_switch,@function
attn_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp,(%rdi); movq %rsi,%rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
)");

namespace attn::emulation {

constexpr int WAVE_LANES = 64;
constexpr std::size_t STACK = 256 << 10;

enum class State { ready, at_wave_operation, at_barrier, done };

struct Fiber {
  void *stack_pointer;
  State state;
  const char *where;
};

// What a lane offers to the others of its wave.
struct Slot {
  alignas(16) char a[16], b[16];
};

class Program {
 public:
  Program(int threads, unsigned seed)
      : fibers(threads), slots(threads), stacks_(static_cast<char *>(std::malloc(threads * STACK))), random_(seed) {}
  Program(const Program &) = delete;
  ~Program() { std::free(stacks_); }

  // False if the program failed; `error` says how.
  template <class F>
  bool run(F &body) {
    current_program() = this;
    if (__start_attn_lds) std::memset(__start_attn_lds, 0xFF, __stop_attn_lds - __start_attn_lds);
    body_ = &body;
    call_ = [](void *f) { (*static_cast<F *>(f))(); };
    for (std::size_t i = 0; i < fibers.size(); ++i) start(i);
    while (error.empty() && step()) {
    }
    return error.empty();
  }

  // Called by fibers.
  void wait(State state, const char *where) {
    fibers[current].state = state;
    fibers[current].where = where;
    attn_switch(&fibers[current].stack_pointer, main_);
  }
  void fail(const std::string &message) {
    if (error.empty()) {
      char place[96];
      std::snprintf(place, sizeof place, " (program %d,%d,%d thread %d)", id[0], id[1], id[2], current);
      error = message + place;
    }
    attn_switch(&fibers[current].stack_pointer, main_);
    std::abort();
  }

  static Program *&current_program() {
    static Program *program = nullptr;
    return program;
  }

  std::vector<Fiber> fibers;
  std::vector<Slot> slots;
  int current = 0;
  int id[3] = {0, 0, 0};
  std::string error;

 private:
  void start(std::size_t number) {
    fibers[number].state = State::ready;
    void **top = reinterpret_cast<void **>(stacks_ + (number + 1) * STACK - 64);
    *--top = nullptr;
    *--top = reinterpret_cast<void *>(&Program::enter);
    for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
    fibers[number].stack_pointer = top;
  }
  static void enter() {
    Program &self = *current_program();
    self.call_(self.body_);
    self.wait(State::done, "the end");
    std::abort();
  }

  bool is(std::size_t first, State state) const { return fibers[first].state == state; }

  // Lets one wave go on; false when all are done.
  bool step() {
    std::vector<std::size_t> ready;
    std::size_t waiting = 0, done = 0;
    for (std::size_t first = 0; first < fibers.size(); first += WAVE_LANES) {
      if (is(first, State::ready)) ready.push_back(first);
      waiting += is(first, State::at_barrier);
      done += is(first, State::done);
    }
    if (!ready.empty()) {
      advance(ready[random_() % ready.size()]);
      return true;
    }
    if (waiting && done) error = "a barrier is not reached by all threads";
    for (Fiber &fiber : fibers)
      if (fiber.state == State::at_barrier) fiber.state = State::ready;
    return waiting > 0;
  }

  void advance(std::size_t first) {
    const std::size_t end = std::min(first + WAVE_LANES, fibers.size());
    for (std::size_t lane = first; lane < end && error.empty(); ++lane) {
      current = static_cast<int>(lane);
      attn_switch(&main_, fibers[lane].stack_pointer);
    }
    for (std::size_t lane = first; lane < end && error.empty(); ++lane)
      if (fibers[lane].state != fibers[first].state || std::strcmp(fibers[lane].where, fibers[first].where))
        error = std::string("lanes of one wave part: at ") + fibers[first].where + " and at " + fibers[lane].where;
    if (is(first, State::at_wave_operation))
      for (std::size_t lane = first; lane < end; ++lane) fibers[lane].state = State::ready;
  }

  char *stacks_;
  void *main_ = nullptr;
  void *body_ = nullptr;
  void (*call_)(void *) = nullptr;
  std::minstd_rand random_;
};

inline Program &here() { return *Program::current_program(); }

// Each lane offers a and b; then `read` sees those of the wave, until all lanes have read.
template <class A, class B, class F>
auto meet(const char *where, const A &a, const B &b, F read) {
  static_assert(sizeof(A) <= 16 && sizeof(B) <= 16);
  Program &program = here();
  Slot &mine = program.slots[program.current];
  std::memcpy(mine.a, &a, sizeof a);
  std::memcpy(mine.b, &b, sizeof b);
  program.wait(State::at_wave_operation, where);
  const Slot *wave = &program.slots[program.current / WAVE_LANES * WAVE_LANES];
  auto result = read(wave);
  program.wait(State::at_wave_operation, where);
  return result;
}

inline std::string &last_error() {
  static std::string message;
  return message;
}

}  // namespace attn::emulation

// What went wrong in the last launch that failed.
extern "C" __attribute__((weak)) const char *attn_last_error() { return attn::emulation::last_error().c_str(); }
