// x @ kernel, for kernels that lie as [in, out] (a layer of a stack) or as [out, in] (a tied embedding).
//
// A number of the result is sum(x[i] * kernel[i]) taken one i after the other (two at a time where a
// processor multiplies pairs of bfloat16), in float32, by fused multiply-adds where there are any. No
// blocking changes that order, so it has the same bits however many rows there are.
//
// The result is cut into panels of PANEL columns. For a few rows a panel is multiplied as it comes from
// memory. For more, or if the kernel lies as [out, in], it is first packed: converted, laid out
// [in, PANEL], and kept in the cache while the rows go by, ROWS at a time. A block of ROWS x PANEL sums
// stays in registers throughout. What will be needed next is prefetched meanwhile: with strides of a
// kernel's row the processor doesn't guess it.

#include "linear.h"

#if LANES == 16
#define ROWS 8
#define MOST_VECTORS 12
#else
#define ROWS 4
#define MOST_VECTORS 3
#endif
#define VECTORS 3
#define PANEL (LANES * VECTORS)
// Steps of a packed panel: at 4 bytes a number it takes a fifth of a second-level cache of 1 MB.
#define DEPTH 1024
// More rows than this are multiplied with packed panels: measured.
#define DIRECT_ROWS (4 * ROWS)
// A panel of up to this size stays in the second-level cache while several tiles go by.
#define CACHED_BYTES (512 * 1024)
// With up to this many rows, multiplying is too short to fetch the next panel meanwhile: packing helps.
#define FEW_ROWS 4

typedef struct {
  const char *x[ROWS];
  float *out[ROWS];
  const char *kernel;
  long stride;  // of a step, in bytes
  long steps;
  bool more;  // go on from what `out` holds
  // What will be needed next: a few bytes a step, at `next` and `next_second` after it.
  const char *next;
  long next_stride, next_second;
} Tile;

INLINE Floats load_step(const Kind kind, const char *kernel, long stride, int vector) {
  if (kind == BFLOAT16) return load_bfloat16((const uint16_t *)kernel + vector * LANES);
#if HAS_PAIRS
  if (kind == PAIRS) {
    const char *second_row = kernel + stride / 2;
    const __m256i first = _mm256_loadu_si256((const __m256i *)(kernel + vector * 2 * LANES));
    const __m256i second = _mm256_loadu_si256((const __m256i *)(second_row + vector * 2 * LANES));
    const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,  //
                                           23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return (Floats)_mm512_permutexvar_epi16(order, both);
  }
#endif
  (void)stride;
  return load((const float *)kernel + vector * LANES);
}

INLINE Floats multiply_add(const Kind kind, Floats sum, Floats kernel, Floats x) {
#if HAS_PAIRS
  if (kind == PAIRS || kind == PACKED_PAIRS)
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)kernel, (__m512bh)x);
#endif
  (void)kind;
  return sum + kernel * x;
}

INLINE Floats spread(const char *x) {
  float number;  // or two of bfloat16
  memcpy(&number, x, 4);
  return splat(number);
}

INLINE void multiply_tile(const Tile *tile, const int rows, const int vectors, const Kind kind, const bool packed) {
  Floats sums[ROWS][MOST_VECTORS];
  UNROLL for (int row = 0; row < rows; row++)
    UNROLL for (int vector = 0; vector < vectors; vector++)
      sums[row][vector] = tile->more ? load(tile->out[row] + vector * LANES) : splat(0);
  const long stride = tile->stride, bytes = vectors * LANES * number_bytes(kind);
  const long ahead = packed ? 0 : AHEAD_BYTES / (bytes * (kind == PAIRS ? 2 : 1)) * stride;
  const char *kernel = tile->kernel, *next = tile->next;
  // Prefetched into the second-level cache: rows that are a power of two apart, or nearly, share a few
  // places of the first, and would be gone from it before they are used.
  for (long step = 0; step < tile->steps; step++) {
    if (packed) {
      __builtin_prefetch(next, 0, 2);
      __builtin_prefetch(next + 64, 0, 2);
      __builtin_prefetch(next + tile->next_second, 0, 2);
      __builtin_prefetch(next + tile->next_second + 64, 0, 2);
      next += tile->next_stride;
    } else {
      UNROLL for (long byte = 0; byte < bytes; byte += 64) {
        __builtin_prefetch(kernel + ahead + byte, 0, 2);
        if (kind == PAIRS) __builtin_prefetch(kernel + ahead + stride / 2 + byte, 0, 2);
      }
    }
    UNROLL for (int vector = 0; vector < vectors; vector++) {
      const Floats weights = load_step(kind, kernel, stride, vector);
      UNROLL for (int row = 0; row < rows; row++)
        sums[row][vector] = multiply_add(kind, sums[row][vector], weights, spread(tile->x[row] + 4 * step));
    }
    kernel += stride;
  }
  UNROLL for (int row = 0; row < rows; row++)
    UNROLL for (int vector = 0; vector < vectors; vector++)
      store(tile->out[row] + vector * LANES, sums[row][vector]);
}

