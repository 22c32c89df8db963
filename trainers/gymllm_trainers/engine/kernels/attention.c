// The paged cache: new keys and values are written to it, and queries attend to the pages of their rows.
//
// Keys are taken in blocks of BLOCK, from a position that BLOCK divides, so a query's softmax is taken
// online over the same blocks whatever stands beside it: one query or a whole prompt, whatever the other
// rows are. Key-value heads are independent; the queries of all heads that share one go by together.

#include "attention.h"
#include "functions.h"

#define BLOCK 64
#define GROUPS (BLOCK / LANES)
// Queries (of all heads that share a key-value head) that go by together.
#define MOST_QUERIES 64
#define HIDDEN -1e30f
// Up to so many read values as they are in the cache.
#define FEW_QUERIES 4

// sums[at][0] + sums[at][1] + ... in lane `at`.
INLINE Floats add_across(const Floats sums[LANES]) {
#if LANES == 16
  __m512 a[8], b[4], c[2];
  UNROLL for (int at = 0; at < 8; at++) {
    const __m512 first = (__m512)sums[at], second = (__m512)sums[at + 8];
    a[at] = _mm512_add_ps(_mm512_shuffle_f32x4(first, second, 0x44), _mm512_shuffle_f32x4(first, second, 0xee));
  }
  // a[at]: eight lanes of sum `at`, eight of sum `at + 8`.
  UNROLL for (int at = 0; at < 4; at++)
    b[at] = _mm512_add_ps(_mm512_shuffle_f32x4(a[at], a[at + 4], 0x88), _mm512_shuffle_f32x4(a[at], a[at + 4], 0xdd));
  // b[at]: four lanes each of sums at, at + 8, at + 4, at + 12.
  UNROLL for (int at = 0; at < 2; at++)
    c[at] = _mm512_add_ps(_mm512_unpacklo_ps(b[at], b[at + 2]), _mm512_unpackhi_ps(b[at], b[at + 2]));
  // c[at]: in each quarter, lanes 0 and 2 of sum `at`, 1 and 3 of sum `at + 2`.
  const __m512 all = _mm512_add_ps(_mm512_unpacklo_ps(c[0], c[1]), _mm512_unpackhi_ps(c[0], c[1]));
  return (Floats)_mm512_shuffle_f32x4(all, all, 0xd8);
#else
  Floats out;
  for (int at = 0; at < LANES; at++) {
    float sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += sums[at][lane];
    out[at] = sum;
  }
  return out;
#endif
}

INLINE float largest(Floats numbers) {
#if LANES == 16
  return _mm512_reduce_max_ps((__m512)numbers);
#else
  float most = numbers[0];
  for (int lane = 1; lane < LANES; lane++) most = numbers[lane] > most ? numbers[lane] : most;
  return most;
#endif
}

INLINE void read_row(const void *from, bool half, long size, long padded, float *to) {
  long at = 0;
  if (half)
    for (; at + LANES <= size; at += LANES) store(to + at, load_bfloat16((const uint16_t *)from + at));
  else
    for (; at + LANES <= size; at += LANES) store(to + at, load((const float *)from + at));
  for (; at < size; at++) to[at] = half ? from_bfloat16(((const uint16_t *)from)[at]) : ((const float *)from)[at];
  for (; at < padded; at++) to[at] = 0;
}

// Rows of a block that will be needed after this one: `bytes` from each of `rows`.
typedef struct {
  const char *const *rows;
  long bytes;
} Next;

// Into the second-level cache: a whole block doesn't fit in the first.
INLINE void prefetch_row(const Next *next, int row) {
  for (long byte = 0; byte < next->bytes; byte += 64) __builtin_prefetch(next->rows[row] + byte, 0, 2);
}

// Scores of one query with LANES keys. Fetches rows `from`, `from + step`, ... of the next
// block's meanwhile: a few at a time, for a processor waits when it has too many on the way.
INLINE Floats score_keys(const float *query, const float *const *keys, const long vectors, const Next *next,
                         int stretch, int from, int step) {
  if (next)
    for (int at = from; at < LANES; at += step) prefetch_row(next, stretch * LANES + at);
  Floats sums[LANES];
  UNROLL for (int at = 0; at < LANES; at++) sums[at] = splat(0);
  for (long vector = 0; vector < vectors; vector++) {
    const Floats part = load(query + vector * LANES);
    UNROLL for (int at = 0; at < LANES; at++) sums[at] += part * load(keys[at] + vector * LANES);
  }
  return add_across(sums);
}

