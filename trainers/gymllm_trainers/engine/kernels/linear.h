// x @ kernel, for whoever has x and kernels at hand; what is said of it is in linear.c.

#pragma once

#include "common.h"

#if LANES == 16 && defined(__AVX512BF16__)
#define HAS_PAIRS 1
#endif

// What a kernel's numbers are. PAIRS: bfloat16, a step of the sum takes two; packed: in one 32-bit word.
typedef enum { FLOAT32, BFLOAT16, PAIRS, PACKED_PAIRS } Kind;

typedef struct {
  const char *x;        // [T, in]: float32, or bfloat16 for pairs
  const char *kernel;   // the layer's
  float *out;           // [T, columns]
  const int32_t *rows;  // the active ones
  const bool *active;   // [T]; NULL: rows that are not active are left as they are
  int active_rows, all_rows;
  long depth, columns;
  bool tied;  // kernel [out, in]
  Kind kind;
  int threads;
  int vectors;  // of a panel as it comes from memory
  int unit_columns, unit_rows, row_units;
} Product;

INLINE long number_bytes(Kind kind) { return kind == FLOAT32 ? 4 : 2; }

// Fills in how a product is divided into units, from what it is of: x, out, rows, active_rows, all_rows, depth,
// columns, tied, kind, kernel, active. Returns the number of units.
int divide_product(Product *product, int threads);

// Which columns, and which of the active rows, a unit computes.
void find_unit(const Product *product, int unit, long *first, long *end, int *row, int *count);

// One unit; `data` is the Product.
void multiply_unit(const void *data, int unit);
