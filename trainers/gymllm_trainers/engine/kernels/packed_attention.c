// Attention of packed rows of trees, forward and backward, for training: `models/attention.py` says what is computed.
//
// Key a is seen by queries a to ends[a] - 1. Queries go by in blocks of QUERIES, keys in groups of GROUP, and a group that
// no query of the block sees is left out of every product: what is computed is what a row's trees need, and the
// queries at a sequence's edges. Scores lie with queries side by side, [keys, QUERIES], so the softmax over keys is
// one of vectors, taken online (Milakov and Gimelshein 2018, arXiv:1805.02867); the backward pass computes them again
// from each query's peak and sum (Dao 2023, arXiv:2307.08691). Every sum is taken in an order that shapes and trees alone
// decide. All is float32.

#include "common.h"
#include "functions.h"

#define QUERIES 64
#define GROUP 8
// Keys whose scores are held at once.
#define KEYS 64
// Rows and vectors of a product that are summed in registers.
#define ROWS 4
#define VECTORS 4
#define HIDDEN -1e30f
#define BARELY -1e29f

typedef struct {
  const float *query, *key, *value;  // [B, T, N, H], [B, T, K, H]
  const int32_t *ends, *positions;   // [B, T]
  const float *mixed, *peak, *total; // backward: what the forward pass gave
  const float *cotangent;            // [B, T, N, H]
  float *out, *out_peak, *out_total; // [B, T, N, H], [B, N, T]
  float *d_query, *d_key, *d_value;  // [B, T, N, H], keys and values for each query head
  long rows, tokens, heads, groups, size, blocks;
  int64_t window; // 0: none
  float scale;
} Packed;

// Keys that some query of a block sees, and what is known of them.
typedef struct {
  long index[KEYS];
  const float *key[KEYS], *value[KEYS];
  int count; // a multiple of GROUP
  bool whole; // every query sees every key
} Chunk;

// to[r][w] = (adds ? to[r][w] : 0) + sum over d of left[r][d] * right[d * stride + w], of `width` numbers.
INLINE void multiply_part(const int vectors, float *const *to, const float *const *left, const float *right, long stride,
                          long depth, bool adds) {
  Floats sums[ROWS][VECTORS];
  UNROLL for (int row = 0; row < ROWS; row++)
    UNROLL for (int at = 0; at < vectors; at++) sums[row][at] = adds ? load(to[row] + at * LANES) : splat(0);
  for (long deep = 0; deep < depth; deep++) {
    Floats numbers[VECTORS];
    UNROLL for (int at = 0; at < vectors; at++) numbers[at] = load(right + deep * stride + at * LANES);
    UNROLL for (int row = 0; row < ROWS; row++) {
      const Floats one = splat(left[row][deep]);
      UNROLL for (int at = 0; at < vectors; at++) sums[row][at] += one * numbers[at];
    }
  }
  UNROLL for (int row = 0; row < ROWS; row++)
    UNROLL for (int at = 0; at < vectors; at++) store(to[row] + at * LANES, sums[row][at]);
}

static void multiply(float *const *to, const float *const *left, const float *right, long stride, long depth, long width,
                     bool adds) {
  for (long from = 0; from < width;) {
    float *part[ROWS];
    for (int row = 0; row < ROWS; row++) part[row] = to[row] + from;
    if (width - from >= VECTORS * LANES) {
      multiply_part(VECTORS, part, left, right + from, stride, depth, adds);
      from += VECTORS * LANES;
    } else {
      multiply_part(1, part, left, right + from, stride, depth, adds);
      from += LANES;
    }
  }
}