// Adds shares[q][j] * values[j] to mixed[q], for a few queries and one stretch of a head. `half`: values as they are in
// a cache of bfloat16.
INLINE void mix_values(const int queries, const int vectors, const bool half, float *const *mixed,
                       const float *const *shares, const char *const *values, int first, int last, const Next *next) {
  Floats sums[4][4];
  UNROLL for (int query = 0; query < queries; query++)
    UNROLL for (int vector = 0; vector < vectors; vector++) sums[query][vector] = load(mixed[query] + vector * LANES);
  for (int at = first; at < last; at++) {
    if (next) prefetch_row(next, at);
    UNROLL for (int vector = 0; vector < vectors; vector++) {
      const Floats value = half ? load_bfloat16((const uint16_t *)values[at] + vector * LANES)
                                : load((const float *)values[at] + vector * LANES);
      UNROLL for (int query = 0; query < queries; query++) sums[query][vector] += value * splat(shares[query][at]);
    }
  }
  UNROLL for (int query = 0; query < queries; query++)
    UNROLL for (int vector = 0; vector < vectors; vector++) store(mixed[query] + vector * LANES, sums[query][vector]);
}

INLINE void mix_block(const Attention *all, const bool half, int queries, float *mixed, const float *shares,
                      const char *const *values, int first, int last, const Next *next) {
  const long bytes = half ? 2 : 4;
  const char *moved[BLOCK];
  for (long from = 0; from < all->padded; from += 4 * LANES) {
    const int vectors = all->padded - from >= 4 * LANES ? 4 : (int)((all->padded - from) / LANES);
    for (int at = first; at < last; at++) moved[at] = values[at] + from * bytes;
    for (int query = 0; query < queries;) {
      float *to[4];
      const float *share[4];
      const Next *once = from == 0 && query == 0 ? next : NULL;
      const int count = vectors < 4 ? 1 : queries - query >= 4 ? 4 : queries - query;
      for (int at = 0; at < count; at++) {
        to[at] = mixed + (query + at) * all->padded + from;
        share[at] = shares + (query + at) * BLOCK;
      }
      if (vectors == 4) {
        if (count == 4) mix_values(4, 4, half, to, share, moved, first, last, once);
        else if (count == 3) mix_values(3, 4, half, to, share, moved, first, last, once);
        else if (count == 2) mix_values(2, 4, half, to, share, moved, first, last, once);
        else mix_values(1, 4, half, to, share, moved, first, last, once);
      } else {
        for (int vector = 0; vector < vectors; vector++) {
          float *one[1] = {to[0] + vector * LANES};
          const char *part[BLOCK];
          for (int at = first; at < last; at++) part[at] = moved[at] + vector * LANES * bytes;
          mix_values(1, 1, half, one, share, part, first, last, vector ? NULL : once);
        }
      }
      query += count;
    }
  }
}

static void mix_float32(const Attention *all, int queries, float *mixed, const float *shares,
                        const char *const *values, int first, int last, const Next *next) {
  mix_block(all, false, queries, mixed, shares, values, first, last, next);
}

static void mix_bfloat16(const Attention *all, int queries, float *mixed, const float *shares,
                         const char *const *values, int first, int last, const Next *next) {
  mix_block(all, true, queries, mixed, shares, values, first, last, next);
}

typedef struct {
  const char *keys[BLOCK], *values[BLOCK];
} Rows;

// Where a block's keys and values are, from `first` to `last`; what is not seen is not read: another's page may
// hold anything.
static void find_rows(const Attention *all, long row, long group, int64_t block, int first, int last,
                      const void *zeros, Rows *rows) {
  const int32_t *table = all->table + row * all->table_pages;
  const long bytes = all->size * (all->half_cache ? 2 : 4);
  for (int at = 0; at < BLOCK; at++) rows->keys[at] = rows->values[at] = zeros;
  for (int at = first; at < last;) {
    const long page = table[(block + at) / all->page_size], offset = (block + at) % all->page_size;
    const long stop = all->page_size - offset < last - at ? at + all->page_size - offset : last;
    const long index = ((page * all->groups + group) * all->page_size + offset) * bytes;
    const bool there = page >= 0 && page < all->pages;
    for (long number = 0; at < stop; at++, number += bytes) {
      if (!there) continue;
      rows->keys[at] = all->key + index + number;
      rows->values[at] = all->value + index + number;
    }
  }
}

