// What the kernels share: vectors, XLA's foreign function interface, and its threads.

#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "xla/ffi/api/c_api.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && !defined(PORTABLE)
#include <immintrin.h>
#define WIDE 1
#define LANES 16
#elif defined(__AVX__) && !defined(PORTABLE)
#define LANES 8
#else
#define LANES 4
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

INLINE Floats splat(float number) {
#if LANES == 16
  return (Floats)_mm512_set1_ps(number);
#elif LANES == 8
  return (Floats){number, number, number, number, number, number, number, number};
#else
  return (Floats){number, number, number, number};
#endif
}

INLINE Floats load(const float *from) {
  Floats out;
  memcpy(&out, from, sizeof out);
  return out;
}

INLINE void store(float *to, Floats numbers) { memcpy(to, &numbers, sizeof numbers); }

// bfloat16 is the upper half of a float32.
INLINE Floats load_bfloat16(const uint16_t *from) {
  Halves halves;
  memcpy(&halves, from, sizeof halves);
  return (Floats)(__builtin_convertvector(halves, Words) << 16);
}

INLINE float from_bfloat16(uint16_t half) {
  uint32_t word = (uint32_t)half << 16;
  float out;
  memcpy(&out, &word, sizeof out);
  return out;
}

// To the nearest, ties to even, as XLA does it.
INLINE uint16_t to_bfloat16(float number) {
  uint32_t word;
  memcpy(&word, &number, sizeof word);
  if ((word & 0x7fffffff) > 0x7f800000) return (uint16_t)(word >> 16 | 0x40);
  return (uint16_t)((word + 0x7fff + (word >> 16 & 1)) >> 16);
}

// Where `mask` is all ones, `yes`, elsewhere `no`.
INLINE Floats choose(Ints mask, Floats yes, Floats no) {
  return (Floats)(((Ints)yes & mask) | ((Ints)no & ~mask));
}

INLINE Floats larger(Floats first, Floats second) {
  return choose((Ints)(first > second), first, second);
}

// How much is in flight ahead of what is computed: enough for a DRAM's latency at its bandwidth.
#define AHEAD_BYTES 8192

// Less work than this, in multiplications, isn't worth a second thread.
#define WORTH_SHARING 65536

// Memory of this thread, kept until it ends; 64-byte aligned. NULL: there is none, and a unit of work that asked in
// vain fails its call. One user of each kind at a time: a unit of work, and the call that units belong to.
typedef enum { UNIT_SCRATCH, CALL_SCRATCH, SCRATCHES } ScratchKind;
void *scratch(ScratchKind kind, size_t bytes);

// Runs work(arguments, phase, unit) for every unit below units[phase], on this thread and on XLA's, phases one after
// another; returns when all are done. To wake a thread takes longer than a phase of a small model, so those that
// come stay for all phases. A helper that comes late finds no unit left in those that are over, and after the last
// touches nothing of the caller's. Returns what a handler returns: NULL, or that memory was missing.
XLA_FFI_Error *run_phases(XLA_FFI_CallFrame *frame, int threads, int phases, const int *units,
                          void (*work)(const void *, int, int), const void *arguments);

// The same with one phase.
XLA_FFI_Error *run_parallel(XLA_FFI_CallFrame *frame, int threads, int units, void (*work)(const void *, int),
                            const void *arguments);

// Threads of XLA's pool, 1 if it has none.
int count_threads(XLA_FFI_CallFrame *frame);

#define NO_MEMORY "No memory is left."

XLA_FFI_Error *fail(XLA_FFI_CallFrame *frame, const char *message);

// XLA asks each handler once for the version of the interface it was compiled for.
bool answer_metadata(XLA_FFI_CallFrame *frame);

// An attribute of the call; 0 where there is none.
float get_float(XLA_FFI_CallFrame *frame, const char *name);

int64_t get_integer(XLA_FFI_CallFrame *frame, const char *name);

INLINE XLA_FFI_Buffer *argument(XLA_FFI_CallFrame *frame, int index) {
  return (XLA_FFI_Buffer *)frame->args.args[index];
}

INLINE XLA_FFI_Buffer *result(XLA_FFI_CallFrame *frame, int index) {
  return (XLA_FFI_Buffer *)frame->rets.rets[index];
}