#define TILE(rows, vectors) \
  case 16 * rows + vectors: return multiply_tile(tile, rows, vectors, kind, packed)
#define TILES(rows) \
  TILE(rows, 1);    \
  TILE(rows, 2);    \
  TILE(rows, 3)

INLINE void multiply_rows(const Tile *tile, int rows, int vectors, const Kind kind, const bool packed) {
  switch (16 * rows + vectors) {
    TILES(1);
    TILES(2);
    TILES(3);
    TILES(4);
#if ROWS == 8
    TILES(5);
    TILES(6);
    TILES(7);
    TILES(8);
#endif
  }
}

INLINE void multiply_direct(const Tile *tile, int rows, int vectors, const Kind kind) {
#if MOST_VECTORS == 12
  const bool packed = false;
  // Few rows leave registers for wider panels, which memory likes better.
  switch (16 * rows + vectors) {
    TILE(1, 12);
    TILE(1, 8);
    TILE(1, 6);
    TILE(1, 4);
    TILE(2, 12);
    TILE(2, 8);
    TILE(2, 6);
    TILE(2, 4);
    TILE(3, 6);
    TILE(3, 4);
    TILE(4, 6);
    TILE(4, 4);
  }
#endif
  multiply_rows(tile, rows, vectors, kind, false);
}

static void multiply_float32(const Tile *tile, int rows, int vectors) { multiply_direct(tile, rows, vectors, FLOAT32); }
static void multiply_bfloat16(const Tile *tile, int rows, int vectors) {
  multiply_direct(tile, rows, vectors, BFLOAT16);
}
static void multiply_packed_float32(const Tile *tile, int rows, int vectors) {
  multiply_rows(tile, rows, vectors, FLOAT32, true);
}
#if HAS_PAIRS
static void multiply_pairs(const Tile *tile, int rows, int vectors) { multiply_direct(tile, rows, vectors, PAIRS); }
static void multiply_packed_pairs(const Tile *tile, int rows, int vectors) {
  multiply_rows(tile, rows, vectors, PACKED_PAIRS, true);
}
#endif

// One step's 32-bit word of a column: a float32, or a pair.
INLINE uint32_t read_word(const Product *product, long step, long column) {
  uint32_t word;
  if (product->kind == PAIRS) {
    const uint16_t *numbers = (const uint16_t *)product->kernel;
    const long first = product->tied ? column * product->depth + 2 * step : 2 * step * product->columns + column;
    return numbers[first] | (uint32_t)numbers[first + (product->tied ? 1 : product->columns)] << 16;
  }
  const long at = product->tied ? column * product->depth + step : step * product->columns + column;
  if (product->kind == BFLOAT16) return (uint32_t)((const uint16_t *)product->kernel)[at] << 16;
  memcpy(&word, product->kernel + 4 * at, 4);
  return word;
}

#if LANES == 16
// packed[step][lane] = rows[lane][step], for 16 lanes and 16 steps.
INLINE void transpose_words(const Floats *rows, float *packed) {
  __m512 a[16], b[16];
  UNROLL for (int at = 0; at < 16; at += 2) {
    a[at] = _mm512_unpacklo_ps((__m512)rows[at], (__m512)rows[at + 1]);
    a[at + 1] = _mm512_unpackhi_ps((__m512)rows[at], (__m512)rows[at + 1]);
  }
  UNROLL for (int at = 0; at < 16; at += 4) {
    UNROLL for (int half = 0; half < 2; half++) {
      const __m512d first = (__m512d)a[at + half], second = (__m512d)a[at + half + 2];
      b[at + 2 * half] = (__m512)_mm512_unpacklo_pd(first, second);
      b[at + 2 * half + 1] = (__m512)_mm512_unpackhi_pd(first, second);
    }
  }
  // b[4 i + j], quarter q: step 4 q + j of lanes 4 i .. 4 i + 3.
  UNROLL for (int j = 0; j < 4; j++) {
    const __m512 low = _mm512_shuffle_f32x4(b[j], b[4 + j], 0x88), high = _mm512_shuffle_f32x4(b[j], b[4 + j], 0xdd);
    const __m512 low2 = _mm512_shuffle_f32x4(b[8 + j], b[12 + j], 0x88);
    const __m512 high2 = _mm512_shuffle_f32x4(b[8 + j], b[12 + j], 0xdd);
    _mm512_storeu_ps(packed + (0 + j) * PANEL, _mm512_shuffle_f32x4(low, low2, 0x88));
    _mm512_storeu_ps(packed + (4 + j) * PANEL, _mm512_shuffle_f32x4(high, high2, 0x88));
    _mm512_storeu_ps(packed + (8 + j) * PANEL, _mm512_shuffle_f32x4(low, low2, 0xdd));
    _mm512_storeu_ps(packed + (12 + j) * PANEL, _mm512_shuffle_f32x4(high, high2, 0xdd));
  }
}
#endif