// The first position that some query of a row sees, from query `from` on.
INLINE int64_t first_seen(const Attention *all, long row, long from) {
  const int64_t sees = all->start[row] + from - all->window + 1;
  return all->window && sees > 0 ? sees : 0;
}

INLINE int within(int64_t position, int64_t block) {
  return position < block ? 0 : position < block + BLOCK ? (int)(position - block) : BLOCK;
}

void attend_unit(const void *data, int unit) {
  const Attention *all = data;
  const long part = unit % all->parts, group = unit / all->parts % all->groups, row = unit / all->parts / all->groups;
  const long from = part * all->part_queries, padded = all->padded, size = all->size, shared = all->shared;
  const long number_bytes = all->half_query ? 2 : 4, cache_bytes = all->half_cache ? 2 : 4;
  long end = from + all->part_queries < all->queries ? from + all->part_queries : all->queries;
  const long count = all->count[row] < end ? all->count[row] : end;
  for (long query = count > from ? count : from; query < end; query++) {
    const long at = ((row * all->queries + query) * all->heads + group * shared) * size;
    memset((char *)all->out + at * number_bytes, 0, shared * size * number_bytes);
  }
  if (count <= from) return;
  const int queries = (int)((count - from) * shared);
  const int64_t start = all->start[row];
  float *memory = scratch(UNIT_SCRATCH, (2 * queries * padded + queries * BLOCK + (BLOCK + LANES + 1) * padded + LANES * queries) * 4);
  if (!memory) return;
  float *query = memory, *mixed = query + queries * padded, *shares = mixed + queries * padded;
  float *totals = shares + queries * BLOCK, *zeros = totals + LANES * queries;
  float *key_copies = zeros + padded, *value_copies = key_copies + LANES * padded;
  float most[queries];
  memset(zeros, 0, padded * 4);
  memset(mixed, 0, queries * padded * 4);
  memset(totals, 0, queries * LANES * 4);
  for (int at = 0; at < queries; at++) {
    const long index = ((row * all->queries + from + at / shared) * all->heads + group * shared + at % shared) * size;
    read_row((const char *)all->query + index * number_bytes, all->half_query, size, padded, query + at * padded);
    for (long number = 0; number < size; number++) query[at * padded + number] *= all->scale;
    most[at] = HIDDEN;
  }
  const int64_t final = start + count, seen_first = first_seen(all, row, from);
  // Converted once for all queries; few enough multiply what they read as it is.
  const bool copied_values = size != padded || (all->half_cache && queries > FEW_QUERIES);
  Rows here, later;
  int64_t block = seen_first / BLOCK * BLOCK;
  find_rows(all, row, group, block, within(seen_first, block), within(final, block), zeros, &later);
  for (; block < final; block += BLOCK) {
    const int first = within(seen_first, block), last = within(final, block);
    here = later;
    const int64_t after = block + BLOCK;
    if (after < final) {
      find_rows(all, row, group, after, 0, within(final, after), zeros, &later);
    } else if (group + 1 < all->groups) {
      // Most likely what comes next, on this thread or another.
      const int64_t start_block = seen_first / BLOCK * BLOCK;
      find_rows(all, row, group + 1, start_block, within(seen_first, start_block), within(final, start_block), zeros,
                &later);
    } else if (row + 1 < all->rows && all->count[row + 1]) {
      const int64_t seen = first_seen(all, row + 1, 0), start_block = seen / BLOCK * BLOCK;
      find_rows(all, row + 1, 0, start_block, within(seen, start_block),
                within((int64_t)all->start[row + 1] + all->count[row + 1], start_block), zeros, &later);
    }
    const Next next_keys = {later.keys, size * cache_bytes}, next_values = {later.values, size * cache_bytes};
    const char *values[BLOCK];
    for (int at = 0; at < BLOCK; at++) {
      values[at] = here.values[at];
      if (copied_values && (const float *)values[at] != zeros) {
        read_row(here.values[at], all->half_cache, size, padded, value_copies + at * padded);
        values[at] = (const char *)(value_copies + at * padded);
      }
    }
    const int turns = queries < 4 ? queries : 4;
    for (int stretch = 0; stretch < GROUPS; stretch++) {
      const float *keys[LANES];
      // Of which no query sees a key: its scores are hidden below, whatever they are.
      if (stretch * LANES >= last || (stretch + 1) * LANES <= first) {
        for (int at = 0; at < LANES; at++) prefetch_row(&next_keys, stretch * LANES + at);
        for (int at = 0; at < queries; at++) store(shares + at * BLOCK + stretch * LANES, splat(0));
        continue;
      }
      for (int at = 0; at < LANES; at++) {
        keys[at] = (const float *)here.keys[stretch * LANES + at];
        if ((all->half_cache || size != padded) && keys[at] != zeros) {
          read_row(keys[at], all->half_cache, size, padded, key_copies + at * padded);
          keys[at] = key_copies + at * padded;
        }
      }
      for (int at = 0; at < queries; at++) {
        const Next *next = at < turns ? &next_keys : NULL;
        const float *own = query + at * padded;
        const Floats scores = padded == 4 * LANES ? score_keys(own, keys, 4, next, stretch, at, turns)
                                                  : score_keys(own, keys, padded / LANES, next, stretch, at, turns);
        store(shares + at * BLOCK + stretch * LANES, scores);
      }
    }
    for (int at = 0; at < queries; at++) {
      Floats scores[GROUPS];
      for (int vector = 0; vector < GROUPS; vector++) scores[vector] = load(shares + at * BLOCK + vector * LANES);
      const int64_t position = start + from + at / shared - block;
      // Keys low .. high of the block are seen.
      const int high = position < BLOCK ? (int)position : BLOCK - 1;
      const int low = all->window && position - all->window + 1 > 0
                          ? (int)(position - all->window + 1 < BLOCK ? position - all->window + 1 : BLOCK)
                          : 0;
      Ints seen[GROUPS];
      Floats highest = splat(HIDDEN);
      for (int vector = 0; vector < GROUPS; vector++) {
        Ints there;
        for (int lane = 0; lane < LANES; lane++) there[lane] = vector * LANES + lane;
        seen[vector] = (Ints)((there >= low) & (there <= high));
        if (all->softcap > 0) scores[vector] = splat(all->softcap) * hyperbolic_tangent(scores[vector] / all->softcap);
        scores[vector] = choose(seen[vector], scores[vector], splat(HIDDEN));
        highest = larger(highest, scores[vector]);
      }
      const float before = most[at], top = largest(highest), now = top > before ? top : before;
      most[at] = now;
      Floats total = load(totals + at * LANES);
      if (now > before) {
        const Floats keep = exponential(splat(before - now));
        total *= keep;
        for (long number = 0; number < padded; number += LANES)
          store(mixed + at * padded + number, load(mixed + at * padded + number) * keep);
      }
      for (int vector = 0; vector < GROUPS; vector++) {
        const Floats share = choose(seen[vector], exponential(scores[vector] - splat(now)), splat(0));
        total += share;
        store(shares + at * BLOCK + vector * LANES, share);
      }
      store(totals + at * LANES, total);
    }
    if (all->half_cache && !copied_values) mix_bfloat16(all, queries, mixed, shares, values, first, last, &next_values);
    else mix_float32(all, queries, mixed, shares, values, first, last, &next_values);
  }
  for (int at = 0; at < queries; at++) {
    const long index = ((row * all->queries + from + at / shared) * all->heads + group * shared + at % shared) * size;
    const float total = add_lanes(load(totals + at * LANES));
    for (long number = 0; number < size; number++) {
      const float share = mixed[at * padded + number] / total;
      if (all->half_query) ((uint16_t *)all->out)[index + number] = to_bfloat16(share);
      else ((float *)all->out)[index + number] = share;
    }
  }
}