// to[r][w] += sum over d of left[d * QUERIES + r] * right[d][w], of ROWS rows.
INLINE void mix_part(const int vectors, float *to, long to_stride, const float *left, const float *const *right, long from,
                     int depth) {
  Floats sums[ROWS][VECTORS];
  UNROLL for (int row = 0; row < ROWS; row++)
    UNROLL for (int at = 0; at < vectors; at++) sums[row][at] = load(to + row * to_stride + at * LANES);
  for (int deep = 0; deep < depth; deep++) {
    Floats numbers[VECTORS];
    UNROLL for (int at = 0; at < vectors; at++) numbers[at] = load(right[deep] + from + at * LANES);
    UNROLL for (int row = 0; row < ROWS; row++) {
      const Floats one = splat(left[deep * QUERIES + row]);
      UNROLL for (int at = 0; at < vectors; at++) sums[row][at] += one * numbers[at];
    }
  }
  UNROLL for (int row = 0; row < ROWS; row++)
    UNROLL for (int at = 0; at < vectors; at++) store(to + row * to_stride + at * LANES, sums[row][at]);
}

// to[q] += sum over a chunk's keys of shares[k][q] * rows[k], for all queries of a block; `to` is [QUERIES, H].
static void mix(float *to, const float *shares, const float *const *rows, int keys, long size) {
  for (long from = 0; from < size;) {
    const int vectors = size - from >= VECTORS * LANES ? VECTORS : 1;
    for (int query = 0; query < QUERIES; query += ROWS) {
      float *part = to + query * size + from;
      if (vectors == VECTORS) mix_part(VECTORS, part, size, shares + query, rows, from, keys);
      else mix_part(1, part, size, shares + query, rows, from, keys);
    }
    from += vectors * LANES;
  }
}

// scores[k][q] = sum over h of rows[k][h] * side[h][q]
static void score(float *scores, const float *const *rows, const float *side, int keys, long size) {
  for (int key = 0; key < keys; key += ROWS) {
    float *to[ROWS];
    for (int row = 0; row < ROWS; row++) to[row] = scores + (key + row) * QUERIES;
    multiply(to, rows + key, side, QUERIES, size, QUERIES, false);
  }
}

// A block of [T, N, H] with queries side by side, [H, QUERIES], times `scale`; 0 where there is no query.
static void lay_beside(float *to, const float *from, long stride, long count, long size, float scale) {
  memset(to, 0, size * QUERIES * sizeof *to);
  for (long query = 0; query < count; query++)
    for (long at = 0; at < size; at++) to[at * QUERIES + query] = from[query * stride + at] * scale;
}

typedef struct {
  const Packed *all;
  long row, head, group, first, count; // queries first to first + count - 1
  long next; // key from which on none was looked at
  int32_t least_depth; // of its queries
  const float *zeros;
} Block;

static void begin(Block *block) {
  const Packed *all = block->all;
  const int32_t *positions = all->positions + block->row * all->tokens + block->first;
  block->count = all->tokens - block->first < QUERIES ? all->tokens - block->first : QUERIES;
  block->least_depth = INT32_MAX;
  for (long at = 0; at < block->count; at++)
    if (positions[at] < block->least_depth) block->least_depth = positions[at];
}

// The next keys that the block's queries see; false if there are none left.
static bool next_chunk(Block *block, Chunk *chunk) {
  const Packed *all = block->all;
  const int32_t *ends = all->ends + block->row * all->tokens, *positions = all->positions + block->row * all->tokens;
  const long last = block->first + block->count - 1, stride = all->groups * all->size;
  const float *key = all->key + block->row * all->tokens * stride + block->group * all->size;
  const float *value = all->value + block->row * all->tokens * stride + block->group * all->size;
  chunk->count = 0;
  chunk->whole = !all->window;
  for (; block->next <= last && chunk->count < KEYS; block->next += GROUP) {
    int64_t most = 0, least = INT32_MAX, deepest = INT32_MIN;
    for (long at = block->next; at < block->next + GROUP; at++) {
      const int64_t end = at < all->tokens ? ends[at] : 0;
      if (at < all->tokens && positions[at] > deepest) deepest = positions[at];
      most = end > most ? end : most;
      least = end < least ? end : least;
    }
    if (most <= block->first || (all->window && block->least_depth - deepest >= all->window)) continue;
    if (least <= last || block->next + GROUP - 1 > block->first) chunk->whole = false;
    for (long at = block->next; at < block->next + GROUP; at++, chunk->count++) {
      const bool there = at < all->tokens;
      chunk->index[chunk->count] = there ? at : -1;
      chunk->key[chunk->count] = there ? key + at * stride : block->zeros;
      chunk->value[chunk->count] = there ? value + at * stride : block->zeros;
    }
  }
  return chunk->count > 0;
}