// Lays a panel out [steps, PANEL]; what is past the last column in its vector is zero. `next` is the panel after it.
static void pack(const Product *product, long column, long columns, long first_step, long steps, const char *next,
                 bool ahead, float *packed) {
#if LANES != 16
  (void)next, (void)ahead;
#endif
  const Kind kind = product->kind;
  const int whole = (int)(columns / LANES);
  long done = 0;  // steps whose whole vectors are laid out
  if (!product->tied) {
    const long stride = product->columns * number_bytes(kind) * (kind == PAIRS ? 2 : 1);
    const char *kernel = product->kernel + first_step * stride + column * number_bytes(kind);
    for (; done < steps; done++, kernel += stride)
      for (int vector = 0; vector < whole; vector++) {
        float *to = packed + done * PANEL + vector * LANES;
        if (kind == FLOAT32) store(to, load_step(FLOAT32, kernel, stride, vector));
        else if (kind == BFLOAT16) store(to, load_step(BFLOAT16, kernel, stride, vector));
        else store(to, load_step(PAIRS, kernel, stride, vector));
      }
  }
#if LANES == 16
  if (product->tied) {
    const long row_bytes = product->depth * number_bytes(kind), step_bytes = kind == BFLOAT16 ? 2 : 4;
    const char *kernel = product->kernel + column * row_bytes + first_step * step_bytes;
    for (; done + 16 <= steps; done += 16)
      for (int vector = 0; vector < whole; vector++) {
        Floats rows[16];
        UNROLL for (int lane = 0; lane < 16; lane++) {
          const char *from = kernel + (vector * 16 + lane) * row_bytes + done * step_bytes;
          if (ahead) __builtin_prefetch(next + (from - kernel), 0, 2);
          rows[lane] = kind == BFLOAT16 ? load_bfloat16((const uint16_t *)from) : load((const float *)from);
        }
        transpose_words(rows, packed + done * PANEL + vector * 16);
      }
  }
#endif
  // What is left: a broken vector of each step, and the last steps.
  const long width = (columns + LANES - 1) / LANES * LANES;
  for (long step = 0; step < steps; step++)
    for (long at = step < done ? whole * LANES : 0; at < width; at++) {
      const uint32_t word = at < columns ? read_word(product, first_step + step, column + at) : 0;
      memcpy(packed + step * PANEL + at, &word, 4);
    }
}

// Where the numbers of a panel begin that are packed from `first_step` on.
INLINE const char *panel_start(const Product *product, long column, long first_step) {
  const long numbers = first_step * (product->kind == PAIRS ? 2 : 1);
  const long at = product->tied ? column * product->depth + numbers : numbers * product->columns + column;
  return product->kernel + at * number_bytes(product->kind);
}

