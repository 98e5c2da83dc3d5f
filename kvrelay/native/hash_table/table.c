/* Open addressing with linear probing, in shards, so that none takes long to grow; removing closes the gap that it makes. */

#include "table.h"

#include <stdlib.h>

#define SMALLEST 8 /* entries of a shard that has any */

static inline uint32_t row_of(entry e) { return (uint32_t)(e >> 32); }
static inline entry make(uint32_t row, uint64_t key) { return (entry)row << 32 | (uint32_t)key; }

uint32_t kr_table_find(const struct table *table, uint64_t key, const uint8_t *hash, const uint8_t *column)
{
    const struct shard *shard = &table->shards[shard_of(key)];
    if (shard->size == 0) return 0;
    uint32_t mask = shard->size - 1;
    for (uint32_t i = (uint32_t)key & mask; shard->entries[i] != 0; i = (i + 1) & mask) {
        uint32_t row = row_of(shard->entries[i]);
        if ((uint32_t)shard->entries[i] == (uint32_t)key && memcmp(column + (size_t)row * HASH_BYTES, hash, HASH_BYTES) == 0) return row;
    }
    return 0;
}

/* The entry of this row, whose hash has this key, or NULL. */
static entry *entry_of(const struct shard *shard, uint64_t key, uint32_t row)
{
    if (shard->size == 0) return NULL;
    uint32_t mask = shard->size - 1;
    for (uint32_t i = (uint32_t)key & mask; shard->entries[i] != 0; i = (i + 1) & mask)
        if (shard->entries[i] == make(row, key)) return &shard->entries[i];
    return NULL;
}

static void put(struct shard *shard, entry e)
{
    uint32_t mask = shard->size - 1, i = (uint32_t)e & mask;
    while (shard->entries[i] != 0) i = (i + 1) & mask;
    shard->entries[i] = e;
}

/* 0, or -1: no memory, and nothing has changed. */
static int resize(struct shard *shard, uint32_t size)
{
    struct shard other = {calloc(size, sizeof(entry)), size, shard->used};
    if (other.entries == NULL) return -1;
    for (uint32_t i = 0; i < shard->size; i++)
        if (shard->entries[i] != 0) put(&other, shard->entries[i]);
    free(shard->entries);
    *shard = other;
    return 0;
}

int kr_table_add(struct table *table, uint64_t key, uint32_t row)
{
    struct shard *shard = &table->shards[shard_of(key)];
    int is_full = 4 * (uint64_t)(shard->used + 1) > 3 * (uint64_t)shard->size;
    if (is_full && resize(shard, shard->size ? 2 * shard->size : SMALLEST) != 0) return -1;
    put(shard, make(row, key));
    shard->used++;
    table->count++;
    return 0;
}

void kr_table_move(struct table *table, uint64_t key, uint32_t row, uint32_t target)
{
    entry *e = entry_of(&table->shards[shard_of(key)], key, row);
    if (e != NULL) *e = make(target, key);
}

void kr_table_remove(struct table *table, uint64_t key, uint32_t row)
{
    struct shard *shard = &table->shards[shard_of(key)];
    entry *e = entry_of(shard, key, row);
    if (e == NULL) return;
    uint32_t mask = shard->size - 1, hole = (uint32_t)(e - shard->entries);
    for (uint32_t i = (hole + 1) & mask; shard->entries[i] != 0; i = (i + 1) & mask) {
        uint32_t home = (uint32_t)shard->entries[i] & mask;
        if (((i - home) & mask) >= ((i - hole) & mask)) { /* probing from its home passes the hole */
            shard->entries[hole] = shard->entries[i];
            hole = i;
        }
    }
    shard->entries[hole] = 0;
    shard->used--;
    table->count--;
    if (shard->size > SMALLEST && 8 * (uint64_t)shard->used < shard->size) (void)resize(shard, shard->size / 2); /* or it stays large */
}

size_t kr_table_bytes(const struct table *table)
{
    size_t total = sizeof *table;
    for (int i = 0; i < NUM_SHARDS; i++) total += table->shards[i].size * sizeof(entry);
    return total;
}

void kr_table_clear(struct table *table)
{
    for (int i = 0; i < NUM_SHARDS; i++) free(table->shards[i].entries);
}