int divide_attention(Attention *all, double *work) {
  all->padded = (all->size + LANES - 1) / LANES * LANES;
  all->shared = all->heads / all->groups;
  all->part_queries = MOST_QUERIES / all->shared > 0 ? MOST_QUERIES / all->shared : 1;
  all->parts = (all->queries + all->part_queries - 1) / all->part_queries;
  int64_t read = 0;
  for (long row = 0; row < all->rows; row++) {
    if (all->count[row] < 0 || all->count[row] > all->queries || all->start[row] < 0 ||
        (all->count[row] && (int64_t)all->start[row] + all->count[row] > all->table_pages * all->page_size))
      return -1;
    if (all->count[row]) read += (all->start[row] + all->count[row]) * (1 + all->count[row] / 4);
  }
  *work += (double)read * all->heads * all->size;
  return (int)(all->rows * all->groups * all->parts);
}

// Arguments: query [B, C, N, H], key and value [L, P, K, S, H], layer [], table [B, M], start [B], count [B],
// window [] (0: none). Attributes: scale, softcap (0: none). Result: [B, C, N, H].
XLA_FFI_Error *gymllm_paged_attention(XLA_FFI_CallFrame *frame) {
  if (answer_metadata(frame)) return NULL;
  const XLA_FFI_Buffer *query = argument(frame, 0), *key = argument(frame, 1), *value = argument(frame, 2);
  const XLA_FFI_Buffer *table = argument(frame, 4);
  Attention all = {.query = query->data,
                   .out = result(frame, 0)->data,
                   .table = table->data,
                   .start = argument(frame, 5)->data,
                   .count = argument(frame, 6)->data,
                   .rows = query->dims[0],
                   .queries = query->dims[1],
                   .heads = query->dims[2],
                   .size = query->dims[3],
                   .pages = key->dims[1],
                   .groups = key->dims[2],
                   .page_size = key->dims[3],
                   .table_pages = table->dims[1],
                   .half_query = query->dtype == XLA_FFI_DataType_BF16,
                   .half_cache = key->dtype == XLA_FFI_DataType_BF16,
                   .window = *(const int32_t *)argument(frame, 7)->data,
                   .scale = get_float(frame, "scale"),
                   .softcap = get_float(frame, "softcap")};
  const int64_t layer = *(const int32_t *)argument(frame, 3)->data;
  if (layer < 0 || layer >= key->dims[0]) return fail(frame, "There is no such layer.");
  const int64_t layer_bytes = all.pages * all.groups * all.page_size * all.size * (all.half_cache ? 2 : 4);
  all.key = (const char *)key->data + layer * layer_bytes;
  all.value = (const char *)value->data + layer * layer_bytes;
  double work = 0;
  const int units = divide_attention(&all, &work);
  if (units < 0) return fail(frame, "A row's queries are not within its page table.");
  return run_parallel(frame, work > WORTH_SHARING ? count_threads(frame) : 1, units, attend_unit, &all);
}

