// Attention over the paged cache, for whoever has queries at hand; what is said of it is in attention.c.

#pragma once

#include "common.h"

typedef struct {
  const void *query;       // [B, C, N, H]
  const char *key, *value; // the layer's [P, K, S, H]
  void *out;               // [B, C, N, H]
  const int32_t *table, *start, *count;
  long rows, queries, heads, size, padded;  // H, and H in whole vectors
  long groups, pages, page_size, table_pages;
  long shared;  // N / K
  long parts;   // a row's queries are cut into
  long part_queries;
  bool half_query, half_cache;
  float scale, softcap;
  int64_t window;  // 0: none
} Attention;

// Fills in padded, shared, parts and part_queries from the rest. Returns the number of units, or -1 if a row's
// queries are not within its page table; what they read, in multiplications, is added to `work`.
int divide_attention(Attention *all, double *work);

// One unit: a row, a key-value head, some of its queries; `data` is the Attention.
void attend_unit(const void *data, int unit);

// Keeps a token's key or value, [K, H], at its slot of a layer of the cache [P, K, S, H].
void write_slot(char *cache, bool half_cache, long groups, long page_size, long size, long slot, const void *fresh,
                bool half_fresh);
