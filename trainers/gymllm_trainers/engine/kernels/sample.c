// Draws tokens from logits by their temperatures: what sampling.sample_plain does, in three passes over a row.
//
// The same numbers decide: integer weights, summed in columns, and one uniform number a row; see sampling.py. A row
// depends on no other.

#include "functions.h"
#include "linear.h"

#include <math.h>

// Tokens of a column, and the weight of a certain token: sampling.DEPTH and _ONE.
#define DEPTH 64
#define ONE 1073741824.0f

typedef struct {
  const float *logits;  // [F, V]
  const float *temperature, *uniform;
  long rows, words;  // F, V
  float softcap;            // 0: none
  int32_t *packed;          // [4, F]: token, log-probability, that at temperature 1, whether nothing could be drawn
  int32_t *previous;        // [S]; or NULL
} Draw;

INLINE Ints is_nan(Floats x) { return (Ints)(x != x); }

INLINE bool any(Ints mask) {
  Ints one = mask;
  int32_t found = 0;
  for (int lane = 0; lane < LANES; lane++) found |= one[lane];
  return found != 0;
}

// Words past the end read as what none is drawn from.
INLINE Floats load_tail(const float *from, long left) {
  Floats numbers = splat(-INFINITY);
  memcpy(&numbers, from, left * 4);
  return numbers;
}

INLINE Floats load_words(const float *from, long left) { return left >= LANES ? load(from) : load_tail(from, left); }

