// Every layer of a dense decoder in one call, for the rows of an engine's step.
//
// XLA takes five to ten microseconds to get from one of its operations to the next, and a sleeping thread longer to
// wake; a layer is forty operations, so a small model's step would be mostly that. Here the threads that come stay
// for all layers, and a layer is eight phases (norm; query, key, value; heads; attention; output; norm; gate, up and
// activation; down).
//
// Numbers are rounded where the decoder rounds them (models/decoder.py): with bfloat16, after each product, norm,
// rotation and activation. A token's depend on no other row's: each is summed in an order of its own.

#include "attention.h"
#include "functions.h"
#include "linear.h"

// Arguments in this order; weights that a model lacks have no elements.
enum {
  X,          // [T, D]
  COS,        // [T, H / 2] float32; of layers that slide, LOCAL_*
  SIN,
  LOCAL_COS,
  LOCAL_SIN,
  KEYS,       // [L, P, K, S, H]
  VALUES,
  SLOTS,      // [T]
  TABLE,      // [F, M]
  START,      // [F]
  COUNT,      // [F]
  ACTIVE,     // [1 + T]: how many tokens, then which
  WINDOWS,    // [L]; 0: none
  SLIDES,     // [L]
  FINAL_NORM, // [D]
  ATTENTION_NORM,
  QUERY,      // [L, D, N * H]
  KEY,
  VALUE,
  QUERY_BIAS,
  KEY_BIAS,
  VALUE_BIAS,
  QUERY_NORM, // [L, H]
  KEY_NORM,
  OUTPUT,
  OUTPUT_BIAS,
  ATTENTION_POST_NORM,
  MLP_NORM,
  GATE,
  UP,
  GATE_BIAS,
  UP_BIAS,
  DOWN,
  DOWN_BIAS,
  MLP_POST_NORM,
  ARGUMENTS
};

typedef enum { HEADS_PHASE = 1, ATTEND_PHASE, OUTPUT_PHASE, MIDDLE_PHASE, GATE_PHASE, DOWN_PHASE, END_PHASE } LayerPhase;
#define LAYER_PHASES 8

typedef struct {
  const void *data;  // NULL: the model has none
  bool half;
  long size;         // of a layer's
} Weights;

typedef struct {
  Product query, key, value, output, gate, up, down;
  int query_units, key_units, decode_units;
  Attention decode, prefill;
} Layer;

typedef struct {
  Weights weights[ARGUMENTS];
  Layer *layers;
  long count, width, heads, groups, size, inner;  // L, D, N, K, H, F
  long page_size;
  const int32_t *rows, *slots;
  int active, unit_rows;
  bool half, half_cache, gelu;
  float eps, offset;
  const float *cos, *sin, *local_cos, *local_sin;
  const int32_t *slides;
  const void *x;
  char *out, *keys, *values;
  long layer_cache_bytes;
  float *residual;  // [T, D]
  char *normed;     // [T, D]: what products take, as is what follows
  float *query, *key, *value;  // [T, heads * H]
  char *rotated, *mixed;       // [T, N * H]
  float *added;                // [T, D]
  float *gate, *up;            // [T, F]
  char *activated;             // [T, F]
} Trunk;

INLINE float rounded(bool half, float number) { return half ? from_bfloat16(to_bfloat16(number)) : number; }

INLINE float weight_at(const Weights *weights, long layer, long at) {
  const long index = layer * weights->size + at;
  return weights->half ? from_bfloat16(((const uint16_t *)weights->data)[index]) : ((const float *)weights->data)[index];
}

INLINE Floats weights_at(const Weights *weights, long layer, long at) {
  const long index = layer * weights->size + at;
  return weights->half ? load_bfloat16((const uint16_t *)weights->data + index)
                       : load((const float *)weights->data + index);
}

INLINE void put(char *to, bool half, long at, Floats numbers) {
  if (half) store_bfloat16((uint16_t *)to + at, numbers);
  else store((float *)to + at, numbers);
}

INLINE void put_one(char *to, bool half, long at, float number) {
  if (half) ((uint16_t *)to)[at] = to_bfloat16(number);
  else ((float *)to)[at] = number;
}