// A panel of what is left of a unit's columns, which end before `end`.
static void multiply_packed_panel(const Product *product, long column, long end, const int32_t *rows, int row_count,
                                  long next_column, float *packed) {
  const long columns = end - column < PANEL ? end - column : PANEL;
  const long all_steps = product->kind == PAIRS ? product->depth / 2 : product->depth;
  const long x_stride = product->depth * (product->kind == PAIRS ? 2 : 4);
  const int vectors = (int)((columns + LANES - 1) / LANES);
  const bool broken = columns % LANES;
  float partial[ROWS][PANEL];
  for (long first = 0; first < all_steps; first += DEPTH) {
    const long steps = all_steps - first < DEPTH ? all_steps - first : DEPTH;
    const bool last = first + DEPTH >= all_steps;
    const char *next = panel_start(product, last ? next_column : column, last ? 0 : first + DEPTH);
    pack(product, column, columns, first, steps, next, row_count <= FEW_ROWS, packed);
    // Rows in tiles of about the same size.
    const int tiles = (row_count + ROWS - 1) / ROWS;
    for (int at = 0, index = 0; index < tiles; index++) {
      const int count = (row_count - at) / (tiles - index);
      Tile tile = {.kernel = (const char *)packed, .stride = 4 * PANEL, .steps = steps, .more = first > 0};
      tile.next = index ? tile.kernel : next;
      const long panel_bytes = PANEL * (product->kind == BFLOAT16 ? 2 : 4);
      if (index) tile.next_stride = 0;
      else if (product->tied) tile.next_stride = panel_bytes;
      else tile.next_stride = product->columns * (product->kind == BFLOAT16 ? 2 : 4);
      if (!index && product->kind == FLOAT32) tile.next_second = 128;
      if (!index && product->kind == PAIRS) tile.next_second = product->tied ? 128 : product->columns * 2;
      for (int row = 0; row < count; row++) {
        const long from = rows[at + row];
        float *out = product->out + from * product->columns + column;
        tile.x[row] = product->x + from * x_stride + 4 * first;
        tile.out[row] = broken ? partial[row] : out;
        if (broken && tile.more) memcpy(partial[row], out, columns * 4);
      }
#if HAS_PAIRS
      if (product->kind == PAIRS) multiply_packed_pairs(&tile, count, vectors);
      else
#endif
        multiply_packed_float32(&tile, count, vectors);
      if (broken)
        for (int row = 0; row < count; row++)
          memcpy(product->out + (long)rows[at + row] * product->columns + column, partial[row], columns * 4);
      at += count;
    }
  }
}

static void multiply_direct_panel(const Product *product, long column, const int32_t *rows, int row_count, int vectors) {
  const bool pairs = product->kind == PAIRS;
  Tile tile = {.kernel = panel_start(product, column, 0),
               .stride = product->columns * number_bytes(product->kind) * (pairs ? 2 : 1),
               .steps = pairs ? product->depth / 2 : product->depth};
  const int tiles = (row_count + ROWS - 1) / ROWS;
  for (int at = 0, index = 0; index < tiles; index++) {
    const int count = (row_count - at) / (tiles - index);
    for (int row = 0; row < count; row++) {
      tile.x[row] = product->x + rows[at + row] * product->depth * (pairs ? 2 : 4);
      tile.out[row] = product->out + rows[at + row] * product->columns + column;
    }
    at += count;
#if HAS_PAIRS
    if (pairs) {
      multiply_pairs(&tile, count, vectors);
      continue;
    }
#endif
    if (product->kind == BFLOAT16) multiply_bfloat16(&tile, count, vectors);
    else multiply_float32(&tile, count, vectors);
  }
}

void find_unit(const Product *product, int unit, long *first, long *end, int *row, int *count) {
  *first = (long)(unit / product->row_units) * product->unit_columns;
  *end = *first + product->unit_columns < product->columns ? *first + product->unit_columns : product->columns;
  *row = unit % product->row_units * product->unit_rows;
  const int left = product->active_rows - *row;
  *count = left < product->unit_rows ? left : product->unit_rows;
}

void multiply_unit(const void *data, int unit) {
  const Product *product = data;
  long first, end;
  int row, count;
  find_unit(product, unit, &first, &end, &row, &count);
  if (product->active && unit % product->row_units == 0)
    for (int other = 0; other < product->all_rows; other++)
      if (!product->active[other]) memset(product->out + other * product->columns + first, 0, (end - first) * 4);
  if (count <= 0) return;
  const int32_t *rows = product->rows + row;
  const bool cached = product->depth * PANEL * number_bytes(product->kind) <= CACHED_BYTES;
  const int direct_rows = product->kind == BFLOAT16 ? DIRECT_ROWS / 2 : DIRECT_ROWS;
  const bool direct = !product->tied && count <= (cached ? direct_rows : ROWS);
  for (long column = first; column < end;) {
    const long left = (end - column) / LANES;
    if (direct && left) {
      const int vectors = left >= product->vectors ? product->vectors : left >= VECTORS ? VECTORS : (int)left;
      multiply_direct_panel(product, column, rows, count, vectors);
      column += vectors * LANES;
      continue;
    }
    float *packed = scratch(UNIT_SCRATCH, DEPTH * PANEL * sizeof(float));
    // Units are taken in turn by all threads, more or less.
    long next = column + PANEL < end ? column + PANEL : first + (long)product->unit_columns * product->threads;
    if (next >= product->columns) next = column;
    if (packed) multiply_packed_panel(product, column, end, rows, count, next, packed);
    column += PANEL;
  }
}