// e^((x - top) * factor) of a row, kept in `powers`, and their sum in an order of its own.
static float exponentials(const float *logits, long words, float top, float divisor, float *powers) {
  Floats sums[4] = {splat(0), splat(0), splat(0), splat(0)};
  long at = 0;
  for (int next = 0; at < words; at += LANES, next = (next + 1) % 4) {
    const Floats below = (load_words(logits + at, words - at) - splat(top)) / splat(divisor);
    // Below what has a float32 it is nothing, and so is what lies past the end.
    const Floats power = choose((Ints)(below > splat(-87.0f)), exponential(below), splat(0));
    sums[next] += power;
    if (words - at >= LANES) store(powers + at, power);
    else memcpy(powers + at, &power, (words - at) * 4);
  }
  return add_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

INLINE int32_t weigh_one(float power, float sum) { return (int32_t)rintf(power / sum * ONE); }

INLINE Ints weigh(Floats power, float sum) {
  const Floats share = power / splat(sum) * splat(ONE);
#if LANES == 16
  return (Ints)_mm512_cvtps_epi32((__m512)share);
#else
  Ints out;
  for (int lane = 0; lane < LANES; lane++) out[lane] = (int32_t)rintf(share[lane]);
  return out;
#endif
}

// A token by inverse transform. `columns` has room for a number each.
static long draw_token(const float *powers, long words, float sum, float uniform, int32_t *columns) {
  const long width = (words + DEPTH - 1) / DEPTH;
  memset(columns, 0, width * sizeof *columns);
  for (long start = 0; start < words; start += width) {
    const long here = words - start < width ? words - start : width;
    long at = 0;
    for (; at + LANES <= here; at += LANES) {
      Ints total;
      memcpy(&total, columns + at, sizeof total);
      total += weigh(load(powers + start + at), sum);
      memcpy(columns + at, &total, sizeof total);
    }
    for (; at < here; at++) columns[at] += weigh_one(powers[start + at], sum);
  }
  int32_t total = 0;
  for (long at = 0; at < width; at++) total += columns[at];
  int32_t target = (int32_t)(uniform * (float)total);
  if (target > total - 1) target = total - 1;
  long column = 0;
  int32_t before = 0;
  while (column + 1 < width && before + columns[column] <= target) before += columns[column++];
  long token = column;
  for (; token < words; token += width) {
    before += weigh_one(powers[token], sum);
    if (before > target) return token;
  }
  return column;
}

static void draw_row(const void *data, int row) {
  const Draw *draw = data;
  const long words = draw->words;
  const float *logits = draw->logits + row * words;
  int32_t *packed = draw->packed + row;
  float *powers = scratch(UNIT_SCRATCH, (2 * words + (words + DEPTH - 1) / DEPTH + 2 * LANES) * 4);
  float *capped = powers + words + LANES;
  Floats highest = splat(-INFINITY);
  Ints strange = (Ints)splat(0);
  for (long at = 0; at < words; at += LANES) {
    Floats part = load_words(logits + at, words - at);
    if (draw->softcap > 0 && powers) {
      part = splat(draw->softcap) * hyperbolic_tangent(part / splat(draw->softcap));
      memcpy(capped + at, &part, 4 * (words - at < LANES ? words - at : LANES));
    }
    strange |= is_nan(part);
    highest = larger(highest, part);
  }
  if (draw->softcap > 0) logits = capped;
  float top = -INFINITY;
  for (int lane = 0; lane < LANES; lane++) top = highest[lane] > top ? highest[lane] : top;
  long token = 0;
  float logprob = 0, base = 0;
  const bool bad = !powers || any(strange) || !isfinite(top);
  if (!bad) {
    const float temperature = draw->temperature[row];
    const float base_sum = exponentials(logits, words, top, 1, powers);
    if (temperature == 0) {
      while (logits[token] != top) token++;
    } else {
      // As sampling._scaled has it.
      const float divisor = temperature < 1e-30f ? 1e-30f : temperature > 1e37f ? 1e37f : temperature;
      const float sum = divisor == 1 ? base_sum : exponentials(logits, words, top, divisor, powers);
      token = draw_token(powers, words, sum, draw->uniform[row], (int32_t *)(capped + words));
      logprob = (logits[token] - top) / divisor - logf(sum);
    }
    base = logits[token] - top - logf(base_sum);
    if (temperature == 0) logprob = base;
  }
  packed[0] = (int32_t)token;
  memcpy(packed + draw->rows, &logprob, 4);
  memcpy(packed + 2 * draw->rows, &base, 4);
  packed[3 * draw->rows] = bad;
  if (draw->previous) draw->previous[row] = (int32_t)token;
}

typedef struct {
  Product product;
  Draw draw;
} Sample;

static void sample_phase(const void *data, int phase, int unit) {
  const Sample *sample = data;
  if (phase == 0) multiply_unit(&sample->product, unit);
  else draw_row(&sample->draw, unit);
}

// Arguments: hidden [S, D], head [D, V] or [V, D], count [], temperature [F], uniform [F]. Results: [4, F], previous
// [S]. Rows from `count` on are not sampled and come out zero. Attributes: tied, softcap.
XLA_FFI_Error *gymllm_sample(XLA_FFI_CallFrame *frame) {
  if (answer_metadata(frame)) return NULL;
  const XLA_FFI_Buffer *hidden = argument(frame, 0), *head = argument(frame, 1), *packed = result(frame, 0);
  const bool tied = get_integer(frame, "tied"), half = head->dtype == XLA_FFI_DataType_BF16;
  const long rows = packed->dims[1], slots = hidden->dims[0], words = head->dims[!tied];
  const int32_t count = *(const int32_t *)argument(frame, 2)->data;
  if (count < 0 || count > rows || rows > slots) return fail(frame, "count is not a number of rows.");
  memset(packed->data, 0, 4 * rows * sizeof(int32_t));
  memset(result(frame, 1)->data, 0, slots * sizeof(int32_t));
  if (!count) return NULL;
  char *memory = scratch(CALL_SCRATCH, rows * words * sizeof(float) + rows * sizeof(int32_t));
  if (!memory) return fail(frame, NO_MEMORY);
  int32_t *all = (int32_t *)(memory + rows * words * sizeof(float));
  for (int row = 0; row < count; row++) all[row] = row;
  Sample sample = {.product = {.x = hidden->data,
                               .kernel = head->data,
                               .out = (float *)memory,
                               .rows = all,
                               .active_rows = count,
                               .depth = hidden->dims[1],
                               .columns = words,
                               .tied = tied,
                               .kind = half ? hidden->dtype == XLA_FFI_DataType_BF16 ? PAIRS : BFLOAT16 : FLOAT32},
                   .draw = {.logits = (float *)memory,
                            .temperature = argument(frame, 3)->data,
                            .uniform = argument(frame, 4)->data,
                            .rows = rows,
                            .words = words,
                            .softcap = get_float(frame, "softcap"),
                            .packed = packed->data,
                            .previous = result(frame, 1)->data}};
#if !HAS_PAIRS
  if (sample.product.kind == PAIRS) return fail(frame, "This processor does not multiply pairs of bfloat16.");
#endif
  if (sample.product.kind == PAIRS && sample.product.depth % 2) return fail(frame, "An odd number is no pairs.");
  const int threads = (double)sample.product.depth * words * count > WORTH_SHARING ? count_threads(frame) : 1;
  const int units[2] = {divide_product(&sample.product, threads), count};
  return run_phases(frame, threads, 2, units, sample_phase, &sample);
}

// Arguments: logits [F, V], temperature [F], uniform [F]. Attribute: softcap. Result: [4, F].
XLA_FFI_Error *gymllm_draw(XLA_FFI_CallFrame *frame) {
  if (answer_metadata(frame)) return NULL;
  const XLA_FFI_Buffer *logits = argument(frame, 0), *packed = result(frame, 0);
  const Draw draw = {.logits = logits->data,
                     .temperature = argument(frame, 1)->data,
                     .uniform = argument(frame, 2)->data,
                     .rows = packed->dims[1],
                     .words = logits->dims[1],
                     .softcap = get_float(frame, "softcap"),
                     .packed = packed->data};
  const int threads = draw.rows * draw.words > WORTH_SHARING ? count_threads(frame) : 1;
  return run_parallel(frame, threads, (int)draw.rows, draw_row, &draw);
}