// 1 / rms of a row, summed in LANES columns.
INLINE float inverse_rms(const float *x, long size, float eps) {
  Floats sums = splat(0);
  long at = 0;
  for (; at + LANES <= size; at += LANES) {
    const Floats part = load(x + at);
    sums += part * part;
  }
  float sum = add_lanes(sums);
  for (; at < size; at++) sum += x[at] * x[at];
  return 1 / __builtin_sqrtf(sum / size + eps);
}

// x / rms(x) * (offset + weight), rounded, to a row of products' type.
static void norm_to(const Trunk *trunk, const float *x, const Weights *weights, long layer, char *to) {
  const float scale = inverse_rms(x, trunk->width, trunk->eps);
  long at = 0;
  for (; at + LANES <= trunk->width; at += LANES)
    put(to, trunk->half, at, load(x + at) * scale * (weights_at(weights, layer, at) + trunk->offset));
  for (; at < trunk->width; at++)
    put_one(to, trunk->half, at, x[at] * scale * (weight_at(weights, layer, at) + trunk->offset));
}

// The same in place, in float32.
static void norm_here(const Trunk *trunk, float *x, long size, const Weights *weights, long layer) {
  const float scale = inverse_rms(x, size, trunk->eps);
  for (long at = 0; at < size; at++)
    x[at] = rounded(trunk->half, x[at] * scale * (weight_at(weights, layer, at) + trunk->offset));
}

// A product's sums as the decoder has them: rounded, with the bias added, rounded.
static void finish_sums(const Trunk *trunk, float *sums, long size, const Weights *bias, long layer) {
  long at = 0;
  if (trunk->half)
    for (; at + LANES <= size; at += LANES) store(sums + at, round_bfloat16(load(sums + at)));
  for (; trunk->half && at < size; at++) sums[at] = rounded(true, sums[at]);
  if (bias->data)
    for (at = 0; at < size; at++) sums[at] = rounded(trunk->half, sums[at] + weight_at(bias, layer, at));
}

static void enter_row(const Trunk *trunk, long row) {
  float *residual = trunk->residual + row * trunk->width;
  for (long at = 0; at < trunk->width; at++)
    residual[at] = trunk->half ? from_bfloat16(((const uint16_t *)trunk->x)[row * trunk->width + at])
                               : ((const float *)trunk->x)[row * trunk->width + at];
  norm_to(trunk, residual, &trunk->weights[ATTENTION_NORM], 0, trunk->normed + row * trunk->width * (trunk->half ? 2 : 4));
}

// Adds `added` to the residual stream; then the norm that comes next.
static void add_row(const Trunk *trunk, long layer, long row, const Weights *bias, const Weights *post,
                    const Weights *next, long next_layer, char *to) {
  float *residual = trunk->residual + row * trunk->width, *added = trunk->added + row * trunk->width;
  finish_sums(trunk, added, trunk->width, bias, layer);
  if (post->data) norm_here(trunk, added, trunk->width, post, layer);
  long at = 0;
  for (; at + LANES <= trunk->width; at += LANES) {
    const Floats sum = load(residual + at) + load(added + at);
    store(residual + at, trunk->half ? round_bfloat16(sum) : sum);
  }
  for (; at < trunk->width; at++) residual[at] = rounded(trunk->half, residual[at] + added[at]);
  norm_to(trunk, residual, next, next_layer, to + row * trunk->width * (trunk->half ? 2 : 4));
}

// Norm and rotation of one head, in place.
static void rotate_head(const Trunk *trunk, long layer, float *head, const Weights *norm, const float *cos,
                        const float *sin) {
  if (norm->data) norm_here(trunk, head, trunk->size, norm, layer);
  const long half = trunk->size / 2;
  for (long at = 0; at < half; at++) {
    const float first = head[at], second = head[at + half];
    head[at] = rounded(trunk->half, first * cos[at] - second * sin[at]);
    head[at + half] = rounded(trunk->half, second * cos[at] + first * sin[at]);
  }
}