// Hides from each query the keys that it doesn't see.
static void hide(const Block *block, const Chunk *chunk, float *scores) {
  const Packed *all = block->all;
  const int32_t *ends = all->ends + block->row * all->tokens, *positions = all->positions + block->row * all->tokens;
  _Alignas(64) int32_t depth[QUERIES] = {0};
  if (all->window)
    for (long at = 0; at < block->count; at++) depth[at] = positions[block->first + at];
  Ints lanes;
  for (int lane = 0; lane < LANES; lane++) lanes[lane] = lane;
  for (int key = 0; key < chunk->count; key++) {
    const long index = chunk->index[key];
    // In the block's own numbers; a key that isn't there is seen by none.
    const int64_t from = index - block->first, to = index < 0 ? 0 : ends[index] - block->first;
    const int32_t begin = from < 0 ? 0 : (int32_t)from, end = to < 0 ? 0 : to > QUERIES ? QUERIES : (int32_t)to;
    const int64_t far = all->window && index >= 0 ? positions[index] + all->window : INT32_MAX;
    const int32_t near = far > INT32_MAX ? INT32_MAX : (int32_t)far;
    for (int at = 0; at < QUERIES; at += LANES) {
      const Ints query = lanes + at;
      Ints seen = (query >= begin) & (query < end);
      if (all->window) {
        Ints deep;
        memcpy(&deep, depth + at, sizeof deep);
        seen &= deep < near;
      }
      float *place = scores + key * QUERIES + at;
      store(place, choose(seen, load(place), splat(HIDDEN)));
    }
  }
}

// Bytes of a unit's scratch, in floats: two sides, two chunks of scores, two blocks of queries, zeros.
static size_t unit_floats(long size) { return 4 * size * QUERIES + 2 * KEYS * QUERIES + size; }

static void forward_unit(const void *data, int unit) {
  const Packed *all = data;
  const long size = all->size, stride = all->heads * size;
  // The last blocks have most keys before them: they go first.
  const long block_number = all->blocks - 1 - unit / (all->rows * all->heads);
  const long row = unit / all->heads % all->rows, head = unit % all->heads;
  float *memory = scratch(UNIT_SCRATCH, unit_floats(size) * sizeof(float));
  if (!memory) return;
  float *side = memory, *mixed = side + size * QUERIES, *scores = mixed + size * QUERIES;
  float *zeros = scores + KEYS * QUERIES;
  memset(zeros, 0, size * sizeof(float));
  memset(mixed, 0, size * QUERIES * sizeof(float));
  Block block = {.all = all, .row = row, .head = head, .group = head / (all->heads / all->groups),
                 .first = block_number * QUERIES, .zeros = zeros};
  begin(&block);
  const long place = (row * all->tokens + block.first) * stride + head * size;
  lay_beside(side, all->query + place, stride, block.count, size, all->scale);
  _Alignas(64) float peak[QUERIES], total[QUERIES], keep[QUERIES];
  for (int at = 0; at < QUERIES; at++) peak[at] = HIDDEN, total[at] = 0;
  Chunk chunk;
  while (next_chunk(&block, &chunk)) {
    score(scores, chunk.key, side, chunk.count, size);
    if (!chunk.whole) hide(&block, &chunk, scores);
    bool higher = false;
    for (int at = 0; at < QUERIES; at += LANES) {
      const Floats before = load(peak + at);
      Floats most = before;
      for (int key = 0; key < chunk.count; key++) most = larger(load(scores + key * QUERIES + at), most);
      const Floats kept = exponential(before - most);
      Floats sum = load(total + at) * kept;
      for (int key = 0; key < chunk.count; key++) {
        const Floats number = load(scores + key * QUERIES + at);
        const Floats share = choose((Ints)(number < splat(BARELY)), splat(0), exponential(number - most));
        store(scores + key * QUERIES + at, share);
        sum += share;
      }
      store(peak + at, most);
      store(total + at, sum);
      store(keep + at, kept);
      for (int lane = 0; lane < LANES; lane++) higher |= kept[lane] != 1.0f;
    }
    if (higher)
      for (int query = 0; query < QUERIES; query++)
        for (long at = 0; at < size; at += LANES) {
          float *to = mixed + query * size + at;
          store(to, load(to) * splat(keep[query]));
        }
    mix(mixed, scores, chunk.value, chunk.count, size);
  }
  for (long query = 0; query < block.count; query++) {
    const float share = total[query] > 0 ? 1 / total[query] : 0;
    for (long at = 0; at < size; at += LANES)
      store(all->out + place + query * stride + at, load(mixed + query * size + at) * splat(share));
    const long number = (row * all->heads + head) * all->tokens + block.first + query;
    all->out_peak[number] = peak[query];
    all->out_total[number] = total[query];
  }
}