void write_slot(char *cache, bool half_cache, long groups, long page_size, long size, long slot, const void *fresh,
                bool half_fresh) {
  const long page = slot / page_size, offset = slot % page_size, bytes = half_cache ? 2 : 4;
  for (long group = 0; group < groups; group++) {
    char *to = cache + ((page * groups + group) * page_size + offset) * size * bytes;
    const char *from = (const char *)fresh + group * size * (half_fresh ? 2 : 4);
    if (half_cache == half_fresh) memcpy(to, from, size * bytes);
    else if (half_cache)
      for (long number = 0; number < size; number++) ((uint16_t *)to)[number] = to_bfloat16(((const float *)from)[number]);
    else
      for (long number = 0; number < size; number++) ((float *)to)[number] = from_bfloat16(((const uint16_t *)from)[number]);
  }
}

// Arguments: key and value [L, P, K, S, H] (the results, in place), layer [], new key and value [T, K, H],
// slot [T].
XLA_FFI_Error *gymllm_write_pages(XLA_FFI_CallFrame *frame) {
  if (answer_metadata(frame)) return NULL;
  const XLA_FFI_Buffer *new_key = argument(frame, 3), *slot = argument(frame, 5);
  const int64_t layer = *(const int32_t *)argument(frame, 2)->data;
  const bool half_new = new_key->dtype == XLA_FFI_DataType_BF16;
  for (int which = 0; which < 2; which++) {
    const XLA_FFI_Buffer *old = argument(frame, which), *cache = result(frame, which);
    const bool half = cache->dtype == XLA_FFI_DataType_BF16;
    const long pages = cache->dims[1], groups = cache->dims[2], page_size = cache->dims[3], size = cache->dims[4];
    const long bytes = half ? 2 : 4, new_bytes = half_new ? 2 : 4;
    if (layer < 0 || layer >= cache->dims[0]) return fail(frame, "There is no such layer.");
    if (old->data != cache->data) memcpy(cache->data, old->data, cache->dims[0] * pages * groups * page_size * size * bytes);
    const char *fresh = argument(frame, 3 + which)->data;
    for (long token = 0; token < slot->dims[0]; token++) {
      const long at = ((const int32_t *)slot->data)[token];
      if (at < 0 || at >= pages * page_size) return fail(frame, "A slot is not in the cache.");
      write_slot((char *)cache->data + layer * pages * groups * page_size * size * bytes, half, groups, page_size, size,
                 at, fresh + token * groups * size * new_bytes, half_new);
    }
  }
  return NULL;
}