static void finish_heads(const Trunk *trunk, long layer, long row) {
  const long size = trunk->size, query_size = trunk->heads * size, key_size = trunk->groups * size;
  const bool slides = trunk->slides[layer];
  const float *cos = (slides ? trunk->local_cos : trunk->cos) + row * (size / 2);
  const float *sin = (slides ? trunk->local_sin : trunk->sin) + row * (size / 2);
  float *query = trunk->query + row * query_size, *key = trunk->key + row * key_size;
  float *value = trunk->value + row * key_size;
  finish_sums(trunk, query, query_size, &trunk->weights[QUERY_BIAS], layer);
  finish_sums(trunk, key, key_size, &trunk->weights[KEY_BIAS], layer);
  finish_sums(trunk, value, key_size, &trunk->weights[VALUE_BIAS], layer);
  for (long head = 0; head < trunk->heads; head++)
    rotate_head(trunk, layer, query + head * size, &trunk->weights[QUERY_NORM], cos, sin);
  for (long head = 0; head < trunk->groups; head++)
    rotate_head(trunk, layer, key + head * size, &trunk->weights[KEY_NORM], cos, sin);
  char *rotated = trunk->rotated + row * query_size * (trunk->half ? 2 : 4);
  for (long at = 0; at < query_size; at++) put_one(rotated, trunk->half, at, query[at]);
  const long slot = trunk->slots[row], before = layer * trunk->layer_cache_bytes;
  write_slot(trunk->keys + before, trunk->half_cache, trunk->groups, trunk->page_size, size, slot, key, false);
  write_slot(trunk->values + before, trunk->half_cache, trunk->groups, trunk->page_size, size, slot, value, false);
}

// Gate and up of some columns, and the activation of what they gave.
static void gate_unit(const Trunk *trunk, long number, int unit) {
  const Layer *layer = &trunk->layers[number];
  multiply_unit(&layer->gate, unit);
  multiply_unit(&layer->up, unit);
  long first, end;
  int row, count;
  find_unit(&layer->gate, unit, &first, &end, &row, &count);
  const Weights *gate_bias = &trunk->weights[GATE_BIAS], *up_bias = &trunk->weights[UP_BIAS];
  for (int index = row; index < row + count; index++) {
    const long start = trunk->rows[index] * trunk->inner;
    char *to = trunk->activated + start * (trunk->half ? 2 : 4);
    for (long at = first; at < end; at += LANES) {
      const long left = end - at;
      Floats gate = splat(0), up = splat(0);
      if (left >= LANES) {
        gate = load(trunk->gate + start + at);
        up = load(trunk->up + start + at);
      } else {
        memcpy(&gate, trunk->gate + start + at, left * 4);
        memcpy(&up, trunk->up + start + at, left * 4);
      }
      if (trunk->half) {
        gate = round_bfloat16(gate);
        up = round_bfloat16(up);
      }
      if (gate_bias->data)
        for (int lane = 0; lane < LANES && lane < left; lane++) {
          gate[lane] = rounded(trunk->half, gate[lane] + weight_at(gate_bias, number, at + lane));
          up[lane] = rounded(trunk->half, up[lane] + weight_at(up_bias, number, at + lane));
        }
      gate = trunk->gelu ? gelu(gate) : silu(gate);
      if (trunk->half) gate = round_bfloat16(gate);
      const Floats both = gate * up;
      if (left >= LANES) put(to, trunk->half, at, both);
      else
        for (int lane = 0; lane < left; lane++) put_one(to, trunk->half, at + lane, both[lane]);
    }
  }
}