// One query head of a row: no two units write to the same place.
static void backward_unit(const void *data, int unit) {
  const Packed *all = data;
  const long size = all->size, stride = all->heads * size;
  const long row = unit / all->heads, head = unit % all->heads;
  float *memory = scratch(UNIT_SCRATCH, (unit_floats(size) + size) * sizeof(float));
  if (!memory) return;
  float *side = memory, *turned = side + size * QUERIES, *d_query = turned + size * QUERIES;
  float *scores = d_query + size * QUERIES, *slopes = scores + KEYS * QUERIES;
  float *zeros = slopes + KEYS * QUERIES, *nowhere = zeros + size;
  memset(zeros, 0, size * sizeof(float));
  const long start = row * all->tokens * stride + head * size;
  for (long token = 0; token < all->tokens; token++) {
    memset(all->d_key + start + token * stride, 0, size * sizeof(float));
    memset(all->d_value + start + token * stride, 0, size * sizeof(float));
  }
  for (long number = 0; number < all->blocks; number++) {
    Block block = {.all = all, .row = row, .head = head, .group = head / (all->heads / all->groups),
                   .first = number * QUERIES, .zeros = zeros};
    begin(&block);
    const long place = start + block.first * stride, known = (row * all->heads + head) * all->tokens + block.first;
    const float *query = all->query + place, *cotangent = all->cotangent + place;
    lay_beside(side, query, stride, block.count, size, all->scale);
    lay_beside(turned, cotangent, stride, block.count, size, 1);
    memset(d_query, 0, size * QUERIES * sizeof(float));
    _Alignas(64) float peak[QUERIES] = {0}, share[QUERIES] = {0}, own[QUERIES] = {0};
    for (long at = 0; at < block.count; at++) {
      const float total = all->total[known + at];
      peak[at] = all->peak[known + at];
      share[at] = total > 0 ? 1 / total : 0;
      Floats sum = splat(0);
      for (long number = 0; number < size; number += LANES)
        sum += load(cotangent + at * stride + number) * load(all->mixed + place + at * stride + number);
      own[at] = add_lanes(sum);
    }
    Chunk chunk;
    while (next_chunk(&block, &chunk)) {
      score(scores, chunk.key, side, chunk.count, size);
      if (!chunk.whole) hide(&block, &chunk, scores);
      score(slopes, chunk.value, turned, chunk.count, size);
      for (int key = 0; key < chunk.count; key++)
        for (int at = 0; at < QUERIES; at += LANES) {
          float *place_score = scores + key * QUERIES + at, *slope = slopes + key * QUERIES + at;
          const Floats number = load(place_score);
          const Floats part = exponential(number - load(peak + at)) * load(share + at);
          const Floats seen = choose((Ints)(number < splat(BARELY)), splat(0), part);
          store(place_score, seen);
          store(slope, seen * (load(slope) - load(own + at)) * splat(all->scale));
        }
      for (int key = 0; key < chunk.count; key += ROWS) {
        float *to_key[ROWS], *to_value[ROWS];
        const float *shares[ROWS], *slope[ROWS];
        for (int at = 0; at < ROWS; at++) {
          const long index = chunk.index[key + at];
          to_key[at] = index < 0 ? nowhere : all->d_key + start + index * stride;
          to_value[at] = index < 0 ? nowhere : all->d_value + start + index * stride;
          shares[at] = scores + (key + at) * QUERIES;
          slope[at] = slopes + (key + at) * QUERIES;
        }
        multiply(to_value, shares, cotangent, stride, block.count, size, true);
        multiply(to_key, slope, query, stride, block.count, size, true);
      }
      mix(d_query, slopes, chunk.key, chunk.count, size);
    }
    for (long at = 0; at < block.count; at++)
      memcpy(all->d_query + place + at * stride, d_query + at * size, size * sizeof(float));
  }
}

