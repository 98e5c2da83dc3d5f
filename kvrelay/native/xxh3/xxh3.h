#ifndef KVRELAY_XXH3_H
#define KVRELAY_XXH3_H

#include <stdint.h>

#define XXH3_BLOCK 1024
#define XXH3_LONG_FROM 241 /* shorter inputs are hashed in another way, which is not here */

/* XXH3-64 of at least XXH3_LONG_FROM bytes. `after`: what will be read next, only a hint; any address. */
uint64_t kt_xxh3_long(const uint8_t *data, int64_t size, const uint8_t *after);

/* The same of a chunk: `each` pieces at base + pieces[...], one after the other. `scratch` takes several pieces. */
uint64_t kt_xxh3_chunk(const uint8_t *base, const int64_t *pieces, int64_t each, int64_t piece_bytes,
                      uint8_t *scratch, const uint8_t *after);

/* Copy pieces past the caches, target + target_pieces[i] from source + source_pieces[i]. */
void kt_copy_pieces(uint8_t *target, const uint8_t *source, const int64_t *target_pieces, const int64_t *source_pieces,
                    int64_t num_pieces, int64_t piece_bytes);

/* Copy at least XXH3_LONG_FROM bytes past the caches; their XXH3-64. `after`: as above. */
uint64_t kt_xxh3_copy(uint8_t *target, const uint8_t *source, int64_t size, const uint8_t *after);

#endif