int divide_product(Product *product, int threads) {
  product->threads = threads;
  // Wide panels, if they leave enough units for every thread, and all of them the same to do.
  const int rows = product->active_rows;
  product->vectors = VECTORS;
#if MOST_VECTORS == 12
  const int widths[] = {12, 8, 6, 4}, all = (int)(product->columns / LANES);
  for (int at = 0; at < 4; at++) {
    const int width = widths[at], units = (all + width - 1) / width;
    if (width > (rows <= 2 ? 12 : 6) || rows > 4) continue;
    if (product->tied && width % VECTORS) continue;  // is packed, in panels
    if (units % threads == 0 && (all % width == 0 || units >= 4 * threads)) {
      product->vectors = width;
      break;
    }
  }
#endif
  // A unit's row has whole lines of the cache, so that no two threads read one.
  product->unit_columns = product->vectors * LANES;
  while (product->unit_columns * number_bytes(product->kind) % 64) product->unit_columns *= 2;
  const int column_units = (product->columns + product->unit_columns - 1) / product->unit_columns;
  product->row_units = 1;
  product->unit_rows = rows;
  while (column_units * product->row_units < 2 * threads && product->unit_rows > 4 * ROWS) {
    product->row_units *= 2;
    product->unit_rows = (rows + product->row_units - 1) / product->row_units;
  }
  return column_units * product->row_units;
}

// Arguments: x [T, in], kernels [L, in, out] or [out, in], layer [], rows [1 + T]. Result: [T, out].
static XLA_FFI_Error *multiply(XLA_FFI_CallFrame *frame, bool tied) {
  if (answer_metadata(frame)) return NULL;
  const XLA_FFI_Buffer *x = argument(frame, 0), *kernels = argument(frame, 1), *out = result(frame, 0);
  const int32_t *rows = argument(frame, 3)->data;
  const int axis = kernels->rank - 2;
  Product product = {.x = x->data,
                     .out = out->data,
                     .rows = rows + 1,
                     .active_rows = rows[0],
                     .all_rows = x->dims[0],
                     .depth = kernels->dims[axis + tied],
                     .columns = kernels->dims[axis + !tied],
                     .tied = tied};
  const bool half = kernels->dtype == XLA_FFI_DataType_BF16;
  product.kind = half ? x->dtype == XLA_FFI_DataType_BF16 ? PAIRS : BFLOAT16 : FLOAT32;
#if !HAS_PAIRS
  if (product.kind == PAIRS) return fail(frame, "This processor does not multiply pairs of bfloat16.");
#endif
  if (product.kind == PAIRS && product.depth % 2) return fail(frame, "An odd number is no pairs.");
  const int64_t layer = tied ? 0 : *(const int32_t *)argument(frame, 2)->data;
  if (!tied && (layer < 0 || layer >= kernels->dims[0])) return fail(frame, "There is no such layer.");
  if (rows[0] < 0 || rows[0] > product.all_rows) return fail(frame, "rows[0] is not a number of rows.");
  product.kernel = (const char *)kernels->data + layer * product.depth * product.columns * number_bytes(product.kind);
  bool *active = calloc(product.all_rows + 1, sizeof(bool));
  if (!active) return fail(frame, NO_MEMORY);
  for (int at = 0; at < rows[0]; at++) {
    if (rows[1 + at] < 0 || rows[1 + at] >= product.all_rows) {
      free(active);
      return fail(frame, "rows has an index that is no row.");
    }
    active[rows[1 + at]] = true;
  }
  product.active = active;
  const bool shared = (double)product.depth * product.columns * (rows[0] + 1) > WORTH_SHARING;
  const int threads = shared ? count_threads(frame) : 1;
  const int units = divide_product(&product, threads);
  XLA_FFI_Error *error = run_parallel(frame, threads, units, multiply_unit, &product);
  free(active);
  return error;
}

XLA_FFI_Error *gymllm_linear(XLA_FFI_CallFrame *frame) { return multiply(frame, false); }

XLA_FFI_Error *gymllm_logits_tied(XLA_FFI_CallFrame *frame) { return multiply(frame, true); }

// Whether x may be bfloat16 where the kernels are.
int gymllm_has_pairs(void) {
#if HAS_PAIRS
  return 1;
#else
  return 0;
#endif
}