static void work_phase(const void *data, int phase, int unit) {
  const Trunk *trunk = data;
  const int kind = phase ? (phase - 1) % LAYER_PHASES : -1;
  const long number = phase ? (phase - 1) / LAYER_PHASES : 0;
  const Layer *layer = &trunk->layers[number];
  switch (kind) {
    case 0:
      if (unit < layer->query_units) return multiply_unit(&layer->query, unit);
      unit -= layer->query_units;
      if (unit < layer->key_units) return multiply_unit(&layer->key, unit);
      return multiply_unit(&layer->value, unit - layer->key_units);
    case ATTEND_PHASE:
      if (unit < layer->decode_units) return attend_unit(&layer->decode, unit);
      return attend_unit(&layer->prefill, unit - layer->decode_units);
    case OUTPUT_PHASE: return multiply_unit(&layer->output, unit);
    case GATE_PHASE: return gate_unit(trunk, number, unit);
    case DOWN_PHASE: return multiply_unit(&layer->down, unit);
  }
  const int last = (unit + 1) * trunk->unit_rows < trunk->active ? (unit + 1) * trunk->unit_rows : trunk->active;
  for (int index = unit * trunk->unit_rows; index < last; index++) {
    const long row = trunk->rows[index];
    const Weights *weights = trunk->weights;
    if (kind < 0) enter_row(trunk, row);
    else if (kind == HEADS_PHASE) finish_heads(trunk, number, row);
    else if (kind == MIDDLE_PHASE)
      add_row(trunk, number, row, &weights[OUTPUT_BIAS], &weights[ATTENTION_POST_NORM], &weights[MLP_NORM], number,
              trunk->normed);
    else if (number + 1 < trunk->count)
      add_row(trunk, number, row, &weights[DOWN_BIAS], &weights[MLP_POST_NORM], &weights[ATTENTION_NORM], number + 1,
              trunk->normed);
    else
      add_row(trunk, number, row, &weights[DOWN_BIAS], &weights[MLP_POST_NORM], &weights[FINAL_NORM], 0, trunk->out);
  }
}

// Parts of one piece of memory, each on lines of its own; first only counted.
static char *take(char *memory, size_t *used, size_t bytes) {
  char *part = memory ? memory + *used : NULL;
  *used += (bytes + 63) / 64 * 64;
  return part;
}

static size_t place_buffers(Trunk *trunk, long tokens, char *memory) {
  const long width = trunk->half ? 2 : 4, queries = trunk->heads * trunk->size, keys = trunk->groups * trunk->size;
  size_t used = 0;
  trunk->layers = (Layer *)take(memory, &used, trunk->count * sizeof(Layer));
  trunk->residual = (float *)take(memory, &used, tokens * trunk->width * 4);
  trunk->normed = take(memory, &used, tokens * trunk->width * width);
  trunk->query = (float *)take(memory, &used, tokens * queries * 4);
  trunk->key = (float *)take(memory, &used, tokens * keys * 4);
  trunk->value = (float *)take(memory, &used, tokens * keys * 4);
  trunk->rotated = take(memory, &used, tokens * queries * width);
  trunk->mixed = take(memory, &used, tokens * queries * width);
  trunk->added = (float *)take(memory, &used, tokens * trunk->width * 4);
  trunk->gate = (float *)take(memory, &used, tokens * trunk->inner * 4);
  trunk->up = (float *)take(memory, &used, tokens * trunk->inner * 4);
  trunk->activated = take(memory, &used, tokens * trunk->inner * width);
  return used;
}

static Product make_product(const Trunk *trunk, long layer, int which, long depth, long columns, const void *x,
                            float *out) {
  const long bytes = depth * columns * (trunk->half ? 2 : 4);
  return (Product){.x = x,
                   .kernel = (const char *)trunk->weights[which].data + layer * bytes,
                   .out = out,
                   .rows = trunk->rows,
                   .active_rows = trunk->active,
                   .depth = depth,
                   .columns = columns,
                   .kind = trunk->half ? PAIRS : FLOAT32};
}

// What is wrong with the call; NULL: nothing.
static const char *check(XLA_FFI_CallFrame *frame) {
  const XLA_FFI_Buffer *x = argument(frame, X), *keys = argument(frame, KEYS), *active = argument(frame, ACTIVE);
  if (x->dtype == XLA_FFI_DataType_BF16) {
#if !HAS_PAIRS
    return "This processor does not multiply pairs of bfloat16.";
#endif
  }
  for (int which = QUERY; which <= DOWN; which++) {
    const XLA_FFI_Buffer *kernel = argument(frame, which);
    if (kernel->rank != 3) continue;
    if (kernel->dtype != x->dtype) return "Kernels are of another type than x.";
    if (x->dtype == XLA_FFI_DataType_BF16 && kernel->dims[1] % 2) return "An odd number is no pairs.";
  }
  const int32_t *rows = active->data, *slots = argument(frame, SLOTS)->data;
  if (rows[0] < 0 || rows[0] > x->dims[0]) return "active[0] is not a number of rows.";
  const int64_t slot_count = keys->dims[1] * keys->dims[3];
  for (int at = 0; at < rows[0]; at++) {
    const int32_t row = rows[1 + at];
    if (row < 0 || row >= x->dims[0]) return "active has an index that is no row.";
    if (slots[row] < 0 || slots[row] >= slot_count) return "A slot is not in the cache.";
  }
  return NULL;
}

