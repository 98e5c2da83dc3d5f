/* An index from 16-byte hashes to the rows that hold them. The hashes themselves lie in the caller's column, 16 bytes a row. */

#ifndef KVRELAY_HASH_TABLE_H
#define KVRELAY_HASH_TABLE_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define HASH_BYTES 16
#ifndef NUM_SHARDS
#define NUM_SHARDS 256 /* a power of two */
#endif
#define BATCH 32 /* hashes that are looked up together: their entries lie all over memory and are prefetched meanwhile */

/* The low half of a hash's own hash, and above it its row. 0: empty, since row 0 is never used. */
typedef uint64_t entry;

struct shard {
    entry *entries;
    uint32_t size, used; /* size: a power of two, or 0 */
};

struct table {
    uint64_t seed;
    size_t count;
    struct shard shards[NUM_SHARDS];
};

/* The table's hash of a 16-byte hash. Depends on the seed, so that no client can choose prompts that collide. */
static inline uint64_t key_of(const struct table *table, const uint8_t *hash)
{
    uint64_t a, b;
    memcpy(&a, hash, 8);
    memcpy(&b, hash + 8, 8);
    __uint128_t product = (__uint128_t)(a ^ table->seed) * (b ^ 0x9e3779b97f4a7c15u);
    uint64_t mixed = (uint64_t)(product >> 64) ^ (uint64_t)product ^ a ^ (b << 32 | b >> 32);
    product = (__uint128_t)mixed * (table->seed | 1);
    return (uint64_t)(product >> 64) ^ (uint64_t)product;
}

static inline uint32_t shard_of(uint64_t key) { return (uint32_t)(key >> 56) & (NUM_SHARDS - 1); }

/* Fetch the entry of this key into the cache. */
static inline void prefetch(const struct table *table, uint64_t key)
{
    const struct shard *shard = &table->shards[shard_of(key)];
    if (shard->size != 0) __builtin_prefetch(&shard->entries[(uint32_t)key & (shard->size - 1)], 1);
}

/* The row that holds this hash; 0: none. */
uint32_t kr_table_find(const struct table *table, uint64_t key, const uint8_t *hash, const uint8_t *column);

/* Add a row whose hash has this key and no row yet. 0, or -1: no memory, and nothing has changed. */
int kr_table_add(struct table *table, uint64_t key, uint32_t row);

/* A row's hash is at `target` from now on. Nothing happens where the row is unknown. */
void kr_table_move(struct table *table, uint64_t key, uint32_t row, uint32_t target);

/* Remove a row, if it is known. */
void kr_table_remove(struct table *table, uint64_t key, uint32_t row);

/* Bytes of memory that the table has. */
size_t kr_table_bytes(const struct table *table);

/* Free what the table has allocated, not the table. */
void kr_table_clear(struct table *table);

#endif
