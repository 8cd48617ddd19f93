// CUDA threads on one CPU thread: coroutines that go on until they wait. `swapcontext` asks the system to keep signal
// masks at every switch, which takes longer than all else; after its first step a coroutine is switched without it.
#pragma once

#include <ucontext.h>

#include <cstddef>

struct Coroutine {
  ucontext_t start;
  void* place[5];  // the place to go on at, for __builtin_longjmp
  bool begun = false;

  void set_up(void (*function)(), char* stack, size_t size) {
    getcontext(&start);
    start.uc_stack.ss_sp = stack, start.uc_stack.ss_size = size, start.uc_link = nullptr;
    makecontext(&start, function, 0);
    begun = false;
  }
};

inline void* scheduler_place[5];

[[noreturn]] __attribute__((noinline)) inline void jump(void** place) { __builtin_longjmp(place, 1); }

// From the scheduler: lets a coroutine go on until it leaves.
__attribute__((noinline)) inline void resume(Coroutine& coroutine) {
  if (__builtin_setjmp(scheduler_place)) return;
  if (coroutine.begun) jump(coroutine.place);
  coroutine.begun = true;
  setcontext(&coroutine.start);
}

// From a coroutine: back to the scheduler. Its function leaves at its end and never returns.
__attribute__((noinline)) inline void leave(Coroutine& coroutine) {
  if (!__builtin_setjmp(coroutine.place)) jump(scheduler_place);
}