// Results: final hidden states [T, D] of the active tokens, 0 for others; keys and values, in place. Attributes: rows
// (R of the T tokens are decode rows, one of a lane each), block (tokens of each further lane), heads, eps, offset,
// scale, softcap (0: none), gelu.
XLA_FFI_Error *gymllm_trunk(XLA_FFI_CallFrame *frame) {
  if (answer_metadata(frame)) return NULL;
  const char *wrong = check(frame);
  if (wrong) return fail(frame, wrong);
  const XLA_FFI_Buffer *x = argument(frame, X), *keys = argument(frame, KEYS), *table = argument(frame, TABLE);
  const long tokens = x->dims[0], lanes = table->dims[0];
  const long decode_rows = get_integer(frame, "rows"), block = get_integer(frame, "block");
  Trunk trunk = {.count = keys->dims[0],
                 .width = x->dims[1],
                 .heads = get_integer(frame, "heads"),
                 .groups = keys->dims[2],
                 .size = keys->dims[4],
                 .inner = argument(frame, GATE)->dims[2],
                 .page_size = keys->dims[3],
                 .rows = (const int32_t *)argument(frame, ACTIVE)->data + 1,
                 .active = *(const int32_t *)argument(frame, ACTIVE)->data,
                 .slots = argument(frame, SLOTS)->data,
                 .half = x->dtype == XLA_FFI_DataType_BF16,
                 .half_cache = keys->dtype == XLA_FFI_DataType_BF16,
                 .gelu = get_integer(frame, "gelu"),
                 .eps = get_float(frame, "eps"),
                 .offset = get_float(frame, "offset"),
                 .cos = argument(frame, COS)->data,
                 .sin = argument(frame, SIN)->data,
                 .local_cos = argument(frame, LOCAL_COS)->data,
                 .local_sin = argument(frame, LOCAL_SIN)->data,
                 .slides = argument(frame, SLIDES)->data,
                 .x = x->data,
                 .out = result(frame, 0)->data,
                 .keys = result(frame, 1)->data,
                 .values = result(frame, 2)->data};
  const long page_bytes = trunk.groups * trunk.page_size * trunk.size * (trunk.half_cache ? 2 : 4);
  trunk.layer_cache_bytes = keys->dims[1] * page_bytes;
  for (int which = 0; which < 2; which++) {
    const void *old = argument(frame, KEYS + which)->data;
    void *cache = result(frame, 1 + which)->data;
    if (old != cache) memcpy(cache, old, trunk.count * trunk.layer_cache_bytes);
  }
  for (int which = FINAL_NORM; which < ARGUMENTS; which++) {
    const XLA_FFI_Buffer *buffer = argument(frame, which);
    if (buffer->dims[0] == 0) continue;
    trunk.weights[which] = (Weights){.data = buffer->data,
                                     .half = buffer->dtype == XLA_FFI_DataType_BF16,
                                     .size = buffer->dims[buffer->rank - 1]};
  }
  memset(trunk.out, 0, tokens * trunk.width * (trunk.half ? 2 : 4));
  if (!trunk.active) return NULL;

  char *memory = scratch(CALL_SCRATCH, place_buffers(&trunk, tokens, NULL));
  if (!memory) return fail(frame, NO_MEMORY);
  place_buffers(&trunk, tokens, memory);
  const long queries = trunk.heads * trunk.size, group_keys = trunk.groups * trunk.size;
  const double operations = (double)trunk.width * (2 * queries + 2 * group_keys + 3 * trunk.inner) * trunk.active;
  const int threads = operations > WORTH_SHARING ? count_threads(frame) : 1;
  trunk.unit_rows = (trunk.active + 2 * threads - 1) / (2 * threads);
  const int row_units = (trunk.active + trunk.unit_rows - 1) / trunk.unit_rows;
  const Attention attention = {.query = trunk.rotated,
                               .out = trunk.mixed,
                               .table = table->data,
                               .start = argument(frame, START)->data,
                               .count = argument(frame, COUNT)->data,
                               .rows = decode_rows,
                               .queries = 1,
                               .heads = trunk.heads,
                               .size = trunk.size,
                               .groups = trunk.groups,
                               .pages = keys->dims[1],
                               .page_size = trunk.page_size,
                               .table_pages = table->dims[1],
                               .half_query = trunk.half,
                               .half_cache = trunk.half_cache,
                               .scale = get_float(frame, "scale"),
                               .softcap = get_float(frame, "softcap")};
  int *units = malloc((1 + trunk.count * LAYER_PHASES) * sizeof *units);
  if (!units) return fail(frame, NO_MEMORY);
  units[0] = row_units;
  for (long number = 0; number < trunk.count; number++) {
    Layer *layer = &trunk.layers[number];
    int *own = units + 1 + number * LAYER_PHASES;
    layer->query = make_product(&trunk, number, QUERY, trunk.width, queries, trunk.normed, trunk.query);
    layer->key = make_product(&trunk, number, KEY, trunk.width, group_keys, trunk.normed, trunk.key);
    layer->value = make_product(&trunk, number, VALUE, trunk.width, group_keys, trunk.normed, trunk.value);
    layer->output = make_product(&trunk, number, OUTPUT, queries, trunk.width, trunk.mixed, trunk.added);
    layer->gate = make_product(&trunk, number, GATE, trunk.width, trunk.inner, trunk.normed, trunk.gate);
    layer->up = make_product(&trunk, number, UP, trunk.width, trunk.inner, trunk.normed, trunk.up);
    layer->down = make_product(&trunk, number, DOWN, trunk.inner, trunk.width, trunk.activated, trunk.added);
    layer->decode = attention;
    layer->decode.window = ((const int32_t *)argument(frame, WINDOWS)->data)[number];
    layer->decode.key = trunk.keys + number * trunk.layer_cache_bytes;
    layer->decode.value = trunk.values + number * trunk.layer_cache_bytes;
    layer->prefill = layer->decode;
    layer->prefill.query = trunk.rotated + decode_rows * queries * (trunk.half ? 2 : 4);
    layer->prefill.out = trunk.mixed + decode_rows * queries * (trunk.half ? 2 : 4);
    layer->prefill.table += decode_rows * attention.table_pages;
    layer->prefill.start += decode_rows;
    layer->prefill.count += decode_rows;
    layer->prefill.rows = lanes - decode_rows;
    layer->prefill.queries = block;
    double work = 0;
    layer->decode_units = divide_attention(&layer->decode, &work);
    const int prefill_units = lanes > decode_rows ? divide_attention(&layer->prefill, &work) : 0;
    if (layer->decode_units < 0 || prefill_units < 0) {
      free(units);
      return fail(frame, "A row's queries are not within its page table.");
    }
    layer->query_units = divide_product(&layer->query, threads);
    layer->key_units = divide_product(&layer->key, threads);
    own[0] = layer->query_units + layer->key_units + divide_product(&layer->value, threads);
    own[HEADS_PHASE] = own[MIDDLE_PHASE] = own[END_PHASE] = row_units;
    own[ATTEND_PHASE] = layer->decode_units + prefill_units;
    own[OUTPUT_PHASE] = divide_product(&layer->output, threads);
    own[GATE_PHASE] = divide_product(&layer->gate, threads);
    divide_product(&layer->up, threads);
    own[DOWN_PHASE] = divide_product(&layer->down, threads);
  }
  XLA_FFI_Error *error = run_phases(frame, threads, 1 + (int)trunk.count * LAYER_PHASES, units, work_phase, &trunk);
  free(units);
  return error;
}