static Packed read_arguments(XLA_FFI_CallFrame *frame) {
  const XLA_FFI_Buffer *query = argument(frame, 0), *key = argument(frame, 1);
  const int32_t window = *(const int32_t *)argument(frame, 5)->data;
  return (Packed){.query = query->data,
                  .key = key->data,
                  .value = argument(frame, 2)->data,
                  .ends = argument(frame, 3)->data,
                  .positions = argument(frame, 4)->data,
                  .rows = query->dims[0],
                  .tokens = query->dims[1],
                  .heads = query->dims[2],
                  .groups = key->dims[2],
                  .size = query->dims[3],
                  .blocks = (query->dims[1] + QUERIES - 1) / QUERIES,
                  .window = window,
                  .scale = get_float(frame, "scale")};
}

#define NOT_WHOLE "The size of a head must be a multiple of a vector's."

// Arguments: query [B, T, N, H], key and value [B, T, K, H], ends and positions [B, T], window []. Results: mixed values
// [B, T, N, H], and each query's highest score and sum of exp(score - highest), [B, N, T].
XLA_FFI_Error *gymllm_packed_attention(XLA_FFI_CallFrame *frame) {
  if (answer_metadata(frame)) return NULL;
  Packed all = read_arguments(frame);
  if (all.size % LANES) return fail(frame, NOT_WHOLE);
  all.out = result(frame, 0)->data;
  all.out_peak = result(frame, 1)->data;
  all.out_total = result(frame, 2)->data;
  const int units = (int)(all.rows * all.heads * all.blocks);
  return run_parallel(frame, count_threads(frame), units, forward_unit, &all);
}

// Arguments: those of the forward pass, its results, and the cotangent [B, T, N, H]. Results: of query, key and value, [B, T,
// N, H] each: keys' and values' are still to be summed over the query heads that share one.
XLA_FFI_Error *gymllm_packed_attention_backward(XLA_FFI_CallFrame *frame) {
  if (answer_metadata(frame)) return NULL;
  Packed all = read_arguments(frame);
  if (all.size % LANES) return fail(frame, NOT_WHOLE);
  all.mixed = argument(frame, 6)->data;
  all.peak = argument(frame, 7)->data;
  all.total = argument(frame, 8)->data;
  all.cotangent = argument(frame, 9)->data;
  all.d_query = result(frame, 0)->data;
  all.d_key = result(frame, 1)->data;
  all.d_value = result(frame, 2)->data;
  return run_parallel(frame, count_threads(frame), (int)(all.rows * all.heads), backward_unit, &all);
}

// Numbers of a vector: a head's size must be a multiple.
int gymllm_lanes(void) { return LANES; }
