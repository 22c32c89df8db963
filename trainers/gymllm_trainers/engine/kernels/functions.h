// Functions of vectors.

#pragma once

#include "common.h"

// e^x for x <= 0, to 2 units in the last place: 2^n times a polynomial (Cephes' expf). NaN stays NaN.
INLINE Floats exponential(Floats x) {
  x = choose((Ints)(x < splat(-87.0f)), splat(-87.0f), x);
  const Floats rounder = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Floats shifted = x * splat(1.44269504f) + rounder;
  const Floats whole = shifted - rounder;
  const Floats rest = (x - whole * splat(0.693359375f)) - whole * splat(-2.12194440e-4f);
  Floats sum = splat(1.9875691500e-4f);
  sum = sum * rest + splat(1.3981999507e-3f);
  sum = sum * rest + splat(8.3334519073e-3f);
  sum = sum * rest + splat(4.1665795894e-2f);
  sum = sum * rest + splat(1.6666665459e-1f);
  sum = sum * rest + splat(5.0000001201e-1f);
  sum = sum * (rest * rest) + (rest + splat(1.0f));
  const Ints power = ((Ints)shifted - (Ints)rounder + 127) << 23;
  return sum * (Floats)power;
}

INLINE Floats hyperbolic_tangent(Floats x) {
  const Ints sign = (Ints)x & INT32_MIN;
  const Floats small = exponential((Floats)((Ints)(x + x) | INT32_MIN));
  return (Floats)((Ints)((splat(1.0f) - small) / (splat(1.0f) + small)) | sign);
}

// To the nearest bfloat16, ties to even, as a float32.
INLINE Floats round_bfloat16(Floats x) {
  const Words word = (Words)x;
  return (Floats)((word + 0x7fff + (word >> 16 & 1)) & 0xffff0000);
}

INLINE void store_bfloat16(uint16_t *to, Floats x) {
  const Words word = (Words)x;
  const Halves halves = __builtin_convertvector((word + 0x7fff + (word >> 16 & 1)) >> 16, Halves);
  memcpy(to, &halves, sizeof halves);
}

INLINE float add_lanes(Floats numbers) {
  float sum = 0;
  for (int lane = 0; lane < LANES; lane++) sum += numbers[lane];
  return sum;
}

// x / (1 + e^-x)
INLINE Floats silu(Floats x) {
  const Floats small = exponential((Floats)((Ints)x | INT32_MIN));
  return x * choose((Ints)(x < 0), small, splat(1)) / (splat(1) + small);
}

// GELU by its tanh approximation (Hendrycks and Gimpel 2016, arXiv:1606.08415).
INLINE Floats gelu(Floats x) {
  const Floats inner = splat(0.79788456f) * (x + splat(0.044715f) * x * x * x);
  return splat(0.5f) * x * (splat(1) + hyperbolic_tangent(inner));
}
